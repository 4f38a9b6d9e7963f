// The operators over fitted.cuh: a fitted transform by itself, and codes of what it makes.
#include "common.cuh"
#include "fitted.cuh"

namespace aoquant {
namespace {

int blocks_for(int64_t rows, int strips, int warps, int resident) {
  const int64_t tiles = (rows + 15) / 16, most = (tiles + warps - 1) / warps, room = int64_t(multiprocessors()) * resident / strips;
  return strips * int(room < 1 ? 1 : room < most ? room : most);
}

template <typename T, int G, int RESULT>
void launch(const fitted::Call& p, int blocks, cudaStream_t stream) {
  using L = fitted::Layout<T, G>;
  auto* kernel = fitted::kernel<T, G, RESULT>;
  constexpr int BYTES = L::bytes(RESULT);
  if (BYTES > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    STD_TORCH_CHECK(error == cudaSuccess, "a block of a fitted transform does not fit this device: ", cudaGetErrorString(error));
  }
  launch_early(kernel, blocks, L::THREADS, BYTES, stream, p);
}

// Launches RESULT; returns its blocks.
template <int RESULT>
int run(fitted::Call& p, ScalarType type, int64_t size, cudaStream_t stream) {
  int blocks = 0;
  auto of_size = [&](auto unit, auto g) {
    constexpr int G = decltype(g)::value;
    using L = fitted::Layout<decltype(unit), G>;
    p.strips = (p.k + L::COLUMNS - 1) / L::COLUMNS;
    blocks = blocks_for(p.rows, p.strips, L::WARPS, L::RESIDENT);
    if (RESULT != fitted::AMAX || p.partials) launch<decltype(unit), G, RESULT>(p, blocks, stream);
  };
  auto of_type = [&](auto unit) {
    if (size == 16) of_size(unit, std::integral_constant<int, 16>());
    else if (size == 32) of_size(unit, std::integral_constant<int, 32>());
    else if (size == 64) of_size(unit, std::integral_constant<int, 64>());
    else of_size(unit, std::integral_constant<int, 128>());
  };
  if (type == ScalarType::BFloat16) of_type(__nv_bfloat16());
  else if (type == ScalarType::Half) of_type(__half());
  else of_type(float());
  return blocks;
}

fitted::Call call_of(const Tensor& x, const Tensor& matrix) {
  check_floats(x, 2);
  check_tensor(matrix, "matrix", x, 3, 16);
  check_type(matrix, "matrix", {ScalarType::Float});
  const int64_t size = matrix.size(2);
  STD_TORCH_CHECK((size == 16 || size == 32 || size == 64 || size == 128) && matrix.size(1) == size && matrix.size(0) * size == x.size(1),
                  "matrix must be (K / G, G, G) for G = 16, 32, 64 or 128");
  fitted::Call p{};
  p.x = x.data_ptr(), p.matrix = static_cast<const float*>(matrix.data_ptr()), p.rows = x.size(0), p.k = int(x.size(1));
  return p;
}

// Blocks of x (R, K) times matrix^T, or, back, times matrix: (R, K) in bfloat16, float16 or float32, out = 1, 2 or 3.
Tensor transform_fitted(const Tensor& x, const Tensor& matrix, bool back, int64_t out) {
  fitted::Call p = call_of(x, matrix);
  DeviceGuard guard(x.get_device_index());
  STD_TORCH_CHECK(out != 0, "out must name the dtype of the result");
  Tensor y = make(x, x.sizes(), values_type(out));
  p.y = y.data_ptr(), p.back = back, p.out = int(out);
  run<fitted::VALUES>(p, x.scalar_type(), matrix.size(2), current_stream(x));
  check_launch();
  return y;
}

// Codes (R, K / 2), scale bytes (R, K / block) and outer (1, 1) or (0, 0) of blocks of x times matrix^T. block: 16 for
// NVFP4, 32 for MXFP4. known: NVFP4's outer scale, 0 for none, or negative if it is to be found.
std::tuple<Tensor, Tensor, Tensor> encode_fitted(const Tensor& x, const Tensor& matrix, int64_t block, double known) {
  fitted::Call p = call_of(x, matrix);
  STD_TORCH_CHECK((block == 16 || block == 32) && p.k % block == 0, "blocks have 16 values or 32, and K is a multiple of them");
  DeviceGuard guard(x.get_device_index());
  const auto type = x.scalar_type();
  const auto stream = current_stream(x);
  const int64_t size = matrix.size(2);
  const bool has_outer = block == 16 && known != 0;
  Tensor codes = make(x, {p.rows, p.k / 2}, ScalarType::Byte), scale = make(x, {p.rows, p.k / block}, ScalarType::Byte);
  Tensor outer = make(x, {has_outer, has_outer}, ScalarType::Float);
  p.codes = static_cast<uint8_t*>(codes.data_ptr()), p.scale = static_cast<uint8_t*>(scale.data_ptr());
  p.outer = has_outer ? static_cast<float*>(outer.data_ptr()) : nullptr, p.known = float(known);
  std::optional<Tensor> partials;
  if (has_outer && known < 0) {
    const int blocks = run<fitted::AMAX>(p, type, size, stream);  // no partials yet: it counts them
    partials = make(x, {1, blocks}, ScalarType::Int);
    p.partials = static_cast<int32_t*>(partials->data_ptr()), p.n_partials = blocks;
    run<fitted::AMAX>(p, type, size, stream);
  }
  if (block == 16) run<fitted::AS_NVFP4>(p, type, size, stream);
  else run<fitted::AS_MXFP4>(p, type, size, stream);
  check_launch();
  return {codes, scale, outer};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(aoquant_native, m) {
  m.def("transform_fitted(Tensor x, Tensor matrix, bool back, int out) -> Tensor");
  m.def("encode_fitted(Tensor x, Tensor matrix, int block, float known) -> (Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(aoquant_native, CUDA, m) {
  m.impl("transform_fitted", TORCH_BOX(&transform_fitted));
  m.impl("encode_fitted", TORCH_BOX(&encode_fitted));
}

}  // namespace aoquant

// Encoder of NVFP4 with searched scales: codes, e4m3 scales, and the decoded values, in one pass over x.
//
// A thread holds one block of 16 values, so a sum over them is in order; `search.cuh` says how a block is decided.
#include "common.cuh"
#include "search.cuh"

namespace aoquant {
namespace {

constexpr int THREADS = 256, RESIDENT = 4;  // blocks of threads on a multiprocessor

template <typename T>
__global__ void __launch_bounds__(THREADS, RESIDENT) search_kernel(const SearchArgs p) {
  __shared__ SearchEntry table[128];
  let_next_begin();
  wait_for_inputs();
  float t = p.outer ? *p.outer : 1.0f, inverse = __fdiv_rn(1.0f, t);
  if (threadIdx.x < 128) table[threadIdx.x] = make_search_entry(threadIdx.x, inverse);
  __syncthreads();
  for (int block = int(blockIdx.x) * THREADS + threadIdx.x; block < p.blocks; block += int(gridDim.x) * THREADS) {
    Packed<T> x;
    x.load(static_cast<const T*>(p.x) + int64_t(block) * 16);
    search_block(p, t, inverse, table, x, block);
  }
}

// x (R, K), outer (1, 1) float32 or empty -> codes (R, K / 2), scale (R, K / 16) bytes, and values (R, K), or (0, 0)
// for out = 0.
std::tuple<Tensor, Tensor, Tensor> encode_search(const Tensor& x, const Tensor& outer, int64_t out, bool operand) {
  check_floats(x, 2);
  STD_TORCH_CHECK(x.size(1) % 16 == 0, "x must be (R, K) with K a multiple of 16");
  check_tensor(outer, "outer", x, ANY_DIMENSIONS, sizeof(float));
  check_type(outer, "outer", {ScalarType::Float});
  STD_TORCH_CHECK(outer.numel() <= 1, "outer must be one number, or empty");
  int64_t rows = x.size(0), k = x.size(1), blocks = rows * k / 16;
  STD_TORCH_CHECK(blocks < int64_t(1) << 30, "x must hold fewer than 2^34 values");
  DeviceGuard guard(x.get_device_index());
  const ScalarType type_of_values = values_type(out);
  Tensor codes = make(x, {rows, k / 2}, ScalarType::Byte), scale = make(x, {rows, k / 16}, ScalarType::Byte);
  Tensor values = out ? make(x, {rows, k}, type_of_values) : make(x, {0, 0}, ScalarType::Byte);
  SearchArgs p{x.data_ptr(), outer.numel() ? static_cast<const float*>(outer.data_ptr()) : nullptr, static_cast<uint8_t*>(codes.data_ptr()),
               static_cast<uint8_t*>(scale.data_ptr()), values.data_ptr(), int(out), int(operand), int(blocks)};
  int64_t wanted = (blocks + THREADS - 1) / THREADS, most = int64_t(multiprocessors()) * RESIDENT;
  auto type = x.scalar_type();
  auto kernel = type == ScalarType::BFloat16 ? search_kernel<__nv_bfloat16> : type == ScalarType::Half ? search_kernel<__half> : search_kernel<float>;
  launch_early(kernel, int(wanted < most ? wanted : most), THREADS, current_stream(x), p);
  check_launch();
  return {codes, scale, values};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(aoquant_native, m) {
  m.def("encode_search(Tensor x, Tensor outer, int out, bool operand) -> (Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(aoquant_native, CUDA, m) { m.impl("encode_search", TORCH_BOX(&encode_search)); }

}  // namespace aoquant

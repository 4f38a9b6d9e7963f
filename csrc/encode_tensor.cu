// The operator over encode_tensor.cuh.
#include <atomic>
#include <vector>

#include "encode_tensor.cuh"

namespace aoquant {
namespace {

template <typename T, int KIND>
void launch(const whole::Call& p, int grid, cudaStream_t stream) {
  auto* kernel = whole::kernel<T, KIND>;
  static std::atomic<uint64_t> asked = 0;  // devices that were asked for the memory
  int device = 0;
  cudaGetDevice(&device);
  const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
  if (!(asked & bit)) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, whole::KEPT);
    STD_TORCH_CHECK(error == cudaSuccess, "the encoder does not fit this device: ", cudaGetErrorString(error));
    asked |= bit;
  }
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid), config.blockDim = dim3(whole::THREADS), config.dynamicSmemBytes = whole::KEPT, config.stream = stream;
  config.attrs = &together, config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, p);
}

// x (R, K) -> outer, then what is asked for: codes, scale, values. kind 0, NVFP4 under an outer scale of the tensor: codes
// (R, K / 2), scale (R, K / 16) bytes. kind 1, e4m3 under one scale: codes (R, K), and no others. outer (1, 1): the scale
// of the tensor. keep: whether codes and scales are asked for. out: dtype of the values, 0 for none; operand: values
// without the scale `outer`.
std::vector<Tensor> encode_tensor(const Tensor& x, int64_t kind, bool keep, int64_t out, bool operand) {
  check_floats(x, 2);
  STD_TORCH_CHECK(x.numel() > 0 && x.size(1) % 16 == 0, "x must be (R, K) with K a multiple of 16, and not empty");
  STD_TORCH_CHECK(kind == whole::OF_NVFP4 || kind == whole::OF_FP8, "kind must be one of Kind");
  const int64_t rows = x.size(0), k = x.size(1), blocks = rows * k / 16;
  STD_TORCH_CHECK(blocks < int64_t(1) << 30, "x must hold fewer than 2^34 values");
  DeviceGuard guard(x.get_device_index());
  const ScalarType type_of_values = values_type(out);
  std::vector<Tensor> made;
  made.reserve(4);
  auto next = [&](int64_t r, int64_t n, ScalarType type) { return made.emplace_back(make(x, {r, n}, type)).data_ptr(); };
  auto* outer = static_cast<float*>(next(1, 1, ScalarType::Float));
  auto* codes = static_cast<uint8_t*>(keep ? next(rows, kind == whole::OF_NVFP4 ? k / 2 : k, ScalarType::Byte) : nullptr);
  auto* scale = static_cast<uint8_t*>(keep && kind == whole::OF_NVFP4 ? next(rows, k / 16, ScalarType::Byte) : nullptr);
  void* values = out ? next(rows, k, type_of_values) : nullptr;
  const int64_t chunks = (blocks + whole::THREADS - 1) / whole::THREADS, most = multiprocessors() < whole::THREADS ? multiprocessors() : whole::THREADS;
  const int grid = int(chunks < most ? chunks : most);
  const Tensor partials = make(x, {grid}, ScalarType::Int);
  whole::Call p{x.data_ptr(), static_cast<int32_t*>(partials.data_ptr()), codes, scale, outer, values, int(blocks), int(out), int(operand)};
  const auto stream = current_stream(x);
  auto run = [&](auto unit) {
    using T = decltype(unit);
    if (kind == whole::OF_NVFP4) launch<T, whole::OF_NVFP4>(p, grid, stream);
    else launch<T, whole::OF_FP8>(p, grid, stream);
  };
  const auto type = x.scalar_type();
  if (type == ScalarType::BFloat16) run(__nv_bfloat16());
  else if (type == ScalarType::Half) run(__half());
  else run(float());
  check_launch();
  return made;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(aoquant_native, m) {
  m.def("encode_tensor(Tensor x, int kind, bool keep, int out, bool operand) -> Tensor[]");
}
STABLE_TORCH_LIBRARY_IMPL(aoquant_native, CUDA, m) { m.impl("encode_tensor", TORCH_BOX(&encode_tensor)); }

}  // namespace aoquant

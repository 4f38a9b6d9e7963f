// The parts of torch that every source of this folder uses: its tensors through the stable ABI, the current stream, and
// checks.
//
// A source registers its own operators, STABLE_TORCH_LIBRARY_FRAGMENT(aoquant_native, m) and _IMPL(aoquant_native,
// CUDA, m): any file may be added or removed alone. `aoquant/ops/native.py` loads the library and says which operators
// it holds.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>

#include "arguments.h"

namespace aoquant {

using torch::stable::accelerator::DeviceGuard;

inline cudaStream_t current_stream(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// A launch that failed says so at once; nothing waits for the kernel.
inline void check_launch() {
  cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "CUDA launch failed: ", cudaGetErrorString(error));
}

inline int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// Programmatic dependent launch: a kernel launched by `launch_early` may begin while the one before it in its stream
// ends. Every one of its threads calls `wait_for_inputs` before it touches global memory, and all that came before has
// then happened; what precedes it overlaps.
__device__ __forceinline__ void wait_for_inputs() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

template <typename... Parameters>
void launch_early(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream, Parameters... arguments) {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  config.attrs = &early, config.numAttrs = major >= 9 ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <typename... Parameters>
void launch_early(void (*kernel)(Parameters...), dim3 grid, int threads, cudaStream_t stream, Parameters... arguments) {
  launch_early(kernel, grid, threads, 0, stream, arguments...);
}

// x of an operator, which decides the device of the rest.
inline void check_input(const Tensor& x, int64_t dims, std::initializer_list<ScalarType> types) {
  STD_TORCH_CHECK(x.is_cuda(), "x must be on a CUDA device");
  check_tensor(x, "x", x, dims, 16);
  check_type(x, "x", types);
}
inline void check_floats(const Tensor& x, int64_t dims = ANY_DIMENSIONS) { check_input(x, dims, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float}); }

// The dtype of an encoder's values: `out` of its schema, 0 for none.
inline ScalarType values_type(int64_t out) {
  constexpr ScalarType DTYPES[] = {ScalarType::BFloat16, ScalarType::BFloat16, ScalarType::Half, ScalarType::Float};
  STD_TORCH_CHECK(out >= 0 && out < 4, "out must be 0 (no values), 1 (bfloat16), 2 (float16) or 3 (float32), got ", out);
  return DTYPES[out];
}

}  // namespace aoquant

// Largest finite magnitude of a tensor, as partial maxima that the next kernel finishes: no atomics, no cleared buffer, no sync.
//
// Magnitudes are compared as the bits of float32, which sort like the values; NaN and Inf, whose bits are larger than any finite
// value's, count as 0. Two bf16 values in a word are compared as they lie there.
#include "common.cuh"

namespace aoquant {
namespace {

constexpr int THREADS = 256, PARTIALS = 528;  // 4 blocks on each multiprocessor of an H200

__device__ __forceinline__ uint32_t finite(uint32_t magnitude) { return magnitude < 0x7F800000u ? magnitude : 0u; }

template <typename T>
__device__ __forceinline__ uint32_t word_max(uint32_t w);

template <>
__device__ __forceinline__ uint32_t word_max<float>(uint32_t w) {
  return finite(w & 0x7FFFFFFFu);
}
template <>
__device__ __forceinline__ uint32_t word_max<__nv_bfloat16>(uint32_t w) {
  return max(finite((w << 16) & 0x7FFFFFFFu), finite(w & 0x7FFF0000u));
}
template <>
__device__ __forceinline__ uint32_t word_max<__half>(uint32_t w) {
  float2 v = __half22float2(*reinterpret_cast<const __half2*>(&w));
  return max(finite(__float_as_uint(fabsf(v.x))), finite(__float_as_uint(fabsf(v.y))));
}

// n is a count of 16-byte vectors.
template <typename T>
__global__ void __launch_bounds__(THREADS) finite_absmax_kernel(const uint4* __restrict__ x, int32_t* __restrict__ partials, int64_t n) {
  uint32_t most = 0;
  int64_t stride = int64_t(gridDim.x) * THREADS, i = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  for (; i + 3 * stride < n; i += 4 * stride) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = x[i + j * stride];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      most = max(max(max(most, word_max<T>(v[j].x)), max(word_max<T>(v[j].y), word_max<T>(v[j].z))), word_max<T>(v[j].w));
  }
  for (; i < n; i += stride) {
    uint4 v = x[i];
    most = max(max(max(most, word_max<T>(v.x)), max(word_max<T>(v.y), word_max<T>(v.z))), word_max<T>(v.w));
  }
  most = __reduce_max_sync(0xFFFFFFFFu, most);
  __shared__ uint32_t warps[THREADS / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int j = 1; j < THREADS / 32; ++j) most = max(most, warps[j]);
    partials[blockIdx.x] = int32_t(most);
  }
}

// (PARTIALS,) int32: bits of float32. x is contiguous, starts on 16 bytes and holds a multiple of 16 bytes.
Tensor finite_absmax(const Tensor& x) {
  check_floats(x);
  auto type = x.scalar_type();
  int64_t bytes = x.numel() * (type == ScalarType::Float ? 4 : 2);
  STD_TORCH_CHECK(bytes % 16 == 0 && reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0, "x must be made of aligned 16-byte vectors");
  DeviceGuard guard(x.get_device_index());
  int64_t size[] = {PARTIALS};
  Tensor partials = torch::stable::new_empty(x, {size, 1}, ScalarType::Int);
  auto launch = [&](auto kernel) {
    kernel<<<PARTIALS, THREADS, 0, current_stream(x)>>>(
        static_cast<const uint4*>(x.data_ptr()), static_cast<int32_t*>(partials.data_ptr()), bytes / 16);
  };
  if (type == ScalarType::BFloat16) launch(finite_absmax_kernel<__nv_bfloat16>);
  else if (type == ScalarType::Half) launch(finite_absmax_kernel<__half>);
  else launch(finite_absmax_kernel<float>);
  check_launch();
  return partials;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(aoquant_native, m) { m.def("finite_absmax(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(aoquant_native, CUDA, m) { m.impl("finite_absmax", TORCH_BOX(&finite_absmax)); }

}  // namespace aoquant

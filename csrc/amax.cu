// Largest finite magnitude of a tensor, as partial maxima that the next kernel finishes: no atomics, no cleared buffer,
// no sync.
//
// Magnitudes are compared as the integers that their bits are, in x's own dtype, which sort like the values. NaN and
// Inf count as 0: plus one more in the exponent's last place they are negative, and no finite value is. Two values of
// 16 bits in a word are compared at once.
#include "common.cuh"

namespace aoquant {
namespace {

// blocks on each multiprocessor of an H200: 64 KB in flight there
constexpr int PARTIALS = 528, THREADS = 256, UNROLL = 4, RESIDENT = 4;

// The values of a word: which bits are magnitudes, and one in the exponent's last place of each.
template <typename T>
struct Word {
  static constexpr uint32_t MAGNITUDE = sizeof(T) == 4 ? 0x7FFFFFFFu : 0x7FFF7FFFu;
  static constexpr uint32_t ONE = sizeof(T) == 4 ? 0x00800000u : std::is_same_v<T, __half> ? 0x04000400u : 0x00800080u;

  static __device__ __forceinline__ uint32_t shifted(uint32_t w) { return (w & MAGNITUDE) + ONE; }
  static __device__ __forceinline__ uint32_t most(uint32_t a, uint32_t b, uint32_t c) {
    if constexpr (sizeof(T) == 4) return uint32_t(max(max(int32_t(a), int32_t(b)), int32_t(c)));
    else return __vimax3_s16x2(a, b, c);
  }
  // Bits of float32.
  static __device__ __forceinline__ uint32_t magnitude(uint32_t w) {
    w -= ONE;
    if constexpr (sizeof(T) == 4) return w;
    else if constexpr (std::is_same_v<T, __half>) {
      float2 v = __half22float2(*reinterpret_cast<const __half2*>(&w));
      return max(__float_as_uint(v.x), __float_as_uint(v.y));
    } else return max(w << 16, w & 0xFFFF0000u);
  }
};

// A vector, or zeros. `volatile` keeps a batch of loads together: they are all in flight before the first is used.
__device__ __forceinline__ uint4 load_if(const uint4* p, bool there) {
  uint4 v;
  asm volatile(
      "{\n\t.reg .pred q;\n\tsetp.ne.b32 q, %5, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
      "@q ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p), "r"(int(there)));
  return v;
}

// n is a count of 16-byte vectors.
template <typename T>
__global__ void __launch_bounds__(THREADS, RESIDENT) finite_absmax_kernel(const uint4* __restrict__ x, int32_t* __restrict__ partials, int64_t n) {
  using W = Word<T>;
  let_next_begin();
  wait_for_inputs();
  uint32_t most = W::ONE;
  int64_t stride = int64_t(gridDim.x) * THREADS;
  for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < n; i += UNROLL * stride) {
    uint4 v[UNROLL];
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) v[j] = load_if(x + i + j * stride, i + j * stride < n);
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
      most = W::most(most, W::shifted(v[j].x), W::shifted(v[j].y));
      most = W::most(most, W::shifted(v[j].z), W::shifted(v[j].w));
    }
  }
  most = __reduce_max_sync(0xFFFFFFFFu, W::magnitude(most));
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
    launch_early(kernel, PARTIALS, THREADS, current_stream(x), static_cast<const uint4*>(x.data_ptr()), static_cast<int32_t*>(partials.data_ptr()),
                 bytes / 16);
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

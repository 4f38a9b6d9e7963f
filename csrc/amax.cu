// The largest magnitude of a tensor, as partial maxima that the next kernel finishes: no atomics, no cleared buffer,
// and no wait of the host.
//
// Magnitudes are compared as the integers that their bits are, in x's own dtype. These sort like the values, with NaN
// on top. If only finite values count, NaN and Inf count as 0: the kernel adds one in the exponent's last place, which
// makes NaN and Inf negative and no finite value. A word of two 16-bit values is compared at once.
#include "common.cuh"
#include "grids.cuh"

namespace aoquant {
namespace {

// blocks on each multiprocessor of an H200: 64 KB in flight there
constexpr int PARTIALS = 528, THREADS = 256, UNROLL = 4, RESIDENT = 4;

// The values of a word: which bits are magnitudes, and a one in the last place of each exponent, or 0 if all values
// count.
template <typename T, bool FINITE>
struct Word {
  static constexpr uint32_t MAGNITUDE = sizeof(T) == 4 ? 0x7FFFFFFFu : 0x7FFF7FFFu;
  static constexpr uint32_t ONE = !FINITE ? 0 : sizeof(T) == 4 ? 0x00800000u : std::is_same_v<T, __half> ? 0x04000400u : 0x00800080u;

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
      return max(__float_as_uint(v.x) & 0x7FFFFFFFu, __float_as_uint(v.y) & 0x7FFFFFFFu);
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
template <typename T, bool FINITE>
__global__ void __launch_bounds__(THREADS, RESIDENT) absmax_kernel(const uint4* __restrict__ x, int32_t* __restrict__ partials, int64_t n) {
  using W = Word<T, FINITE>;
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

// *outer = max(the largest magnitude * times, least), NaN if there is one.
__global__ void __launch_bounds__(THREADS) outer_kernel(const int32_t* partials, float* outer, float times, float least) {
  __shared__ uint32_t warps[THREADS / 32];
  let_next_begin();
  wait_for_inputs();
  uint32_t most = 0;
  for (int i = threadIdx.x; i < PARTIALS; i += THREADS) most = max(most, uint32_t(partials[i]));
  most = __reduce_max_sync(0xFFFFFFFFu, most);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int j = 0; j < THREADS / 32; ++j) most = max(most, warps[j]);
    *outer = max_nan(__fmul_rn(__uint_as_float(most), times), least);
  }
}

// (PARTIALS,) int32: bits of float32. x is contiguous, starts on 16 bytes and holds a multiple of 16 bytes.
template <bool FINITE>
Tensor absmax(const Tensor& x) {
  check_floats(x);
  auto type = x.scalar_type();
  int64_t bytes = x.numel() * (type == ScalarType::Float ? 4 : 2);
  STD_TORCH_CHECK(bytes % 16 == 0, "x must be made of 16-byte vectors");
  DeviceGuard guard(x.get_device_index());
  Tensor partials = make(x, {PARTIALS}, ScalarType::Int);
  auto launch = [&](auto kernel) {
    launch_early(kernel, PARTIALS, THREADS, current_stream(x), static_cast<const uint4*>(x.data_ptr()), static_cast<int32_t*>(partials.data_ptr()),
                 bytes / 16);
  };
  if (type == ScalarType::BFloat16) launch(absmax_kernel<__nv_bfloat16, FINITE>);
  else if (type == ScalarType::Half) launch(absmax_kernel<__half, FINITE>);
  else launch(absmax_kernel<float, FINITE>);
  check_launch();
  return partials;
}

// (1, 1) float32: NVFP4's outer scale of a tensor, formats/blockscaled.py's `measure`.
Tensor outer_scale(const Tensor& x, double times, double least) {
  const Tensor partials = absmax<false>(x);
  DeviceGuard guard(x.get_device_index());
  Tensor outer = make(x, {1, 1}, ScalarType::Float);
  launch_early(outer_kernel, 1, THREADS, current_stream(x), static_cast<const int32_t*>(partials.data_ptr()), static_cast<float*>(outer.data_ptr()),
               float(times), float(least));
  check_launch();
  return outer;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(aoquant_native, m) {
  m.def("finite_absmax(Tensor x) -> Tensor");
  m.def("outer_scale(Tensor x, float times, float least) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(aoquant_native, CUDA, m) {
  m.impl("finite_absmax", TORCH_BOX(&absmax<true>));
  m.impl("outer_scale", TORCH_BOX(&outer_scale));
}

}  // namespace aoquant

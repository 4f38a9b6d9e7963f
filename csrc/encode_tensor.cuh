// Formats with one scale for the whole tensor, NVFP4 and fp8, encoded in one launch that reads x from memory once.
//
// The scale is known only when all of x was read, so a pair of kernels would read x from memory twice. Here one block
// of threads on every multiprocessor keeps what fits of its share of x in shared memory. It reads the rest again, most
// recent first, mostly out of the second level of cache. Between the two readings all blocks of the grid wait for one
// another; the launch is cooperative, so that all of them run.
//
// The arithmetic is the reference's (formats/blockscaled.py, formats/float8.py), in the order of the Triton kernels.
#pragma once

#include <cooperative_groups.h>

#include "block_scales.cuh"
#include "check.cuh"
#include "common.cuh"
#include "copy_engine.cuh"

namespace aoquant::whole {

enum Kind { OF_NVFP4 = 0, OF_FP8 = 1 };

constexpr int THREADS = 1024, KEPT = 192 * 1024;  // bytes of x in shared memory
constexpr int UNROLL = 3;

// x: `blocks` blocks of 16 values. partials: one for each block of threads. codes may be null. scale: NVFP4's bytes, beside codes.
// outer: NVFP4's outer scale, or fp8's scale. values: in a type of `Out`; operand: whether they leave out the scale of
// the tensor.
struct Call {
  const void* x;
  int32_t* partials;
  uint8_t* codes;
  uint8_t* scale;
  float* outer;
  void* values;
  int blocks, out, operand;
};

template <typename T>
__device__ __forceinline__ float through(float v) {
  if constexpr (std::is_same_v<T, float>) return v;
  else return float(T(v));
}

// Magnitudes' bits, NaN on top.
template <typename T>
__device__ __forceinline__ uint32_t bits_of(const Packed<T>& x) {
  return __float_as_uint(x.amax()) & 0x7FFFFFFFu;
}

struct Whole {
  float scale, inverse;  // NVFP4: outer and 1 / outer; fp8: the scale and its rounded reciprocal
  bool fits;             // fp8: whether the reciprocal leads to the quotient
};

template <typename T, int KIND>
__device__ __forceinline__ Whole whole_of(uint32_t amax_bits) {
  Whole w;
  w.scale = KIND == OF_NVFP4 ? nvfp4_outer(amax_bits) : through<T>(__fmul_rn(__uint_as_float(amax_bits), OF_448));
  w.inverse = __fdiv_rn(1.0f, w.scale);
  w.fits = w.scale > 0x1p-60f && w.scale < 0x1p60f;
  return w;
}

template <typename T>
__device__ __forceinline__ void encode_nvfp4(const Call& p, const Whole& w, const Packed<T>& in, int64_t block) {
  float x[16];
  in.unpack(x);
  const BlockScale scale = nvfp4_scale(bits_of(in), w.scale, w.inverse);
  if (p.codes) {
    __stcs(reinterpret_cast<uint2*>(p.codes) + block, fp4_codes(x, scale));
    p.scale[block] = uint8_t(scale.byte);
  }
  if (p.out == NO_VALUES) return;
  const float s = e4m3_value(scale.byte), times = p.operand ? s : __fmul_rn(w.scale, s);
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    const float z = __fmul_rn(x[k], scale.inverse);
    x[k] = __fmul_rn(copysignf(nearest_magnitude(fminf(fabsf(z), 6.0f)), z), times);
  }
  store_values(p.values, block * 16, x, p.out);
}

// Two codes of e4m3; saturating, NaN stays.
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

template <typename T>
__device__ __forceinline__ void encode_fp8(const Call& p, const Whole& w, const Packed<T>& in, int64_t block) {
  float x[16];
  in.unpack(x);
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    if (w.fits)  // the corrections of -0 add up to +0
      x[k] = __uint_as_float((__float_as_uint(quotient(x[k], w.scale, w.inverse)) & 0x7FFFFFFFu) | (__float_as_uint(x[k]) & 0x80000000u));
    else
      x[k] = w.scale == 0.0f ? 0.0f : __fdiv_rn(x[k], w.scale);
  }
  uint4 codes;
#pragma unroll
  for (int i = 0; i < 4; ++i) (&codes.x)[i] = e4m3_pair(x[4 * i], x[4 * i + 1]) | e4m3_pair(x[4 * i + 2], x[4 * i + 3]) << 16;
  if (p.codes) __stcs(reinterpret_cast<uint4*>(p.codes) + block, codes);
  if (p.out == NO_VALUES) return;
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    const float q = e4m3_value((&codes.x)[k / 4] >> (8 * (k % 4)) & 0xFF);
    x[k] = p.operand ? q : __fmul_rn(q, w.scale);
  }
  store_values(p.values, block * 16, x, p.out);
}

template <typename T, int KIND>
__device__ __forceinline__ void encode(const Call& p, const Whole& w, const Packed<T>& in, int64_t block) {
  DEVICE_ASSERT(block >= 0 && block < p.blocks);
  if constexpr (KIND == OF_NVFP4) encode_nvfp4(p, w, in, block);
  else encode_fp8(p, w, in, block);
}

template <typename T, int KIND>
__global__ void __launch_bounds__(THREADS, 1) kernel(const Call p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int CHUNK = THREADS * 16 * int(sizeof(T)), KEEP = KEPT / CHUNK, VECTORS = Packed<T>::VECTORS;
  extern __shared__ __align__(128) uint8_t kept[];
  __shared__ uint64_t barriers[KEEP];
  __shared__ uint32_t warps[THREADS / 32];
  const int thread = threadIdx.x, grid = gridDim.x;
  const int chunks = (p.blocks + THREADS - 1) / THREADS, mine = (chunks - int(blockIdx.x) + grid - 1) / grid, keep = min(KEEP, mine);
  const T* x = static_cast<const T*>(p.x);
  auto block_of = [&](int i) { return (int64_t(blockIdx.x) + int64_t(i) * grid) * THREADS + thread; };
  auto barrier_of = [&](int i) { return uint32_t(__cvta_generic_to_shared(&barriers[i])); };
  if (thread == 0) {
    for (int i = 0; i < keep; ++i) init_barrier(barrier_of(i), 1);
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
    for (int i = 0; i < keep; ++i) {
      const int64_t first = block_of(i);
      const int bytes = int(min(int64_t(THREADS), p.blocks - first)) * 16 * int(sizeof(T));
      expect(barrier_of(i), bytes);
      copy_bytes(reinterpret_cast<const uint8_t*>(x + first * 16), uint32_t(__cvta_generic_to_shared(kept)) + i * CHUNK, bytes, barrier_of(i));
    }
  }
  __syncthreads();
  uint32_t most = 0;
  for (int i = keep; i < mine; i += UNROLL) {
    Packed<T> v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int64_t block = block_of(i + u);
      if (block < p.blocks) v[u].load(x + block * 16);
      else
        for (int j = 0; j < VECTORS; ++j) v[u].v[j] = make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) most = max(most, bits_of(v[u]));
  }
  auto load_kept = [&](Packed<T>& v, int i) {
    DEVICE_ASSERT(i < KEEP);
    const uint4* from = reinterpret_cast<const uint4*>(kept + i * CHUNK + thread * 16 * int(sizeof(T)));
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) v.v[j] = from[j];
  };
  for (int i = 0; i < keep; ++i) {
    wait(barrier_of(i), 0);
    Packed<T> v;
    load_kept(v, i);
    if (block_of(i) < p.blocks) most = max(most, bits_of(v));
  }
  auto of_block = [&](uint32_t v) {
    v = __reduce_max_sync(0xFFFFFFFFu, v);
    if (thread % 32 == 0) warps[thread / 32] = v;
    __syncthreads();
    v = __reduce_max_sync(0xFFFFFFFFu, warps[thread % 32]);
    __syncthreads();
    return v;
  };
  most = of_block(most);
  if (thread == 0) p.partials[blockIdx.x] = int32_t(most);
  cooperative_groups::this_grid().sync();
  most = of_block(thread < grid ? uint32_t(__ldcg(p.partials + thread)) : 0u);
  const Whole w = whole_of<T, KIND>(most);
  if (blockIdx.x == 0 && thread == 0) *p.outer = w.scale;

  Packed<T> next;
  if (mine > keep && block_of(mine - 1) < p.blocks) next.load(x + block_of(mine - 1) * 16);
  for (int i = mine - 1; i >= keep; --i) {
    const Packed<T> now = next;
    if (i > keep) next.load(x + block_of(i - 1) * 16);
    if (block_of(i) < p.blocks) encode<T, KIND>(p, w, now, block_of(i));
  }
  for (int i = 0; i < keep; ++i) {
    if (block_of(i) >= p.blocks) break;
    Packed<T> now;
    load_kept(now, i);
    encode<T, KIND>(p, w, now, block_of(i));
  }
#endif
}

}  // namespace aoquant::whole

// Formats that scale each row by itself, encoded for a product without gradients: into its operand, or into decoded
// values, and not into codes, which only backward would read. A row is a block's, which reads it twice, the second time
// out of its own cache.
//
// The arithmetic is the reference's (formats/blockscaled.py, formats/float8.py) in the order of the Triton kernels that
// encode many rows (ops/triton/nvfp4_rows.py, ops/triton/float8.py), so the bytes are theirs.
#pragma once

#include "block_scales.cuh"
#include "check.cuh"
#include "common.cuh"

namespace aoquant {

enum RowFormat { NVFP4_ROW = 1, FP8_ROW = 2 };

namespace rows {

constexpr float INTEGERS = 8388608.0f;  // 2^23: floats above it are integers

__device__ __forceinline__ float2 floats(uint32_t w, __nv_bfloat16) { return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u)); }
__device__ __forceinline__ float2 floats(uint32_t w, __half) { return __half22float2(*reinterpret_cast<const __half2*>(&w)); }
__device__ __forceinline__ uint32_t pair(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&v);
}
__device__ __forceinline__ uint32_t pair(float low, float high, __half) {
  __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&v);
}
__device__ __forceinline__ float through(float v, __nv_bfloat16) { return __bfloat162float(__float2bfloat16_rn(v)); }
__device__ __forceinline__ float through(float v, __half) { return __half2float(__float2half_rn(v)); }

// 16 values of T, from an address that is a multiple of 16.
template <typename T>
__device__ __forceinline__ void load16(float (&v)[16], const T* p) {
  const uint4 w[2] = {reinterpret_cast<const uint4*>(p)[0], reinterpret_cast<const uint4*>(p)[1]};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 f = floats((&w[i / 4].x)[i % 4], T());
    v[2 * i] = f.x, v[2 * i + 1] = f.y;
  }
}

template <typename T>
__device__ __forceinline__ void store16(T* p, const float (&v)[16]) {
  uint32_t w[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) w[i] = pair(v[2 * i], v[2 * i + 1], T());
  reinterpret_cast<uint4*>(p)[0] = make_uint4(w[0], w[1], w[2], w[3]);
  reinterpret_cast<uint4*>(p)[1] = make_uint4(w[4], w[5], w[6], w[7]);
}

// v >= 0 -> the bits of 2^23 + the index of the nearest e2m1 magnitude, saturating (ops/triton/elements.py).
__device__ __forceinline__ uint32_t e2m1_index(float v) {
  const float low = fminf(__fmaf_rn(v, 2.0f, INTEGERS), __fadd_rn(v, INTEGERS + 2.0f));
  return __float_as_uint(fminf(fminf(low, __fmaf_rn(v, 0.5f, INTEGERS + 4.0f)), INTEGERS + 7.0f));
}

template <typename T>
__device__ __forceinline__ void nvfp4_block(T* out, const float (&v)[16], float outer, float inverse_outer, bool decoded) {
  const BlockScale found = nvfp4_scale(absmax_bits(v), outer, inverse_outer);
  const float scale = e4m3_value(found.byte), inverse = found.inverse, times = decoded ? __fmul_rn(outer, scale) : scale;
  float y[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const uint32_t x = __float_as_uint(v[i]), index = e2m1_index(__fmul_rn(__uint_as_float(x & 0x7FFFFFFFu), inverse));
    y[i] = __fmul_rn(__fmul_rn(__uint_as_float(((index << 22) & 0x1C00000u) | (x & 0x80000000u)), 0x1p126f), times);
  }
  store16(out, y);
}

template <typename T>
__device__ __forceinline__ void fp8_block(T* out, const float (&v)[16], float scale, bool decoded) {
  const bool fits = scale > 0x1p-60f && scale < 0x1p60f;
  const float inverse = __fdiv_rn(1.0f, scale);
  float y[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float q;
    if (fits) {  // the corrections of -0 add up to +0
      q = __uint_as_float((__float_as_uint(quotient(v[i], scale, inverse)) & 0x7FFFFFFFu) | (__float_as_uint(v[i]) & 0x80000000u));
    } else {
      q = scale == 0.0f ? 0.0f : __fdiv_rn(v[i], scale);
    }
    q = e4m3_value(e4m3(min_nan(max_nan(q, -448.0f), 448.0f)));
    y[i] = decoded ? __fmul_rn(q, scale) : q;
  }
  store16(out, y);
}

// A block for each row. out: operand or decoded values; scale: the outer scale, or the scale, of each row.
template <typename T>
__global__ void __launch_bounds__(1024) encode_kernel(const T* __restrict__ x, T* __restrict__ out, float* __restrict__ scale, int k, int format,
                                                      int decoded) {
  wait_for_inputs();
  // Of more rows the blocks still have their multiprocessors when the product's come, which may then share one.
  if (gridDim.x <= 4) let_next_begin();
  DEVICE_ASSERT(k % 16 == 0 && blockDim.x % 32 == 0);
  const int blocks = k / 16, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t start = int64_t(blockIdx.x) * k;
  float v[16];
  uint32_t most = 0;
  for (int b = threadIdx.x; b < blocks; b += blockDim.x) {
    load16(v, x + start + 16 * b);
    most = max(most, absmax_bits(v));
  }
  __shared__ uint32_t of_warps[32];
  most = __reduce_max_sync(0xFFFFFFFFu, most);
  if (lane == 0) of_warps[warp] = most;
  __syncthreads();
  most = __reduce_max_sync(0xFFFFFFFFu, lane < int(blockDim.x) / 32 ? of_warps[lane] : 0);
  const float amax = __uint_as_float(most);
  const float s = format == NVFP4_ROW ? nvfp4_outer(most) : through(__fmul_rn(amax, OF_448), T());
  const float inverse = __fdiv_rn(1.0f, s);
  if (threadIdx.x == 0) scale[blockIdx.x] = s;
  for (int b = threadIdx.x; b < blocks; b += blockDim.x) {
    if (blocks > int(blockDim.x)) load16(v, x + start + 16 * b);  // otherwise they are still there
    if (format == NVFP4_ROW) nvfp4_block(out + start + 16 * b, v, s, inverse, decoded);
    else fp8_block(out + start + 16 * b, v, s, decoded);
  }
}

}  // namespace rows

// x (m, k), contiguous and aligned to 16 bytes, bfloat16 or float16, k a multiple of 16. out, scale: of encode_kernel.
inline void launch_encode_rows(const void* x, ScalarType type, int64_t m, int64_t k, int format, bool decoded, void* out, float* scale,
                               cudaStream_t stream) {
  const int threads = k >= 16 * 1024 ? 1024 : int((k / 16 + 31) / 32 * 32);
  auto launch = [&](auto kernel, auto unit) {
    using T = decltype(unit);
    launch_early(kernel, int(m), threads, stream, static_cast<const T*>(x), static_cast<T*>(out), scale, int(k), format, int(decoded));
  };
  if (type == ScalarType::BFloat16) launch(rows::encode_kernel<__nv_bfloat16>, __nv_bfloat16());
  else launch(rows::encode_kernel<__half>, __half());
  check_launch();
}

}  // namespace aoquant

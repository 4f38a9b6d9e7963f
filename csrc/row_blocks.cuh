// Blocks of 16 values of formats whose rows are encoded one by one, as the operand of a product or as decoded values.
//
// The arithmetic is the reference's (formats/blockscaled.py, formats/float8.py) in the order of the Triton kernels that
// encode many rows (ops/triton/nvfp4_rows.py, ops/triton/float8_kernels.py, ops/triton/blockscaled_kernels.py), so the bytes are theirs.
#pragma once

#include "block_scales.cuh"

namespace aoquant {

// MXFP4's rows have no scale: a block of 32 values has. Blocks of FOUR_OVER_SIX_ROW are four_over_six_rows.cuh's.
enum RowFormat { NVFP4_ROW = 1, FP8_ROW = 2, MXFP4_ROW = 3, FOUR_OVER_SIX_ROW = 4 };

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

// Of 16 values, in T.
struct Sixteen {
  uint4 half[2];
};
template <typename T>
__device__ __forceinline__ Sixteen packed16(const float (&v)[16]) {
  uint32_t w[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) w[i] = pair(v[2 * i], v[2 * i + 1], T());
  return {{make_uint4(w[0], w[1], w[2], w[3]), make_uint4(w[4], w[5], w[6], w[7])}};
}
template <typename T>
__device__ __forceinline__ void store16(T* p, const Sixteen& v) {
  reinterpret_cast<uint4*>(p)[0] = v.half[0];
  reinterpret_cast<uint4*>(p)[1] = v.half[1];
}

// v >= 0 -> the bits of 2^23 + the index of the nearest e2m1 magnitude, saturating (ops/triton/element_codes.py).
__device__ __forceinline__ uint32_t e2m1_index(float v) {
  const float low = fminf(__fmaf_rn(v, 2.0f, INTEGERS), __fadd_rn(v, INTEGERS + 2.0f));
  return __float_as_uint(fminf(fminf(low, __fmaf_rn(v, 0.5f, INTEGERS + 4.0f)), INTEGERS + 7.0f));
}

// The nearest e2m1 values of v * inverse, times `times`.
template <typename T>
__device__ __forceinline__ Sixteen e2m1_block(const float (&v)[16], float inverse, float times) {
  float y[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const uint32_t x = __float_as_uint(v[i]), index = e2m1_index(__fmul_rn(__uint_as_float(x & 0x7FFFFFFFu), inverse));
    y[i] = __fmul_rn(__fmul_rn(__uint_as_float(((index << 22) & 0x1C00000u) | (x & 0x80000000u)), 0x1p126f), times);
  }
  return packed16<T>(y);
}

template <typename T>
__device__ __forceinline__ Sixteen nvfp4_block(const float (&v)[16], float outer, float inverse_outer, bool decoded) {
  const BlockScale found = nvfp4_scale(absmax_bits(v), outer, inverse_outer);
  const float scale = e4m3_value(found.byte);
  return e2m1_block<T>(v, found.inverse, decoded ? __fmul_rn(outer, scale) : scale);
}

// Half of a block of 32. most: the bits of the block's largest magnitude.
template <typename T>
__device__ __forceinline__ Sixteen mxfp4_half_block(const float (&v)[16], uint32_t most) {
  const BlockScale found = mxfp4_scale(most);
  return e2m1_block<T>(v, found.inverse, e8m0_value(found.byte));
}

template <typename T>
__device__ __forceinline__ Sixteen fp8_block(const float (&v)[16], float scale, bool decoded) {
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
  return packed16<T>(y);
}

}  // namespace rows
}  // namespace aoquant

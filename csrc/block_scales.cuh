// Scales of NVFP4's and MXFP4's blocks on the device, as formats/blockscaled.py defines them, bit for bit.
//
// The order of operations is the reference's: divisions by constants are products with rounded reciprocals, others are
// IEEE divisions. A magnitude is compared by its bits, which sort like the values, NaN on top.
#pragma once

#include "grids.cuh"

namespace aoquant {

// rounded reciprocals of 6, of 6 * 448 and of 448
constexpr float SIXTH = 0x1.555556p-3f, OF_2688 = 0x1.861862p-12f, OF_448 = 0x1.24924ap-9f;
constexpr float LEAST_SCALE = 0x1p-6f, LEAST_OUTER = 0x1p-121f;
constexpr uint32_t INFINITE = 0x7F800000u, NOT_A_NUMBER = 0x7FC00000u;

__device__ __forceinline__ float min_nan(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}

__device__ __forceinline__ uint32_t absmax_bits(const float (&v)[16]) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) most = max(most, __float_as_uint(v[i]) & 0x7FFFFFFFu);
  return most;
}

// The factor of a block's values before they are rounded; NaN if all of the block's codes are zeros.
struct BlockScale {
  uint32_t byte;
  float inverse;
};

// The outer scale of a row or a tensor whose largest magnitude has these bits.
__device__ __forceinline__ float nvfp4_outer(uint32_t amax_bits) { return max_nan(__fmul_rn(__uint_as_float(amax_bits), OF_2688), LEAST_OUTER); }

// The e4m3 scale of a block. inverse_outer: 1 / outer; without an outer scale both are 1, and dividing by 1 is exact.
__device__ __forceinline__ BlockScale nvfp4_scale(uint32_t amax_bits, float outer, float inverse_outer) {
  if (amax_bits == INFINITE) amax_bits = NOT_A_NUMBER;
  const float ratio = max_nan(__fdiv_rn(__fmul_rn(__uint_as_float(amax_bits), SIXTH), outer), LEAST_SCALE);
  const uint32_t byte = e4m3(min_nan(ratio, 448.0f));
  return {byte, __fdiv_rn(inverse_outer, e4m3_value(byte))};
}

// The e8m0 scale of a block, under the rule "rceil".
__device__ __forceinline__ BlockScale mxfp4_scale(uint32_t amax_bits) {
  const uint32_t ratio = __float_as_uint(__fmul_rn(__uint_as_float(amax_bits), SIXTH)), mantissa = ratio & 0x7FFFFFu;
  const uint32_t exponent = ratio >> 23, up = exponent == 0 ? mantissa > 0x400000u : mantissa > 0;
  const uint32_t byte = amax_bits > INFINITE ? 255u : min(exponent + up, 254u);
  const uint32_t inverse = byte == 254 ? 1u << 22 : byte == 0 ? 127u << 23 : (254u - byte) << 23;
  return {byte, __uint_as_float(byte == 255 ? NOT_A_NUMBER : inverse)};
}

// What the byte of a scale stands for: 2^(byte - 127), and 255 for NaN.
__device__ __forceinline__ float e8m0_value(uint32_t byte) {
  return __uint_as_float(byte == 255 ? NOT_A_NUMBER : byte == 0 ? 1u << 22 : byte << 23);
}

// Codes of 16 values; zeros without signs where the scale is NaN.
__device__ __forceinline__ uint2 fp4_codes(const float (&v)[16], const BlockScale& scale) {
  const uint2 codes = encode16<false, true>(v, scale.inverse, 1.0f, 0.0f);
  return scale.inverse == scale.inverse ? codes : make_uint2(0, 0);
}

}  // namespace aoquant

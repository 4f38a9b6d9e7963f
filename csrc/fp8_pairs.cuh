// Four e4m3 codes as 16-bit values, exactly.
#pragma once

#include "decode.cuh"

namespace aoquant {

namespace decode {

// Pairs (k, k + 1), (k + 2, k + 3) of four e4m3 codes in T, exact.
__device__ __forceinline__ void pairs(uint32_t (&out)[2], uint32_t w, __half) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}" : "=r"(out[0]), "=r"(out[1]) : "r"(w));
}

// A word with one of the bits NAN_CARRIES set if one of four codes is NaN; the other bits say nothing.
constexpr uint32_t NAN_CARRIES = 0x80808080u;
__device__ __forceinline__ uint32_t nan_carries(uint32_t w) { return (w & 0x7F7F7F7Fu) + 0x01010101u; }

// Not 0 if one of the four codes is NaN.
__device__ __forceinline__ uint32_t nan_bits(uint32_t w) { return nan_carries(w) & NAN_CARRIES; }

// For four codes that are numbers: the sign and the seven other bits go to their places in bfloat16, which makes values
// too small by 2^120.
__device__ __forceinline__ void pairs_of_numbers(uint32_t (&out)[2], uint32_t w, __nv_bfloat16) {
  constexpr uint32_t UNIT = 0x7B807B80u;  // 2^120
  const uint32_t first = __byte_perm(w, 0, 0x1404), second = __byte_perm(w, 0, 0x3424);  // codes in the high bytes of halves
  out[0] = mul<__nv_bfloat16>((first & 0x80008000u) | ((first >> 4) & 0x07F007F0u), UNIT);
  out[1] = mul<__nv_bfloat16>((second & 0x80008000u) | ((second >> 4) & 0x07F007F0u), UNIT);
}
__device__ __forceinline__ void pairs_of_numbers(uint32_t (&out)[2], uint32_t w, __half) { pairs(out, w, __half()); }

__device__ __forceinline__ void pairs(uint32_t (&out)[2], uint32_t w, __nv_bfloat16) {
  pairs_of_numbers(out, w, __nv_bfloat16());
  const uint32_t nan = nan_bits(w);
  if (nan) {
    const uint32_t bytes = (nan >> 7) * 0xFFu;
    out[0] |= __byte_perm(bytes, 0, 0x1100);
    out[1] |= __byte_perm(bytes, 0, 0x3322);
  }
}

// Pairs (k, k + 2), (k + 1, k + 3), which take fewer instructions: in bfloat16 no code has to change its half of a word.
// A NaN is decoded as 480 in bfloat16.
__device__ __forceinline__ void pairs_apart(uint32_t (&out)[2], uint32_t w, __nv_bfloat16) {
  constexpr uint32_t SIGNS = 0x80008000u, REST = 0x07F007F0u, UNIT = 0x7B807B80u;  // 2^120
  out[0] = mul<__nv_bfloat16>((w << 8 & SIGNS) | (w << 4 & REST), UNIT);
  out[1] = mul<__nv_bfloat16>((w & SIGNS) | (w >> 4 & REST), UNIT);
}
__device__ __forceinline__ void pairs_apart(uint32_t (&out)[2], uint32_t w, __half) { pairs(out, __byte_perm(w, 0, 0x3120), __half()); }

}  // namespace decode
}  // namespace aoquant

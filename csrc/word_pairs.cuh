// 16-bit arithmetic on words of two values, of bfloat16 or float16: the decoding in products of packed 4-bit weights.
//
// Nibbles become values by operations on bits and one instruction for each two. Two's complement: MAGIC and the nibble
// are 2^7 + 8 + q (float16: 2^10 + 8 + q), and adding MINUS_OFFSET gives q. e2m1: the nibble's bits, in place of the
// sign, the lowest exponent bits and the first mantissa bit, are a value that is too small by E2M1_UNIT, a power of
// two.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace aoquant {

namespace decode {

template <typename T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static constexpr uint32_t MAGIC = 0x43004300u ^ 0x00080008u;  // xored with a two's complement nibble: 128 + 8 + q
  static constexpr uint32_t MINUS_OFFSET = 0xC308C308u;         // -136
  static constexpr uint32_t ONE = 0x3F803F80u;
  static constexpr uint32_t MINUS_ZERO = 0x80008000u;
  // 2^126: what an e2m1 code in place of the lowest exponent bits is too small by
  static constexpr uint32_t E2M1_UNIT = 0x7E807E80u;
  static constexpr float FOLDED_UNIT = 0x1p118f;      // as a part of a scale (Folded)
  // A nibble, at bit 0 or 4 of each half, as sign, two lowest exponent bits, first mantissa bit: a multiplication puts
  // it to both places.
  static __device__ __forceinline__ uint32_t e2m1_low(uint32_t v) { return ((v & 0x000F000Fu) * 0x1040u) & 0x81C081C0u; }
  static __device__ __forceinline__ uint32_t e2m1_high(uint32_t v) { return ((v & 0x00F000F0u) * 0x0104u) & 0x81C081C0u; }
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ uint32_t both(float v) {  // exact in T
    return __byte_perm(__float_as_uint(v), 0, 0x3232);
  }
  static __device__ __forceinline__ uint32_t rounded(float v) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(d) : "f"(v));
    return d;
  }
};

template <>
struct Pair<__half> {
  static constexpr uint32_t MAGIC = 0x64006400u ^ 0x00080008u;  // 1024 + 8 + q
  static constexpr uint32_t MINUS_OFFSET = 0xE408E408u;         // -1032
  static constexpr uint32_t ONE = 0x3C003C00u;
  static constexpr uint32_t MINUS_ZERO = 0x80008000u;
  static constexpr uint32_t E2M1_UNIT = 0x74007400u;  // 2^14
  static constexpr float FOLDED_UNIT = 64.0f;
  // the two places overlap here, so it takes two shifts
  static __device__ __forceinline__ uint32_t e2m1_low(uint32_t v) { return ((v << 9) & 0x0E000E00u) | ((v << 12) & 0x80008000u); }
  static __device__ __forceinline__ uint32_t e2m1_high(uint32_t v) { return ((v << 5) & 0x0E000E00u) | ((v << 8) & 0x80008000u); }
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ uint32_t both(float v) { return rounded(v); }
  static __device__ __forceinline__ uint32_t rounded(float v) {
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(d) : "f"(v));
    return d;
  }
};

template <typename T>
__device__ __forceinline__ uint32_t mul(uint32_t a, uint32_t b) {
  return Pair<T>::fma(a, b, Pair<T>::MINUS_ZERO);
}

}  // namespace decode

}  // namespace aoquant

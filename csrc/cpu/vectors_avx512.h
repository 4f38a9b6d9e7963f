// vectors.h by AVX-512: a Vector is a register.
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace aoquant::cpu::AOQUANT_LEVEL {

constexpr int LANES = 16, CHUNK = 2 * LANES;

struct Vector {
  __m512 v;
  static Vector zero() { return {_mm512_setzero_ps()}; }
  static Vector all(float x) { return {_mm512_set1_ps(x)}; }
  static Vector load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vector from_int8(const void* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))))}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
};
inline Vector operator+(Vector a, Vector b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vector operator*(Vector a, Vector b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vector fma(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

// Finite lanes rounded to bfloat16, half to even.
inline Vector round_bfloat16(Vector x) {
  const __m512i u = _mm512_castps_si512(x.v), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  return {_mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(int(0xFFFF0000u))))};
}

// 16 numbers, of which the first `count` are there and the others are 0.
inline Vector load_some(const float* p, int count) { return {_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p)}; }
inline Vector load_some(const BFloat16* p, int count) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), p)), 16))};
}

inline Vector load16(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vector load16(const BFloat16* p) { return load_some(p, LANES); }

inline Vector operator-(Vector a, Vector b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vector operator/(Vector a, Vector b) { return {_mm512_div_ps(a.v, b.v)}; }
// of two numbers
inline Vector smaller(Vector a, Vector b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vector larger(Vector a, Vector b) { return {_mm512_max_ps(a.v, b.v)}; }
inline uint32_t nans(Vector x) { return _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q); }

// Lanes rounded to integers between 0 and 15; NaN is 8.
inline void to_codes(Vector x, uint8_t* codes) {
  const __m512 whole = _mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 held = _mm512_min_ps(_mm512_max_ps(whole, _mm512_setzero_ps()), _mm512_set1_ps(15));
  const __m512i q = _mm512_cvtps_epi32(_mm512_mask_mov_ps(held, nans(x), _mm512_set1_ps(8)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(q));
}

// Lanes that are infinite or NaN.
inline uint32_t not_finite(Vector x) { return _mm512_cmp_ps_mask(_mm512_sub_ps(x.v, x.v), _mm512_setzero_ps(), _CMP_NEQ_UQ); }

// Lanes whose exponents are more than `apart` from each other, unless b is 0.
inline uint32_t far_apart(Vector a, Vector b, int apart) {
  const __m512i of_a = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(a.v), 23), _mm512_set1_epi32(255));
  const __m512i of_b = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(b.v), 23), _mm512_set1_epi32(255));
  const __mmask16 far = _mm512_cmpgt_epi32_mask(_mm512_abs_epi32(_mm512_sub_epi32(of_a, of_b)), _mm512_set1_epi32(apart));
  return far & _mm512_cmp_ps_mask(b.v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
}

// Lane l plus lane l + 8.
inline __m256 by8(Vector x) { return _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1)); }

// 32 lanes. Of codes of 4 bits, `first` has the even k's and `second` the odd ones.
struct Pair {
  Vector first, second;
};

// The k, within its chunk of 32, that a lane of a Pair has.
constexpr int k_of(int lane) { return lane % LANES * 2 + lane / LANES; }

// The 16 values that codes of 4 bits stand for; NARROW: bfloat16 can hold them.
template <bool NARROW>
struct Table {
  Vector values;
  static Table from(Vector values) { return {values}; }
  Pair of(const uint8_t* codes) const {  // 16 bytes: 32 codes, even k's in the low nibbles
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    return {{_mm512_permutexvar_ps(bytes, values.v)}, {_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values.v)}};  // reads 4 bits of an index
  }
};

// Lane l of the even k's plus lane l of the odd ones.
inline Vector folded(const Pair& p) { return p.first + p.second; }

// A Pair as 32 floats in k's order.
inline void in_order(const Pair& p, float* out) {
  const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  _mm512_storeu_ps(out, _mm512_permutex2var_ps(p.first.v, first, p.second.v));
  _mm512_storeu_ps(out + LANES, _mm512_permutex2var_ps(p.first.v, second, p.second.v));
}

}  // namespace aoquant::cpu::AOQUANT_LEVEL

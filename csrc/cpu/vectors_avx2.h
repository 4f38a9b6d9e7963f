// vectors.h by AVX2: a Vector is two registers.
//
// A permutation of 32-bit lanes looks up 8 values; of the 16 that a code of 4 bits can stand for, it would take two and a
// choice for each 8 codes. So `Table` looks up bytes, 32 codes at once: for values that bfloat16 holds, one look-up for
// the upper byte and one for the lower. What comes out is 16-bit words, which lie in 32-bit lanes by twos: k's 0 4 8 12 |
// 1 5 9 13 in a register, 2 6 10 14 | 3 7 11 15 in the next, and so on (`k_of`).
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace aoquant::cpu::AOQUANT_LEVEL {

constexpr int LANES = 16, CHUNK = 2 * LANES;

struct Vector {
  __m256 low, high;
  static Vector zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Vector all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Vector load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Vector from_int8(const void* p) {
    const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, low), _mm256_storeu_ps(p + 8, high); }
};
inline Vector operator+(Vector a, Vector b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Vector operator-(Vector a, Vector b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Vector operator*(Vector a, Vector b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Vector operator/(Vector a, Vector b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Vector fma(Vector a, Vector b, Vector c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
inline Vector smaller(Vector a, Vector b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Vector larger(Vector a, Vector b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }

inline __m256 round_bfloat16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(int(0xFFFF0000u))));
}
inline Vector round_bfloat16(Vector x) { return {round_bfloat16(x.low), round_bfloat16(x.high)}; }

inline Vector load16(const float* p) { return Vector::load(p); }
inline Vector load16(const BFloat16* p) {
  const auto half = [](const BFloat16* q) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q))), 16)); };
  return {half(p), half(p + 8)};
}
template <typename T>
inline Vector load_some(const T* p, int count) {
  if (count == LANES) return load16(p);
  T there[LANES] = {};
  for (int l = 0; l < count; ++l) there[l] = p[l];
  return load16(there);
}

inline uint32_t lanes(__m256 low, __m256 high) { return uint32_t(_mm256_movemask_ps(low)) | uint32_t(_mm256_movemask_ps(high)) << 8; }
inline uint32_t nans(Vector x) { return lanes(_mm256_cmp_ps(x.low, x.low, _CMP_UNORD_Q), _mm256_cmp_ps(x.high, x.high, _CMP_UNORD_Q)); }
inline uint32_t not_zero(Vector x) { return lanes(_mm256_cmp_ps(x.low, _mm256_setzero_ps(), _CMP_NEQ_UQ), _mm256_cmp_ps(x.high, _mm256_setzero_ps(), _CMP_NEQ_UQ)); }
inline uint32_t not_finite(Vector x) { return not_zero(x - x); }

inline uint32_t far_apart(Vector a, Vector b, int apart) {
  const auto far = [&](__m256 x, __m256 y) {
    const auto exponents = [](__m256 v) { return _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(v), 23), _mm256_set1_epi32(255)); };
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_abs_epi32(_mm256_sub_epi32(exponents(x), exponents(y))), _mm256_set1_epi32(apart)));
  };
  return lanes(far(a.low, b.low), far(a.high, b.high)) & not_zero(b);
}

inline void to_codes(Vector x, uint8_t* codes) {
  const auto half = [](__m256 v) {
    const __m256 whole = _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 held = _mm256_min_ps(_mm256_max_ps(whole, _mm256_setzero_ps()), _mm256_set1_ps(15));
    return _mm256_cvtps_epi32(_mm256_blendv_ps(held, _mm256_set1_ps(8), _mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
  };
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(half(x.low), half(x.high)), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

inline __m256 by8(Vector x) { return _mm256_add_ps(x.low, x.high); }

struct Pair {
  Vector first, second;  // of k's 0 to 15 and 16 to 31
};

constexpr int k_of(int lane) { return lane / LANES * 16 + lane % 4 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2; }

// Bytes 0 to 3 of the 16 values, from the lowest on; NARROW: 2 and 3 alone, the others are 0.
template <bool NARROW>
struct Table;

// 32 codes, a byte each: those of even k's in the lower half.
inline __m256i nibbles(const uint8_t* codes) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes), _mm256_set1_epi8(15));
}

template <>
struct Table<true> {
  __m256i lower, upper;
  static Table from(Vector values) {
    const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(values.low), 16), high = _mm256_srli_epi32(_mm256_castps_si256(values.high), 16);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
    const __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(words, _mm256_set1_epi16(255)), _mm256_srli_epi16(words, 8));  // lower 0-7, upper 0-7 | 8-15
    return {_mm256_permute4x64_epi64(bytes, 0x88), _mm256_permute4x64_epi64(bytes, 0xDD)};
  }
  Pair of(const uint8_t* codes) const {
    const __m256i q = nibbles(codes), l = _mm256_shuffle_epi8(lower, q), u = _mm256_shuffle_epi8(upper, q);
    const auto split = [](__m256i words) -> Vector {
      return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)), _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(int(0xFFFF0000u))))};
    };
    return {split(_mm256_unpacklo_epi8(l, u)), split(_mm256_unpackhi_epi8(l, u))};
  }
};

template <>
struct Table<false> {
  __m256i byte[4];
  static Table from(Vector values) {
    const __m256i apart = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i together = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const auto planes = [&](__m256 v) { return _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(_mm256_castps_si256(v), apart), together); };
    const __m256i low = planes(values.low), high = planes(values.high);  // bytes 0, 1 | 2, 3 of 8 values each
    const __m256i even = _mm256_unpacklo_epi64(low, high), odd = _mm256_unpackhi_epi64(low, high);
    return {{_mm256_permute2x128_si256(even, even, 0x00), _mm256_permute2x128_si256(odd, odd, 0x00),
             _mm256_permute2x128_si256(even, even, 0x11), _mm256_permute2x128_si256(odd, odd, 0x11)}};
  }
  Pair of(const uint8_t* codes) const {
    const __m256i q = nibbles(codes);
    __m256i found[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) found[i] = _mm256_shuffle_epi8(byte[i], q);
    const auto joined = [](__m256i lower, __m256i upper) -> Vector {  // 16-bit words of 16 values
      return {_mm256_castsi256_ps(_mm256_blend_epi16(lower, _mm256_slli_epi32(upper, 16), 0xAA)),
              _mm256_castsi256_ps(_mm256_blend_epi16(_mm256_srli_epi32(lower, 16), upper, 0xAA))};
    };
    return {joined(_mm256_unpacklo_epi8(found[0], found[1]), _mm256_unpacklo_epi8(found[2], found[3])),
            joined(_mm256_unpackhi_epi8(found[0], found[1]), _mm256_unpackhi_epi8(found[2], found[3]))};
  }
};

// 0 4 1 5 2 6 3 7
inline __m256 by_turns(__m256 x) { return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); }

inline Vector folded(const Pair& p) {
  const auto half = [](Vector v) {  // even k's 0 2 4 6 | 1 3 5 7, plus the odd ones
    return by_turns(_mm256_add_ps(_mm256_permute2f128_ps(v.low, v.high, 0x20), _mm256_permute2f128_ps(v.low, v.high, 0x31)));
  };
  return {half(p.first), half(p.second)};
}

inline void in_order(const Pair& p, float* out) {
  const auto half = [](Vector v, float* to) {
    _mm256_storeu_ps(to, by_turns(_mm256_unpacklo_ps(v.low, v.high))), _mm256_storeu_ps(to + 8, by_turns(_mm256_unpackhi_ps(v.low, v.high)));
  };
  half(p.first, out), half(p.second, out + LANES);
}

}  // namespace aoquant::cpu::AOQUANT_LEVEL

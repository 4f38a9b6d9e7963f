// Sixteen float32 lanes, and the few things that the kernels do with them: by AVX-512 where the level has it, otherwise
// as loops that the compiler makes vectors of. Each operation rounds once and alike in both, so the levels agree to the
// last bit; sums are fused multiply-adds everywhere.
#pragma once

#include "numbers.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace aoquant::cpu::AOQUANT_LEVEL {

constexpr int LANES = 16;

#ifdef __AVX512F__

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

// The lanes' sum: lane l + lane l + 8, then 4, 2 and 1 apart.
inline float sum(Vector x) {
  const __m256 by8 = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 by4 = _mm_add_ps(_mm256_castps256_ps128(by8), _mm256_extractf128_ps(by8, 1));
  const __m128 by2 = _mm_add_ps(by4, _mm_movehl_ps(by4, by4));
  return _mm_cvtss_f32(_mm_add_ss(by2, _mm_movehdup_ps(by2)));
}

// `sum` of four vectors, the same additions side by side.
inline void sums(const Vector* x, float* out) {
  const auto by8 = [](Vector v) { return _mm256_add_ps(_mm512_castps512_ps256(v.v), _mm512_extractf32x8_ps(v.v, 1)); };
  const auto by4 = [](__m256 a, __m256 b) { return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)); };
  const __m256 of_01 = by4(by8(x[0]), by8(x[1])), of_23 = by4(by8(x[2]), by8(x[3]));  // 4 lanes of each
  const __m256 by2 = _mm256_add_ps(_mm256_shuffle_ps(of_01, of_23, 0x44), _mm256_shuffle_ps(of_01, of_23, 0xEE));
  const __m256 by1 = _mm256_add_ps(_mm256_shuffle_ps(by2, by2, 0x88), _mm256_shuffle_ps(by2, by2, 0xDD));  // 0 2 . . 1 3 . .
  _mm_storeu_ps(out, _mm_unpacklo_ps(_mm256_castps256_ps128(by1), _mm256_extractf128_ps(by1, 1)));
}

// Sixteen bytes of codes of 4 bits: the low nibbles are 16 codes, the high ones 16 more.
struct Nibbles {
  __m512i bytes;
  explicit Nibbles(const uint8_t* p) : bytes(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))) {}
  Vector low(Vector table) const { return {_mm512_permutexvar_ps(bytes, table.v)}; }  // reads 4 bits of an index
  Vector high(Vector table) const { return {_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table.v)}; }
};

// a0 b0 a1 b1 ...
inline void interleave(Vector a, Vector b, Vector* out) {
  const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  out[0] = {_mm512_permutex2var_ps(a.v, first, b.v)};
  out[1] = {_mm512_permutex2var_ps(a.v, second, b.v)};
}

#else

struct Vector {
  float v[LANES];
  static Vector zero() { return all(0.0f); }
  static Vector all(float x) {
    Vector r;
    for (int l = 0; l < LANES; ++l) r.v[l] = x;
    return r;
  }
  static Vector load(const float* p) {
    Vector r;
    memcpy(r.v, p, sizeof r.v);
    return r;
  }
  static Vector from_int8(const void* p) {
    Vector r;
    for (int l = 0; l < LANES; ++l) r.v[l] = float(static_cast<const int8_t*>(p)[l]);
    return r;
  }
  void store(float* p) const { memcpy(p, v, sizeof v); }
};
inline Vector operator+(Vector a, Vector b) {
  for (int l = 0; l < LANES; ++l) a.v[l] += b.v[l];
  return a;
}
inline Vector operator*(Vector a, Vector b) {
  for (int l = 0; l < LANES; ++l) a.v[l] *= b.v[l];
  return a;
}
inline Vector fma(Vector a, Vector b, Vector c) {
  for (int l = 0; l < LANES; ++l) c.v[l] = __builtin_fmaf(a.v[l], b.v[l], c.v[l]);
  return c;
}
inline Vector round_bfloat16(Vector x) {
  for (int l = 0; l < LANES; ++l) {
    const uint32_t u = bits_of(x.v[l]);
    x.v[l] = float_of((u + (u >> 16 & 1) + 0x7FFF) & 0xFFFF0000);
  }
  return x;
}
template <typename T>
inline Vector load_some(const T* p, int count) {
  Vector r = Vector::zero();
  for (int l = 0; l < count; ++l) r.v[l] = Number<T>::wide(p[l]);
  return r;
}
template <typename T>
inline Vector load16(const T* p) {
  return load_some(p, LANES);
}
inline Vector operator-(Vector a, const Vector& b) {
  for (int l = 0; l < LANES; ++l) a.v[l] -= b.v[l];
  return a;
}
inline Vector operator/(Vector a, const Vector& b) {
  for (int l = 0; l < LANES; ++l) a.v[l] /= b.v[l];
  return a;
}
inline Vector smaller(Vector a, const Vector& b) {
  for (int l = 0; l < LANES; ++l) a.v[l] = b.v[l] < a.v[l] ? b.v[l] : a.v[l];
  return a;
}
inline Vector larger(Vector a, const Vector& b) {
  for (int l = 0; l < LANES; ++l) a.v[l] = b.v[l] > a.v[l] ? b.v[l] : a.v[l];
  return a;
}
inline uint32_t nans(const Vector& x) {
  uint32_t found = 0;
  for (int l = 0; l < LANES; ++l) found |= uint32_t(x.v[l] != x.v[l]) << l;
  return found;
}
inline void to_codes(const Vector& x, uint8_t* codes) {
  for (int l = 0; l < LANES; ++l) {
    float q = __builtin_rintf(x.v[l]);
    q = q < 0.0f ? 0.0f : q > 15.0f ? 15.0f : q;
    codes[l] = uint8_t(int(q != q ? 8.0f : q));
  }
}
inline uint32_t not_finite(const Vector& x) {
  uint32_t found = 0;
  for (int l = 0; l < LANES; ++l) found |= uint32_t(!(x.v[l] - x.v[l] == 0)) << l;
  return found;
}
inline uint32_t far_apart(const Vector& a, const Vector& b, int apart) {
  uint32_t found = 0;
  for (int l = 0; l < LANES; ++l) {
    const int by = int(bits_of(a.v[l]) >> 23 & 255) - int(bits_of(b.v[l]) >> 23 & 255);
    found |= uint32_t((by > apart || by < -apart) && b.v[l] != 0) << l;
  }
  return found;
}
inline float sum(Vector x) {
  for (int apart = LANES / 2; apart; apart /= 2)
    for (int l = 0; l < apart; ++l) x.v[l] += x.v[l + apart];
  return x.v[0];
}

inline void sums(const Vector* x, float* out) {
  for (int i = 0; i < 4; ++i) out[i] = sum(x[i]);
}

struct Nibbles {
  uint8_t bytes[LANES];
  explicit Nibbles(const uint8_t* p) { memcpy(bytes, p, sizeof bytes); }
  Vector low(const Vector& table) const {
    Vector r;
    for (int l = 0; l < LANES; ++l) r.v[l] = table.v[bytes[l] & 15];
    return r;
  }
  Vector high(const Vector& table) const {
    Vector r;
    for (int l = 0; l < LANES; ++l) r.v[l] = table.v[bytes[l] >> 4];
    return r;
  }
};

inline void interleave(const Vector& a, const Vector& b, Vector* out) {
  for (int l = 0; l < LANES; ++l) out[l / 8].v[2 * l % LANES] = a.v[l], out[l / 8].v[2 * l % LANES + 1] = b.v[l];
}

#endif

}  // namespace aoquant::cpu::AOQUANT_LEVEL

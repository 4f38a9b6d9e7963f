// The tree of vectors.h's sum behind its first step, `by8`, by instructions that AVX2 and AVX-512 share.
#pragma once

namespace aoquant::cpu::AOQUANT_LEVEL {

// The lanes' sum: lane l + lane l + 8, then 4, 2 and 1 apart.
inline float sum(Vector x) {
  const __m256 apart8 = by8(x);
  const __m128 by4 = _mm_add_ps(_mm256_castps256_ps128(apart8), _mm256_extractf128_ps(apart8, 1));
  const __m128 by2 = _mm_add_ps(by4, _mm_movehl_ps(by4, by4));
  return _mm_cvtss_f32(_mm_add_ss(by2, _mm_movehdup_ps(by2)));
}

// `sum` of four vectors, the same additions side by side.
inline void sums(const Vector* x, float* out) {
  const auto by4 = [](__m256 a, __m256 b) { return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)); };
  const __m256 of_01 = by4(by8(x[0]), by8(x[1])), of_23 = by4(by8(x[2]), by8(x[3]));  // 4 lanes of each
  const __m256 by2 = _mm256_add_ps(_mm256_shuffle_ps(of_01, of_23, 0x44), _mm256_shuffle_ps(of_01, of_23, 0xEE));
  const __m256 by1 = _mm256_add_ps(_mm256_shuffle_ps(by2, by2, 0x88), _mm256_shuffle_ps(by2, by2, 0xDD));  // 0 2 . . 1 3 . .
  _mm_storeu_ps(out, _mm_unpacklo_ps(_mm256_castps256_ps128(by1), _mm256_extractf128_ps(by1, 1)));
}

}  // namespace aoquant::cpu::AOQUANT_LEVEL

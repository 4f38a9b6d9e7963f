// Several rows of x by AVX2. Its sixteen registers hold the sums of two rows, so a code would be decoded again for every
// two. Here COLUMNS rows of W are decoded once, into memory that stays in a cache, and multiplied with all rows of x.
//
// The 32 lanes of a sum are independent, so they are done eight at a time: a register of sums for each of 3 x 4 results,
// and 7 loads for 12 fused multiply-adds. Each lane's chain is the one that `tile` makes.
#pragma once

#include <vector>

#include "vectors.h"

namespace aoquant::cpu::AOQUANT_LEVEL {

constexpr int COLUMNS = 4, NEAR = 256;  // k's at a time: their 7 KB stay in the first cache over the four parts

// lanes (M, N, 32), of M rows of x and N decoded rows of W, both (., k) in a Pair's order.
template <int M, int N>
void lanes_of(const float* x, const float* w, int64_t k, float* lanes) {
  for (int i = 0; i < M * N * CHUNK; ++i) lanes[i] = 0.0f;
  for (int64_t near = 0; near < k; near += NEAR) {
    const int64_t end = near + NEAR < k ? near + NEAR : k;
    for (int part = 0; part < CHUNK; part += 8) {
      __m256 sums[M][N];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[m][n] = _mm256_loadu_ps(lanes + (m * N + n) * CHUNK + part);
      for (int64_t at = near + part; at < end; at += CHUNK) {
        __m256 values[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) values[n] = _mm256_loadu_ps(w + n * k + at);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          const __m256 row = _mm256_loadu_ps(x + m * k + at);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) sums[m][n] = _mm256_fmadd_ps(values[n], row, sums[m][n]);
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) _mm256_storeu_ps(lanes + (m * N + n) * CHUNK + part, sums[m][n]);
    }
  }
}

}  // namespace aoquant::cpu::AOQUANT_LEVEL

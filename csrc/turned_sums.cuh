// Writes sums of wgmmas out of registers into y, token by token, without shared memory and without a wait for other
// warps. Each 8 x 8 of them is scaled, rounded, and turned by one instruction (movmatrix). So a group of four warps may
// write its sums while another one multiplies, and the ring is filled meanwhile.
#pragma once

#include "decode.cuh"
#include "row_blocks.cuh"
#include "turned_rows.cuh"

namespace aoquant::decode {

#ifdef AOQUANT_HOPPER
__device__ __forceinline__ uint32_t turned(uint32_t pair) {
  uint32_t v;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(v) : "r"(pair));
  return v;
}

// `write_turned` with and without scales of tokens. Four 8 x 8 at a time, because each waits for its turn.
template <int F, typename T, bool BY_TOKEN, int COUNT>
__device__ __forceinline__ void write_turned_as(const DecodeArgs& a, const float (&acc)[COUNT], int lane, int first_row) {
  constexpr int BATCH = 4;
  const int g = lane / 4, t = lane % 4, column = first_row + 4 * t, left = column < a.n ? a.m - g : 0;
  float alpha[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) alpha[h] = alpha_w_of(a, min(first_row + turned_row(g, h), a.n - 1));
  const bool swaps = turned_swaps(t);
  T* to = static_cast<T*>(a.y) + int64_t(g) * a.n + column;
  DEVICE_ASSERT(a.n % 4 == 0 && (!BY_TOKEN || a.alpha_x_stride == 1));
#pragma unroll
  for (int first = 0; first < COUNT / 4; first += BATCH) {
    if (8 * first >= a.m) break;
    uint32_t half[BATCH][2];
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const int q = first + b;
      float by[2] = {1.0f, 1.0f};
      if constexpr (BY_TOKEN)
#pragma unroll
        for (int i = 0; i < 2; ++i) by[i] = a.alpha_x[min(8 * q + 2 * t + i, a.m - 1)];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float v[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          v[i] = acc[4 * q + 2 * h + i];
          if constexpr (Folded<F, T>::YES) v[i] *= Folded<F, T>::TIMES;
          if constexpr (BY_TOKEN) v[i] *= by[i];
          v[i] *= alpha[h];
        }
        half[b][h] = turned(rows::pair(v[0], v[1], T()));
      }
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b, to += int64_t(8) * a.n)
      if (8 * (first + b) < left)
        *reinterpret_cast<uint2*>(to) = make_uint2(swaps ? half[b][1] : half[b][0], swaps ? half[b][0] : half[b][1]);
  }
}

// acc: of a warp's 16 rows of W from first_row on, in the order of `turned_row`, and COUNT * 2 tokens, of which a.m are
// there. a.n: a multiple of 4; a.alpha_x: one a token, or null.
template <int F, typename T, int COUNT>
__device__ __forceinline__ void write_turned(const DecodeArgs& a, const float (&acc)[COUNT], int lane, int first_row) {
  if (a.alpha_x) write_turned_as<F, T, true>(a, acc, lane, first_row);
  else write_turned_as<F, T, false>(a, acc, lane, first_row);
}
#endif

}  // namespace aoquant::decode

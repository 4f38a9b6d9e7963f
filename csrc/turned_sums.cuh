// Sums of wgmmas out of registers into y, token by token, without shared memory and without a wait for other warps: each
// 8 x 8 of them is turned by one instruction (movmatrix), after it was scaled and rounded.
//
// So a group of four warps may write its sums while another one multiplies, and the ring of bytes goes on being filled.
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

// acc: of a warp's 16 rows of W from first_row on, in the order of `turned_row`, and COUNT * 2 tokens, of which a.m are
// there. a.n: a multiple of 4.
template <typename T, int COUNT>
__device__ __forceinline__ void write_turned(const DecodeArgs& a, const float (&acc)[COUNT], int lane, int first_row) {
  const int g = lane / 4, t = lane % 4, column = first_row + 4 * t;
  float alpha[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) alpha[h] = alpha_w_of(a, min(first_row + turned_row(g, h), a.n - 1));
  const bool inside = column < a.n;
  T* to = static_cast<T*>(a.y) + int64_t(g) * a.n + column;
#pragma unroll
  for (int q = 0; q < COUNT / 4; ++q) {
    if (8 * q >= a.m) break;
    float by[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) by[i] = alpha_x_of(a, min(8 * q + 2 * t + i, a.m - 1));
    uint32_t half[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float low = acc[4 * q + 2 * h] * a.times * by[0] * alpha[h], high = acc[4 * q + 2 * h + 1] * a.times * by[1] * alpha[h];
      half[h] = turned(rows::pair(low, high, T()));
    }
    const bool swaps = turned_swaps(t);
    DEVICE_ASSERT(a.n % 4 == 0);
    if (inside && 8 * q + g < a.m) *reinterpret_cast<uint2*>(to + int64_t(8 * q) * a.n) = make_uint2(swaps ? half[1] : half[0], swaps ? half[0] : half[1]);
  }
}
#endif

}  // namespace aoquant::decode

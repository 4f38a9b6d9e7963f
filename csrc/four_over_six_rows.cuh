// Blocks of "fouroversix-row", as the operand of a product or as decoded values: contest.cuh's two candidates under the
// amax of the block's own row. The exact errors alone decide: rows are few here, and a thread has a block or two.
#pragma once

#include "contest.cuh"
#include "row_blocks.cuh"

namespace aoquant::rows {

// The bits of the largest magnitude that is neither NaN nor Inf; 0 if none is.
__device__ __forceinline__ uint32_t finite_absmax_bits(const float (&v)[16]) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const uint32_t magnitude = __float_as_uint(v[i]) & 0x7FFFFFFFu;
    most = max(most, magnitude < INFINITE ? magnitude : 0);
  }
  return most;
}

// o: the row's.
template <typename T>
__device__ __forceinline__ Sixteen four_over_six_block(const float (&v)[16], const Outer& o, bool decoded) {
  const uint32_t most = absmax_bits(v);
  const Entries entries{o.down};
  float x[16], y[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = __fmul_rn(v[i], o.power);
  uint32_t code = 0x7Fu;
  if (most < INFINITE) {
    const Candidates both = make_candidates<FOUR_OVER_SIX>(__fmul_rn(__uint_as_float(most), o.power), 0.0f, 0.0f, o, Shift{});
    code = exact_contest<FOUR_OVER_SIX>(o, entries, x, both, 3, 0.0f);
  }
  const Entry won = entries[code];
#pragma unroll
  for (int i = 0; i < 16; ++i) y[i] = value_of<false>(x[i], won.inverse, 1.0f, 0.0f, won.s, -0.0f, decoded ? o.t : 1.0f);
  return packed16<T>(y);
}

}  // namespace aoquant::rows

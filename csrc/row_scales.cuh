// Brings the scales of W's rows to the ring of expert_wide.cuh. A lane has a row, and reads what four steps of K need
// at once.
//
// `fill_steps` of decode_tiles.cuh reads one step's scales at a time: 4 or 8 bytes of a row, though a load moves 32.
// The 128 rows of int4's two tensors are 256 lines of 128 bytes, 32 KB, more first-level cache than the ring leaves. So
// each step may read the same sectors again: 8 KB of L2 beside 40 KB of codes and x. On an H200 int4 in groups of 32
// took 5 to 7 % longer than in groups of 128, with the same instructions in the warps that multiply. Here each sector
// is read once, and a warp that fills issues 100 instructions a step, not 160.
//
// A row has to begin at a multiple of 16 bytes: `RowScales::takes`. `fill_steps` brings other rows.
#pragma once

#include "decode_tiles.cuh"

namespace aoquant::decode {

template <int F>
struct RowScales {
  static constexpr int TENSORS = F == INT4 ? 2 : 1;  // int4: scales and zeros
  static constexpr int BYTES = F == MXFP4 ? 1 : 2;   // of 32 values, in each tensor
  static constexpr int PIECES = 4 * 4 * BYTES / 16;  // of 16 bytes, for four steps
  static bool takes(const DecodeArgs& a) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(a.scale) | (F == INT4 ? reinterpret_cast<uintptr_t>(a.zero) : 0);
    return (F != INT4 || a.group_log2 == 5) && a.k / 32 * BYTES % 16 == 0 && at % 16 == 0;
  }
};

#ifdef AOQUANT_HOPPER
// 16 bytes, or zeros: as `load_if`.
__device__ __forceinline__ uint4 load_16_if(const uint4* p, bool there) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "r"(int(there)));
  return v;
}

// `fill_steps` for whole rows of scales: the same places, barriers and words. warp: of four, with 32 rows each;
// first_row: of the expert's; steps: of a tile, from K's first on.
template <int F, typename Layout, int D, typename Word, typename Bring>
__device__ __forceinline__ void fill_row_scales(const DecodeArgs& stack, uint8_t* ring, uint32_t full, uint32_t empty, int warp, int lane, bool copies,
                                                int expert, int first_row, int steps, Turn<D>& turn, Word word, Bring bring) {
  using S = RowScales<F>;
  static_assert(Layout::ROWS == 128);
  const int row = warp * 32 + lane, pieces = stack.k / 32 * S::BYTES / 16;  // of a row
  const uint32_t start = (uint32_t(expert * stack.n + min(first_row + row, stack.n - 1)) >> stack.tile_log2) * pieces;
  uint4 raw[S::TENSORS][S::PIECES];
  auto fetch = [&](int piece) {
#pragma unroll
    for (int p = 0; p < S::PIECES; ++p)
#pragma unroll
      for (int t = 0; t < S::TENSORS; ++t)
        raw[t][p] = load_16_if(static_cast<const uint4*>(t ? stack.zero : stack.scale) + (start + piece + p), piece + p < pieces);
  };
  fetch(0);
#pragma unroll 1
  for (int step = 0; step < steps; step += 4)
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (step + q >= steps) break;
      uint32_t mine[S::TENSORS][S::BYTES];  // of this step
#pragma unroll
      for (int t = 0; t < S::TENSORS; ++t)
#pragma unroll
        for (int i = 0; i < S::BYTES; ++i) {
          mine[t][i] = (&raw[t][(q * S::BYTES + i) / 4].x)[(q * S::BYTES + i) % 4];
          asm volatile("" : "+r"(mine[t][i]));  // or words of later steps are made here, too, and take registers
        }
      auto number = [&](int t, int j) { return mine[t][j * S::BYTES / 4] >> j * S::BYTES % 4 * 8 & (S::BYTES == 1 ? 0xFFu : 0xFFFFu); };
      uint4 words;
#pragma unroll
      for (int j = 0; j < 4; ++j) (&words.x)[j] = word(RawScale{number(0, j), F == INT4 ? number(S::TENSORS - 1, j) : 0});
      if (q == 3) fetch((step + 4) / 4 * S::PIECES);  // a step ahead of its use
      wait(empty + 8 * turn.at, turn.parity);
      if (copies) bring(step + q, turn.at);
      DEVICE_ASSERT(turn.at < D && row < Layout::ROWS);
      *reinterpret_cast<uint4*>(ring + turn.at * Layout::PLACE + Layout::X + Layout::W + row * 16) = words;
      __syncwarp();
      if (lane == 0) arrive(full + 8 * turn.at);
      turn.next();
    }
}
#endif

}  // namespace aoquant::decode

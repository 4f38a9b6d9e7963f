// How whole_rows.cuh cuts its work: rows of W into blocks, a block's shared memory into places, bytes of W into copies.
// Plain arithmetic, which a CPU checks (test/ops/test_csrc_whole.py).
//
// A unit is 16 rows of W. A part is up to 1024 bytes of each of them, 2048 values; whole parts lie in shared memory, row by
// row. There, rows follow one another by an odd multiple of 64 bytes, so that the 64 bytes that four lanes read of a row and
// those of the next are in different banks.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define AOQUANT_BOTH __host__ __device__ inline
#else
#define AOQUANT_BOTH inline
#endif

namespace aoquant {

// Which of decode.cuh's kernels multiplies m rows of x, up to 16, by a W of n rows: 1 with 16 rows of W a block; 2 with 32,
// where that is a block a multiprocessor or fewer; 3 with 32.
AOQUANT_BOTH int rows_form(int m, int64_t n) {
  if (n <= 2048) return 1;
  if (n <= 132 * 32) return 2;
  return m <= 4 && n <= 6144 ? 1 : 3;
}

// Among how many warps it cuts K for up to 4 rows of x, and so whole_rows.cuh: the order of additions.
AOQUANT_BOTH int decode_warps(int64_t n) { return rows_form(1, n) == 2 ? 16 : 8; }

// Bytes from a row of scales in shared memory to the next: 16 bytes more than a multiple of 32, for the banks.
AOQUANT_BOTH int pitch_of_scales(int width) { return (width + 15) / 32 * 32 + 16; }

constexpr int UNIT_ROWS = 16, WHOLE_WARPS = 16, PART_BYTES = 1024, PART_STEPS = PART_BYTES / 64, MOST_PARTS = 32;
constexpr int WHOLE_BLOCKS = 132;               // of a launch, at most: an H200's multiprocessors
constexpr int WHOLE_SHARED = 227 * 1024 - 256;  // bytes of dynamic shared memory, at most

// Offsets in bytes, and sizes, in a block's shared memory.
struct WholeLayout {
  int units;                                          // of a block
  int width, pitch, parts;                            // of a part: bytes of a row, from row to row; parts of a unit
  int x_at, scales_at, sums_at, barriers_at, bytes;  // the first part is at 0
};

// row_scales: bytes of a row's scales there, zeros and padding included. padded: rows of parts lie apart, for the banks, and
// are copied one by one; else those of a unit are one copy where a part is a whole row.
AOQUANT_BOTH WholeLayout whole_layout(int k, int units, int row_scales, bool padded) {
  WholeLayout l = {};
  const int row = k / 2;
  l.units = units;
  l.width = row < PART_BYTES ? row : PART_BYTES;
  l.parts = (row + PART_BYTES - 1) / PART_BYTES;
  l.pitch = (padded || l.parts > 1) && l.width % 128 == 0 ? l.width + 64 : l.width;
  l.x_at = units * l.parts * UNIT_ROWS * l.pitch;
  l.scales_at = l.x_at + 2 * k;
  l.sums_at = (l.scales_at + units * UNIT_ROWS * row_scales + 15) / 16 * 16;
  l.barriers_at = l.sums_at + WHOLE_WARPS * units * UNIT_ROWS * 4;
  l.bytes = l.barriers_at + 8 * units * l.parts;
  return l;
}

// One copy of part q of a block: bytes `from` the block's first row's first byte `to` shared memory. `bytes` is 0 where lane
// `lane` has none. all: bytes of all lanes' copies.
struct PartCopy {
  int64_t from;
  int to, bytes, all;
};

// left: rows of W from the block's first on.
AOQUANT_BOTH PartCopy part_copy(const WholeLayout& l, int k, int left, int q, int lane) {
  const int unit = q / l.parts, at = q % l.parts * PART_BYTES, row = k / 2;
  const int rows = left - unit * UNIT_ROWS < UNIT_ROWS ? left - unit * UNIT_ROWS : UNIT_ROWS;
  const int width = row - at < PART_BYTES ? row - at : PART_BYTES;
  const bool one = l.parts == 1 && l.pitch == l.width;
  PartCopy c = {};
  c.all = rows * width;
  c.from = int64_t(unit * UNIT_ROWS + (one ? 0 : lane)) * row + at;
  c.to = (q * UNIT_ROWS + (one ? 0 : lane)) * l.pitch;
  c.bytes = one ? (lane == 0 ? c.all : 0) : lane < rows ? width : 0;
  return c;
}

// Where lane t of four finds its 16 bytes of a row of a unit, of a step of 128 values.
AOQUANT_BOTH int codes_at(const WholeLayout& l, int unit, int row, int step, int t) {
  return ((unit * l.parts + step / PART_STEPS) * UNIT_ROWS + row) * l.pitch + step % PART_STEPS * 64 + 16 * t;
}

// Units of a block, for the products of a launch: as few as make it WHOLE_BLOCKS blocks or fewer.
inline int whole_units(const int* ns, int count) {
  for (int units = 1;; ++units) {
    int64_t blocks = 0;
    for (int i = 0; i < count; ++i) blocks += (int64_t(ns[i]) + units * UNIT_ROWS - 1) / (units * UNIT_ROWS);
    if (blocks <= WHOLE_BLOCKS) return units;
  }
}

inline bool whole_fits(const WholeLayout& l) { return l.bytes <= WHOLE_SHARED && l.units * l.parts <= MOST_PARTS; }

}  // namespace aoquant

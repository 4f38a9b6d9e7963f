// csrc/whole_plan.cuh on a CPU: what a block of whole_rows.cuh copies, and where its lanes read.
#include <cstring>
#include <vector>

#include "whole_plan.cuh"

using namespace aoquant;

extern "C" {

int form(int m, int64_t n) { return rows_form(m, n); }
int slices(int64_t n) { return decode_warps(n); }
int units(const int* ns, int count) { return whole_units(ns, count); }

// units, width, pitch, parts, x_at, scales_at, sums_at, barriers_at, bytes; returns whether it fits.
bool layout(int k, int units, int scale_width, int copies_of_scales, bool padded, int* out) {
  const WholeLayout l = whole_layout(k, units, pitch_of_scales(scale_width) * copies_of_scales, padded);
  memcpy(out, &l, sizeof l);
  return whole_fits(l);
}

// What the block whose first row is `first` multiplies: for each of its rows, slice and step, 64 bytes as four lanes read them, in the order
// (row, step). -1 where bytes are copied over one another, or to where no part lies; -2 where a barrier's bytes do not add up.
int multiplied(const uint8_t* codes, int n, int k, int first, int units, bool padded, uint8_t* out, int* order) {
  const WholeLayout l = whole_layout(k, units, 16, padded);
  std::vector<uint8_t> shared(l.x_at), seen(l.x_at);
  const int left = n - first, rows = left < units * UNIT_ROWS ? left : units * UNIT_ROWS, here = (rows + UNIT_ROWS - 1) / UNIT_ROWS;
  for (int q = 0; q < here * l.parts; ++q) {
    int sum = 0, all = 0;
    for (int lane = 0; lane < 32; ++lane) {
      const PartCopy c = part_copy(l, k, left, q, lane);
      sum += c.bytes, all = c.all;
      if (c.bytes % 16 || c.to % 16 || c.from % 16) return -3;
      for (int i = 0; i < c.bytes; ++i) {
        if (c.to + i >= l.x_at || seen[c.to + i]++) return -1;
        shared[c.to + i] = codes[int64_t(first) * (k / 2) + c.from + i];
      }
    }
    if (sum != all) return -2;
  }
  const int slices = decode_warps(n), steps = k / 128;
  int at = 0;
  for (int warp = 0; warp < WHOLE_WARPS; ++warp)
    for (int u = warp / slices; u < here; u += WHOLE_WARPS / slices)
      for (int part = 0; part < l.parts; ++part) {
        const int first_step = part * PART_STEPS, end = PART_STEPS < steps - first_step ? PART_STEPS : steps - first_step;
        for (int s = warp % slices; s < end; s += slices) {
          order[3 * at] = warp % slices, order[3 * at + 1] = u, order[3 * at + 2] = first_step + s;
          ++at;
          for (int g = 0; g < UNIT_ROWS && u * UNIT_ROWS + g < rows; ++g)
            for (int t = 0; t < 4; ++t)
              memcpy(out + int64_t(u * UNIT_ROWS + g) * (k / 2) + (first_step + s) * 64 + 16 * t, shared.data() + codes_at(l, u, g, first_step, t) + s * 64, 16);
        }
      }
  return at;
}

}  // extern "C"

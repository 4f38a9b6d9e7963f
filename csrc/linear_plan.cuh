// How W is packed, and how Python says it in one integer (aoquant/ops/linear_plan.py). Without torch, so that a host's
// compiler takes it too.
#pragma once

#include <cstdint>
#include <cstring>

namespace aoquant {

// How W is packed. format: `Format` of decode_call.cuh. group: values that share a scale; tile: rows of W that share a
// row of scales; shift, odd_shift: GridFlip's c of even and odd blocks.
struct DecodePlan {
  int64_t format, group, tile;
  double shift, odd_shift;
};

// The fields of `plan`, which aoquant/ops/linear_plan.py packs.
struct LinearPlan {
  int format, encodes;  // of W; RowFormat of x, or 0
  int group_log2, tile_log2;
  bool alternating, half;  // half: x is float16, not bfloat16
  float shift;

  explicit LinearPlan(int64_t plan)
      : format(plan & 15), encodes(plan >> 4 & 15), group_log2(plan >> 8 & 31), tile_log2(plan >> 13 & 7), alternating(plan >> 16 & 1), half(plan >> 19 & 1) {
    const uint32_t bits = uint32_t(plan >> 20);
    memcpy(&shift, &bits, 4);
  }
  DecodePlan packing() const {
    return {format, int64_t(1) << group_log2, int64_t(1) << tile_log2, shift, alternating ? -shift : shift};
  }
};

}  // namespace aoquant

// What operators over a packed W share, decode_mm (decode.cu), linear (linear.cu) and decode_values (values.cu): how W is
// said, its checks, and the launch of a product.
#pragma once

#include <cstring>

#include "common.cuh"
#include "decode_call.cuh"

namespace aoquant {

// How W is packed. format: `Format` of decode_call.cuh. group: values that share a scale; tile: rows of W that share a
// row of scales; shift, odd_shift: GridFlip's c of even and odd blocks.
struct DecodePlan {
  int64_t format, group, tile;
  double shift, odd_shift;
};

// codes (n, k / 2) uint8, or (n, k) e4m3; scale, zero: what the format stores, not read of fp8, whose scales are alpha;
// alpha: float32, one or one a row; bias (n,).
struct DecodeWeight {
  const Tensor& codes;
  const Tensor& scale;
  const std::optional<Tensor>& zero;
  const std::optional<Tensor>& alpha;
  const std::optional<Tensor>& bias;
};

// The fields of `plan`, which aoquant/ops/gemm/few_rows.py packs.
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

// Raises where W is not as its plan says, for a product in `type` with k columns.
void check_weight(const DecodeWeight& w, ScalarType type, int64_t k, const DecodePlan& plan);

// W's part of a kernel's arguments.
DecodeArgs arguments(const DecodeWeight& w, int64_t k, const DecodePlan& plan);

// What the sums of a row of x are multiplied by: none, one number, or one for each of its rows.
struct Alpha {
  const float* of;
  bool rows;
};

// One of the products that read the same x: y (m, n), and W.
struct DecodeProduct {
  const Tensor& y;
  DecodeWeight w;
  DecodePlan plan;
};

// y (m, n) = x (m, k) W^T * alpha_x * alpha_w + bias for each of some products, on the current device and like's stream; those
// that are alike in one launch. x has the type of `like`, is contiguous and aligned to 16 bytes. encodes: the products encode
// x, and give it its alpha; where `decode_encodes` for all of them.
void decode_into(const DecodeProduct* products, int64_t count, const Tensor& like, const void* x, int64_t m, int64_t k, const Alpha& alpha_x,
                 bool encodes = false);

}  // namespace aoquant

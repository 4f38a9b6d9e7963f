// What two operators share, decode_mm (decode.cu) and linear (linear.cu): the checks of a packed W, and the launch.
#pragma once

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

// What the sums of a row of x are multiplied by: none, one number, or one for each of its rows.
struct Alpha {
  const float* of;
  bool rows;
};

// y (m, n) = x (m, k) W^T * alpha_x * alpha_w + bias, on the current device and like's stream. x has the type of `like`,
// is contiguous and aligned to 16 bytes.
void decode_into(const Tensor& y, const Tensor& like, const void* x, int64_t m, int64_t k, const Alpha& alpha_x, const DecodeWeight& w,
                 const DecodePlan& plan);

}  // namespace aoquant

// What operators over a packed W share, decode_mm (decode.cu), linear and siblings (linear.cu), experts_mm (experts.cu)
// and decode_values (values.cu): how W is said, its checks, and the launch of a product.
#pragma once

#include "common.cuh"
#include "decode_call.cuh"
#include "linear_plan.cuh"

namespace aoquant {

// codes (n, k / 2) uint8, or (n, k) e4m3; scale, zero: what the format stores, not read of fp8, whose scales are alpha;
// alpha: float32, one or one a row; bias (n,).
struct DecodeWeight {
  const Tensor& codes;
  const Tensor& scale;
  const std::optional<Tensor>& zero;
  const std::optional<Tensor>& alpha;
  const std::optional<Tensor>& bias;
};

// Raises where W is not as its plan says, for a product in `type` with k columns, on the device of `beside`.
void check_weight(const DecodeWeight& w, ScalarType type, int64_t k, const DecodePlan& plan, const Tensor& beside);

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
// that are alike in one launch. `check_weight` was called for each. x has the type of `like` and rows, is contiguous and
// aligned to 16 bytes. encodes: the products encode x, and give it its alpha; where `decode_encodes` for all of them.
void decode_into(const DecodeProduct* products, int64_t count, const Tensor& like, const void* x, int64_t m, int64_t k, const Alpha& alpha_x,
                 bool encodes = false);

}  // namespace aoquant

// torch._scaled_mm for fp8 with a scale for each row, less the search for an algorithm that it makes in every call.
#pragma once

#include "common.cuh"

namespace aoquant {

// y (m, n) = rn(x (m, k) w (k, n) * scale_x (m, 1) * scale_w (1, n) + bias) in `type`; w and scale_w are transposed views.
// False: cuBLASLt, or this build, has no algorithm for it, and y was not written.
bool scaled_mm_into(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w, const std::optional<Tensor>& bias,
                    ScalarType type, bool fast);

}  // namespace aoquant

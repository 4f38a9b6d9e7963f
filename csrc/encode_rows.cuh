// Encodes rows in one of row_blocks.cuh's formats, for a product without gradients: it writes the product's operand, or
// decoded values. It writes no codes, which only backward would read. A block has a row (row_encoder.cuh).
#pragma once

#include "check.cuh"
#include "common.cuh"
#include "four_over_six_rows.cuh"
#include "row_encoder.cuh"

namespace aoquant {

namespace rows {

// `encode_row` of FOUR_OVER_SIX_ROW. Returns the factor of decoding.
template <typename T, typename Put>
__device__ __forceinline__ float encode_four_over_six_row(const T* __restrict__ x, int k, bool decoded, Put put) {
  const int blocks = k / 16;
  float v[16];
  uint32_t most = 0;
  for (int b = threadIdx.x; b < blocks; b += blockDim.x) {
    load16(v, x + 16 * b);
    most = max(most, finite_absmax_bits(v));
  }
  const Outer o = make_outer(most_of_block(most));
  for (int b = threadIdx.x; b < blocks; b += blockDim.x) {
    if (blocks > int(blockDim.x)) load16(v, x + 16 * b);  // otherwise they are still there
    put(b, four_over_six_block<T>(v, o, decoded));
  }
  return o.t;
}

// A block for each row. out: operand or decoded values; scale: the outer scale, or the scale, of each row; of MXFP4 1.
template <typename T>
__global__ void __launch_bounds__(1024) encode_kernel(const T* __restrict__ x, T* __restrict__ out, float* __restrict__ scale, int k, int format,
                                                      int decoded) {
  wait_for_inputs();
  // With more than four rows, this kernel still occupies its multiprocessors when the product starts, and two of the
  // product's blocks could land on one. So the product is not started early.
  if (gridDim.x <= 4) let_next_begin();
  DEVICE_ASSERT(k % (format == MXFP4_ROW ? 32 : 16) == 0 && blockDim.x % 32 == 0);
  const int64_t start = int64_t(blockIdx.x) * k;
  auto put = [&](int b, const Sixteen& values) { store16(out + start + 16 * b, values); };
  const float s = format == FOUR_OVER_SIX_ROW ? encode_four_over_six_row(x + start, k, decoded, put)
                                              : encode_row(x + start, k, format, decoded, put);
  if (threadIdx.x == 0) scale[blockIdx.x] = s;
}

}  // namespace rows

// x (m, k), contiguous and aligned to 16 bytes, bfloat16 or float16, k a multiple of 16, of 32 for MXFP4. out, scale: of encode_kernel.
inline void launch_encode_rows(const void* x, ScalarType type, int64_t m, int64_t k, int format, bool decoded, void* out, float* scale,
                               cudaStream_t stream) {
  auto launch = [&](auto kernel, auto unit) {
    using T = decltype(unit);
    launch_early(kernel, int(m), rows::encode_threads(k), stream, static_cast<const T*>(x), static_cast<T*>(out), scale, int(k), format, int(decoded));
  };
  if (type == ScalarType::BFloat16) launch(rows::encode_kernel<__nv_bfloat16>, __nv_bfloat16());
  else launch(rows::encode_kernel<__half>, __half());
  check_launch();
}

}  // namespace aoquant

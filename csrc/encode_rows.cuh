// Encodes formats that scale each row by itself, for a product without gradients: it writes the product's operand, or
// decoded values. It writes no codes, which only backward would read. One block has one row and reads it twice, the
// second time out of its own cache. The arithmetic is row_blocks.cuh's.
#pragma once

#include "check.cuh"
#include "common.cuh"
#include "row_blocks.cuh"

namespace aoquant {

namespace rows {

// A block for each row. out: operand or decoded values; scale: the outer scale, or the scale, of each row.
template <typename T>
__global__ void __launch_bounds__(1024) encode_kernel(const T* __restrict__ x, T* __restrict__ out, float* __restrict__ scale, int k, int format,
                                                      int decoded) {
  wait_for_inputs();
  // With more than four rows, this kernel still occupies its multiprocessors when the product starts, and two of the
  // product's blocks could land on one. So the product is not started early.
  if (gridDim.x <= 4) let_next_begin();
  DEVICE_ASSERT(k % 16 == 0 && blockDim.x % 32 == 0);
  const int blocks = k / 16, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t start = int64_t(blockIdx.x) * k;
  float v[16];
  uint32_t most = 0;
  for (int b = threadIdx.x; b < blocks; b += blockDim.x) {
    load16(v, x + start + 16 * b);
    most = max(most, absmax_bits(v));
  }
  __shared__ uint32_t of_warps[32];
  most = __reduce_max_sync(0xFFFFFFFFu, most);
  if (lane == 0) of_warps[warp] = most;
  __syncthreads();
  most = __reduce_max_sync(0xFFFFFFFFu, lane < int(blockDim.x) / 32 ? of_warps[lane] : 0);
  const float amax = __uint_as_float(most);
  const float s = format == NVFP4_ROW ? nvfp4_outer(most) : through(__fmul_rn(amax, OF_448), T());
  const float inverse = __fdiv_rn(1.0f, s);
  if (threadIdx.x == 0) scale[blockIdx.x] = s;
  for (int b = threadIdx.x; b < blocks; b += blockDim.x) {
    if (blocks > int(blockDim.x)) load16(v, x + start + 16 * b);  // otherwise they are still there
    store16(out + start + 16 * b, format == NVFP4_ROW ? nvfp4_block<T>(v, s, inverse, decoded) : fp8_block<T>(v, s, decoded));
  }
}

}  // namespace rows

// x (m, k), contiguous and aligned to 16 bytes, bfloat16 or float16, k a multiple of 16. out, scale: of encode_kernel.
inline void launch_encode_rows(const void* x, ScalarType type, int64_t m, int64_t k, int format, bool decoded, void* out, float* scale,
                               cudaStream_t stream) {
  const int threads = k >= 16 * 1024 ? 1024 : int((k / 16 + 31) / 32 * 32);
  auto launch = [&](auto kernel, auto unit) {
    using T = decltype(unit);
    launch_early(kernel, int(m), threads, stream, static_cast<const T*>(x), static_cast<T*>(out), scale, int(k), format, int(decoded));
  };
  if (type == ScalarType::BFloat16) launch(rows::encode_kernel<__nv_bfloat16>, __nv_bfloat16());
  else launch(rows::encode_kernel<__half>, __half());
  check_launch();
}

}  // namespace aoquant

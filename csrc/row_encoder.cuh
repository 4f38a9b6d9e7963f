// A row of x encoded by a block of threads, in one of row_blocks.cuh's formats but FOUR_OVER_SIX_ROW.
#pragma once

#include "row_blocks.cuh"

namespace aoquant {

namespace rows {

// The largest of the numbers of all threads of a block, which has whole warps.
__device__ __forceinline__ uint32_t most_of_block(uint32_t most) {
  __shared__ uint32_t of_warps[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  most = __reduce_max_sync(0xFFFFFFFFu, most);
  if (lane == 0) of_warps[warp] = most;
  __syncthreads();
  return __reduce_max_sync(0xFFFFFFFFu, lane < int(blockDim.x) / 32 ? of_warps[lane] : 0);
}

// Returns the scale of a row: NVFP4's outer one, of MXFP4 1. `put(b, values)` gets the operand or the decoded values of its b-th 16
// values. All threads of a block call it, with whole warps, and read the row twice, the second time out of the cache;
// MXFP4's once.
template <typename T, typename Put>
__device__ __forceinline__ float encode_row(const T* __restrict__ x, int k, int format, bool decoded, Put put) {
  const int blocks = k / 16, lane = threadIdx.x % 32;
  float v[16];
  uint32_t most = 0;
  if (format == MXFP4_ROW) {
    for (int b = threadIdx.x; b < blocks; b += blockDim.x) {
      load16(v, x + 16 * b);
      const int left = blocks - (b - lane);  // for this warp; even, so that both halves of a block are there
      const uint32_t mine = absmax_bits(v), other = __shfl_xor_sync(left >= 32 ? 0xFFFFFFFFu : (1u << left) - 1, mine, 1);
      put(b, mxfp4_half_block<T>(v, max(mine, other)));
    }
    return 1.0f;
  }
  for (int b = threadIdx.x; b < blocks; b += blockDim.x) {
    load16(v, x + 16 * b);
    most = max(most, absmax_bits(v));
  }
  most = most_of_block(most);
  const float amax = __uint_as_float(most);
  const float s = format == NVFP4_ROW ? nvfp4_outer(most) : through(__fmul_rn(amax, OF_448), T());
  const float inverse = __fdiv_rn(1.0f, s);
  for (int b = threadIdx.x; b < blocks; b += blockDim.x) {
    if (blocks > int(blockDim.x)) load16(v, x + 16 * b);  // otherwise they are still there
    put(b, format == NVFP4_ROW ? nvfp4_block<T>(v, s, inverse, decoded) : fp8_block<T>(v, s, decoded));
  }
  return s;
}

// Threads of a block, for rows of k values.
inline int encode_threads(int64_t k) { return k >= 16 * 1024 ? 1024 : int((k / 16 + 31) / 32 * 32); }

}  // namespace rows
}  // namespace aoquant

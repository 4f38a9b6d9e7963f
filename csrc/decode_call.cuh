// The arguments of the kernels: pointers and sizes, from decode.cu.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace aoquant {

enum Format { INT4 = 0, NVFP4 = 1, MXFP4 = 2, GRIDFLIP = 3, FP8 = 4 };

struct DecodeArgs {
  const uint8_t* codes;   // (n, k / 2); fp8: (n, k)
  const void* scale;      // (n, k / group); fp8: not read
  const void* zero;       // int4: like scale
  const void* x;          // (m, k)
  const float* alpha_x;   // (m, 1), (1, 1) or null
  const float* alpha_w;   // (n, 1), (1, 1) or null
  const void* bias;       // (n,) or null
  void* y;                // (m, n)
  int m, n, k, group_log2;  // int4: values that share a scale, at least 32
  int alpha_x_stride, alpha_w_stride, bias_is_float;
  int tile_log2;          // rows of W that share a row of scales: 0, or 4 for 16 (FP4)
  float times;             // what sums are too small by, set by `run` (decode.cuh, Folded)
  float shift, odd_shift;  // GridFlip's c of even and odd blocks; times a scale it is exact in x's type
};

// Bytes of shared memory that are more than half of a multiprocessor's. Blocks of a cluster that need less are put
// there two at a time, while others have nothing to do.
constexpr int MORE_THAN_HALF = 115 * 1024;

struct DecodeCall {
  DecodeArgs args;
  uint8_t* image;  // workspace where `decode_reorders`: ceil(m / TM) * TM rows of ceil(k / 128) * 256 bytes
  cudaStream_t stream;
};

// Rows of x that fp8 weights are multiplied with, at most.
constexpr int FP8_ROWS = 16;

// Whether decode_tiles.cuh takes it, which reorders x first; the other kernels read x as it lies.
inline bool decode_reorders(int64_t m) { return m > 32; }

// Instantiated by decode_*.cu, one source a format.
template <int F, typename T>
cudaError_t run(const DecodeCall& c);
template <>
cudaError_t run<FP8, __nv_bfloat16>(const DecodeCall& c);
template <>
cudaError_t run<FP8, __half>(const DecodeCall& c);

}  // namespace aoquant

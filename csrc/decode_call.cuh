// The arguments of the kernels: pointers and sizes, from decode.cu.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "check.cuh"

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
  // On the host: another W of the same K and format that multiplies the same x in the same launch, or null. Both W's
  // have one `decode_cut`, and `decode_takes_siblings` holds for both.
  const DecodeArgs* sibling;
  bool encodes;  // on the host: x is as the model has it, and the product encodes it by rows; `decode_encodes`
};
constexpr int SIBLINGS = 3;  // that a launch takes, at most: q, k and v

// Bytes of shared memory that are more than half of a multiprocessor's. A block that asks for this many has a
// multiprocessor to itself. Blocks of a cluster that need less are put on one multiprocessor in pairs, while others
// have nothing to do.
constexpr int MORE_THAN_HALF = 115 * 1024;

// Bytes of dynamic shared memory that every launch may have: 48 KB, less what a kernel declares itself (scales of 16
// rows).
constexpr int WITHOUT_ASKING = 47 * 1024;

struct DecodeCall {
  DecodeArgs args;
  uint8_t* image;  // workspace where `decode_reorders`: ceil(m / TM) * TM rows of ceil(k / 128) * 256 + 4 bytes
  cudaStream_t stream;
};

// Whether decode.cuh, decode_rows.cuh or decode_fp8.cu takes it.
inline bool decode_is_few(int64_t m) { return m <= 16; }

// Whether decode_tiles.cuh multiplies W; it reorders x first. The other kernels read x as it lies in memory.
inline bool decode_reorders(int64_t m, bool encodes) { return m > 32 || (encodes && !decode_is_few(m)); }

// Whether decode_rows.cuh multiplies a W, for few rows of x.
inline bool decode_is_large(int64_t n, int64_t k) { return n > 2048 && n * k >= (1 << 25); }

// Whether W's of this shape may be siblings in one launch: decode.cuh's own kernel multiplies them, or decode_fp8.cu's.
inline bool decode_takes_siblings(int format, int64_t m, int64_t n, int64_t k) {
  return decode_is_few(m) && (format == FP8 || !decode_is_large(n, k));
}

// Units of 16 rows of W in a block of decode_fp8.cu, chosen so that the busiest of 132 multiprocessors has few units.
inline int decode_fp8_units(int64_t n) {
  auto busiest = [&](int units) { return ((n + 16 * units - 1) / (16 * units) + 131) / 132 * units; };
  if (n <= 16 * 132) return 1;
  if (busiest(7) <= busiest(4) && busiest(7) <= busiest(2)) return 7;
  return busiest(4) <= busiest(2) ? 4 : 2;
}

// Which of decode.cuh's kernels multiplies m rows of x, up to 16, by W's that have n rows together. 1: 16 rows of W in
// a block. 2: 32 rows, and at most one block for each multiprocessor. 3: 32 rows, and more blocks.
inline int rows_form(int64_t m, int64_t n) {
  if (n <= 2048) return 1;
  if (n <= 132 * 32) return 2;
  return m <= 4 && n <= 6144 ? 1 : 3;
}

// The number of warps among which decode.cuh cuts K for m rows of x, up to 16. It fixes the order of additions, so no
// sibling changes it. It is 16 if W has few rows and each of them is long: 2048 x 8192 with one row of x takes 5.9 us,
// and 6.8 with 8 warps.
inline int rows_warps(int64_t m, int64_t n, int64_t k) { return m <= 4 && n <= 2048 && k >= 6144 ? 16 : 8; }

// The number that W's of one K must share to be siblings: `rows_warps` for 4 bits, the units of a block for fp8.
inline int decode_cut(int format, int64_t m, int64_t n, int64_t k) { return format == FP8 ? decode_fp8_units(n) : rows_warps(m, n, k); }

// Whether the product encodes x itself, in place of a launch before it: by rows of NVFP4 for an NVFP4 W, by rows of fp8
// for an fp8 W. From 17 rows on, the kernel that reorders x does it, with a row in a block's shared memory. With one row
// every block encodes x. On an H200 that pays up to 8192 values of a row times the blocks of
// a multiprocessor (NVFP4, 4096 x 4096: 6.2 us, and 7.6 with the launch). With 8 rows of 2048 values it takes 6.7 us,
// and 5.2 with the launch.
inline bool decode_encodes(int format, int64_t m, int64_t n, int64_t k) {
  if (!decode_is_few(m)) return (format == NVFP4 || format == FP8) && 2 * k <= WITHOUT_ASKING;
  if (m != 1 || (format == NVFP4 ? decode_is_large(n, k) : format != FP8)) return false;
  const bool narrow = n <= 2048 || (n > 132 * 32 && n <= 6144);  // decode_plan.cuh's rows of a block
  const int64_t rows = format == FP8 ? 16 * decode_fp8_units(n) : narrow ? 16 : 32, blocks = (n + rows - 1) / rows;
  return k * ((blocks + 131) / 132) <= 8192;
}

// Instantiated by decode_*.cu, one source a format.
template <int F, typename T>
cudaError_t run(const DecodeCall& c);
template <>
cudaError_t run<FP8, __nv_bfloat16>(const DecodeCall& c);
template <>
cudaError_t run<FP8, __half>(const DecodeCall& c);

}  // namespace aoquant

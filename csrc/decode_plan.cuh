// Chooses the kernel (decode.cuh, decode_rows.cuh, decode_once.cuh or decode_tiles.cuh) and how it cuts K. The cut
// depends on (n, k) and on the range that m is in, never on m inside a range. So a row of y does not depend on how many
// rows there are. The kernel may: one row has another, and so have siblings and products that encode x. Ranges end at 4, 16, 64 and 256; of fp8 at 8, 64 and 256, and up to 8 rows are decode_fp8.cu's. Up to 32
// and up to 64 rows have different kernels, and so have up to 128 and up to 256, but the same cuts of K for an (n, k):
// there the order of additions, and so a row's bits, is one.
//
// The cuts were measured on an H200: enough blocks for its 132 multiprocessors, but no more sums to add than pays.
#pragma once

#include "decode.cuh"
#include "decode_call.cuh"
#include "decode_once.cuh"
#include "decode_rows.cuh"
#include "decode_tiles.cuh"

namespace aoquant {

// Launches decode_rows.cuh for up to TOKENS rows of x, 8 or 16, if it pays for this W; else returns false.
template <int F, typename T, int TOKENS>
bool run_large(const DecodeArgs& a, cudaStream_t stream, cudaError_t& error) {
  constexpr int MULTIPROCESSORS = 132, WARPS = 8, AHEAD = F == INT4 && TOKENS == 8 ? 2 : 1;
  if (!decode_is_large(a.n, a.k)) return false;
  // of the busiest multiprocessor
  auto rows = [&](int block) { return ((a.n + block - 1) / block + MULTIPROCESSORS - 1) / MULTIPROCESSORS * block; };
  if (a.n <= 32 * MULTIPROCESSORS && decode::RowsLayout<F, TOKENS, 4, WARPS, AHEAD, 2>::fits(a))
    error = decode::launch_rows<F, T, TOKENS, 4, WARPS, AHEAD, 2>(a, stream);
  else if (a.n > 64 * MULTIPROCESSORS && rows(112) <= rows(64) && decode::RowsLayout<F, TOKENS, 7, WARPS, 1, 1>::fits(a))
    error = decode::launch_rows<F, T, TOKENS, 7, WARPS, 1, 1>(a, stream);
  else if ((TOKENS == 8 || a.n <= 64 * MULTIPROCESSORS) && decode::RowsLayout<F, TOKENS, 4, WARPS, 1, 1>::fits(a))
    error = decode::launch_rows<F, T, TOKENS, 4, WARPS, 1, 1>(a, stream);
  else
    return false;
  return true;
}

// More than `decode_is_few` rows of x. A multiprocessor has one block, so the cuts give about as many blocks as
// multiprocessors. fp8's steps have more bytes, so fewer of the largest fit.
template <int F, typename T>
cudaError_t run_many(const DecodeArgs& a, uint8_t* image, cudaStream_t stream) {
  const int m = a.m, n = a.n;
  const bool narrow = n <= 132 * 32, wide = n > 8192;  // narrow: a block of 32 rows for each multiprocessor, or fewer
  if constexpr (decode::ROW_FORMAT<F> != 0)
    if (m <= 32 && a.encodes) {  // two launches all the same
      if (narrow) return decode::launch_tiles<F, T, 1, 2, 32, 2, 12>(a, image, stream);
      return wide ? decode::launch_tiles<F, T, 2, 2, 32, 1, 8>(a, image, stream) : decode::launch_tiles<F, T, 2, 2, 32, 2, 8>(a, image, stream);
    }
  if (m <= 32) {
    if (narrow) return decode::launch_once<F, T, 1, 2, 2, 12, 2>(a, stream);
    return wide ? decode::launch_once<F, T, 2, 2, 1, 8, 1>(a, stream) : decode::launch_once<F, T, 2, 2, 2, 8, 1>(a, stream);
  }
  if (m <= 64) {  // cuts of K as for up to 32 rows
    if (narrow) return decode::launch_tiles<F, T, 1, 2, 64, 2, 8>(a, image, stream);
    return wide ? decode::launch_tiles<F, T, 2, 2, 64, 1, 6>(a, image, stream) : decode::launch_tiles<F, T, 2, 2, 64, 2, 6>(a, image, stream);
  }
  // up to 128 rows blocks of 64 rows of W, for twice as many multiprocessors; the cuts of K, and so the bits, are one
  if (narrow && m <= 128) return decode::launch_tiles<F, T, 1, 1, 128, 2, F == FP8 ? 5 : 6>(a, image, stream);
  if (!wide) return decode::launch_tiles<F, T, 2, 1, 128, 2, 4>(a, image, stream);
  return m <= 128 ? decode::launch_tiles<F, T, 2, 1, 128, 1, 4>(a, image, stream) : decode::launch_tiles<F, T, 2, 1, 256, 1, F == FP8 ? 2 : 3>(a, image, stream);
}

template <int F, typename T>
cudaError_t run(const DecodeCall& c) {
  DecodeArgs a = c.args;
  a.times = decode::Folded<F, T>::TIMES;
  const int m = a.m, n = a.n;
  cudaError_t error = cudaSuccess;
  int64_t rows = 0;  // of W and its siblings
  for (const DecodeArgs* w = &a; w; w = w->sibling) rows += w->n;
  const int form = rows_form(m, rows);
  if (m <= 4) {
    if (run_large<F, T, 8>(a, c.stream, error)) return error;
    if (rows_warps(m, n, a.k) == 16)
      return m == 1 ? decode::launch<F, T, 1, 1, 16, 3>(a, c.stream) : decode::launch<F, T, 4, 1, 16, 2>(a, c.stream);
    if (form == 3 && a.encodes) return decode::launch<F, T, 1, 2, 8, 2>(a, c.stream);
    if (form == 3 && m > 1) return decode::launch<F, T, 4, 2, 8, 2>(a, c.stream);
    if (form > 1) return m == 1 ? decode::launch<F, T, 1, 2, 8, 3>(a, c.stream) : decode::launch<F, T, 4, 2, 8, 3>(a, c.stream);
    return m == 1 ? decode::launch<F, T, 1, 1, 8, 3>(a, c.stream) : decode::launch<F, T, 4, 1, 8, 3>(a, c.stream);
  }
  if (decode_is_few(F, m)) {
    if (run_large<F, T, 16>(a, c.stream, error)) return error;
    if (form == 1) return decode::launch<F, T, 16, 1, 8, 3>(a, c.stream);
    return form == 2 ? decode::launch<F, T, 16, 2, 8, 3>(a, c.stream) : decode::launch<F, T, 16, 2, 8, 2>(a, c.stream);
  }
  return run_many<F, T>(a, c.image, c.stream);
}

}  // namespace aoquant

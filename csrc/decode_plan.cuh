// Which of the kernels of decode.cuh and decode_tiles.cuh runs, and how it cuts K: by (n, k) and by the range that m lies in, never by m
// inside a range, so that rows of y do not depend on how many there are. Ranges end at 4, 16, 64 and 256. The cuts were measured on an
// H200: enough blocks for its 132 multiprocessors, without more sums to add than that takes.
#pragma once

#include "decode.cuh"
#include "decode_call.cuh"
#include "decode_tiles.cuh"

namespace aoquant {

template <int F, typename T>
cudaError_t run(const DecodeCall& c) {
  DecodeArgs a = c.args;
  a.times = decode::Folded<F, T>::TIMES;
  const int m = a.m, n = a.n, k = a.k;
  const bool wide = n > 8192, deep = k > 8192;
  if (m <= 4) {
    if (wide && F == INT4) return m == 1 ? decode::launch<F, T, 1, 2, 1, 4, 1, 3>(a, c.stream) : decode::launch<F, T, 4, 2, 1, 4, 1, 2>(a, c.stream);
    if (n > 6144 && !wide) return m == 1 ? decode::launch<F, T, 1, 2, 1, 8, 1, 3>(a, c.stream) : decode::launch<F, T, 4, 2, 1, 8, 1, 2>(a, c.stream);
    if (n > 2048 && n <= 132 * 32)  // a block of 32 rows on each multiprocessor, with as many warps as it holds
      return m == 1 ? decode::launch<F, T, 1, 2, 1, 16, 1, 2>(a, c.stream) : decode::launch<F, T, 4, 2, 1, 16, 1, 2>(a, c.stream);
    return m == 1 ? decode::launch<F, T, 1, 1, 1, 8, 1, 3>(a, c.stream) : decode::launch<F, T, 4, 1, 1, 8, 1, 3>(a, c.stream);
  }
  if (decode_is_few(m)) {
    if (wide) return decode::launch<F, T, 16, 2, 2, 4, 1, 2>(a, c.stream);
    if (n <= 2048) return decode::launch<F, T, 16, 1, 1, 8, 1, 3>(a, c.stream);
    return deep ? decode::launch<F, T, 16, 2, 1, 8, 2, 2>(a, c.stream) : decode::launch<F, T, 16, 2, 1, 8, 1, 2>(a, c.stream);
  }
  if (m <= 64)
    return wide ? decode::launch_tiles<F, T, 1, 64, 2, 4, 4>(a, c.image, c.stream) : decode::launch_tiles<F, T, 1, 64, 4, 4, 4>(a, c.image, c.stream);
  return wide ? decode::launch_tiles<F, T, 2, 128, 1, 3, 6>(a, c.image, c.stream) : decode::launch_tiles<F, T, 1, 128, 2, 4, 8>(a, c.image, c.stream);
}

}  // namespace aoquant

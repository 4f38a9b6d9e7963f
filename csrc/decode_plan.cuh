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
  const int m = c.args.m;
  const bool wide = c.args.n > 8192, deep = c.args.k > 8192;
  if (m <= 4) {
    if (wide) return m == 1 ? decode::launch<F, T, 1, 2, 1, 4, 1, 3>(c.args, c.stream) : decode::launch<F, T, 4, 2, 1, 4, 1, 3>(c.args, c.stream);
    if (deep) return m == 1 ? decode::launch<F, T, 1, 1, 1, 16, 1, 2>(c.args, c.stream) : decode::launch<F, T, 4, 1, 1, 16, 1, 2>(c.args, c.stream);
    return m == 1 ? decode::launch<F, T, 1, 1, 1, 8, 1, 3>(c.args, c.stream) : decode::launch<F, T, 4, 1, 1, 8, 1, 2>(c.args, c.stream);
  }
  if (decode_is_few(m))
    return wide ? decode::launch<F, T, 16, 2, 2, 4, 1, 3>(c.args, c.stream) : decode::launch<F, T, 16, 2, 2, 4, 2, 3>(c.args, c.stream);
  if (m <= 64)
    return wide ? decode::launch_tiles<F, T, 64, 2, 4>(c.args, c.image, c.stream) : decode::launch_tiles<F, T, 64, 4, 4>(c.args, c.image, c.stream);
  return wide ? decode::launch_tiles<F, T, 256, 1, 3>(c.args, c.image, c.stream) : decode::launch_tiles<F, T, 128, 2, 3>(c.args, c.image, c.stream);
}

}  // namespace aoquant

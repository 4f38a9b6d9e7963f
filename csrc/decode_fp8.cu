// y = x W^T for up to 16 rows of x and W in e4m3, a scale for each row of W being a factor of its sums: the few rows of
// decode.cuh, with 8 bits. From 17 rows on W is decoded once (aoquant/ops/gemm/few_rows.py).
//
// As there, W is the left operand of mma.m16n8k16, k is permuted alike on both sides, the step s of 64 values belongs to
// warp s % WARPS, and warps are added in order, so that a row of y depends on that row of x and on W alone. A lane holds 16
// contiguous values of two rows of W and as many of a row of x, and a product takes four of them: two pairs. x is not
// shared between warps, which have other parts of K.
#include "fp8_pairs.cuh"

namespace aoquant {

namespace decode {

// TOKENS: rows of x at most, 8 or 16. WARPS: of a block of 16 rows of W, along K. D: steps in flight a warp.
template <typename T, int TOKENS, int WARPS, int D>
__global__ void __launch_bounds__(32 * WARPS) fp8_kernel(const DecodeArgs a) {
#ifdef AOQUANT_HOPPER
  constexpr int MT = TOKENS / 8, PITCH = 20;  // rows of a block, and a pad for the banks
  __shared__ float partial[WARPS * TOKENS * PITCH];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int first_row = blockIdx.x * 16;
  const int steps = (a.k + 63) / 64, mine = steps > warp ? (steps - warp + WARPS - 1) / WARPS : 0;
  const uint8_t* rows[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) rows[h] = a.codes + int64_t(min(first_row + 8 * h + g, a.n - 1)) * a.k + 16 * t;
  const T* tokens[MT];
#pragma unroll
  for (int m = 0; m < MT; ++m) tokens[m] = static_cast<const T*>(a.x) + int64_t(min(8 * m + g, a.m - 1)) * a.k + 16 * t;

  uint4 codes[D][2], x[D][MT][2];
  float acc[MT][4] = {};
  auto fetch = [&](int stage, int i) {  // stage is a constant
    const int at = (warp + i * WARPS) * 64;
    const bool inside = i < mine && at + 16 * t < a.k;
    DEVICE_ASSERT(!inside || at + 16 * t + 16 <= a.k);
#pragma unroll
    for (int h = 0; h < 2; ++h) codes[stage][h] = inside ? load_codes(rows[h] + at) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        x[stage][m][h] = inside && 8 * m + g < a.m ? reinterpret_cast<const uint4*>(tokens[m] + at)[h] : make_uint4(0, 0, 0, 0);
  };
  // the kernel before this one may still run (programmatic launch): until it has ended, nothing is read
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#pragma unroll
  for (int d = 0; d < D - 1; ++d) fetch(d, d);
  for (int base = 0; base < mine; base += D) {
#pragma unroll
    for (int d = 0; d < D; ++d) {
      const int i = base + d;
      if (i >= mine) break;
      fetch((d + D - 1) % D, i + D - 1);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t lower[2], upper[2];
        pairs(lower, (&codes[d][0].x)[j], T());
        pairs(upper, (&codes[d][1].x)[j], T());
        const uint32_t w[4] = {lower[0], upper[0], lower[1], upper[1]};
#pragma unroll
        for (int m = 0; m < MT; ++m) Pair<T>::mma(acc[m], w, (&x[d][m][j / 2].x)[2 * (j % 2)], (&x[d][m][j / 2].x)[2 * (j % 2) + 1]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) partial[(warp * TOKENS + 8 * m + 2 * t + i % 2) * PITCH + g + 8 * (i / 2)] = acc[m][i];
  __syncthreads();
  for (int o = threadIdx.x; o < min(a.m, TOKENS) * 16; o += 32 * WARPS) {
    const int token = o / 16, row = o % 16;
    float v = partial[token * PITCH + row];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) v += partial[(w * TOKENS + token) * PITCH + row];
    store<T>(a, v, token, first_row + row);
  }
#endif
}

template <typename T>
cudaError_t run_fp8(const DecodeCall& c) {
  DecodeArgs a = c.args;
  a.times = 1.0f;
  const int blocks = (a.n + 15) / 16;
  if (!decode_is_few(a.m)) return cudaErrorInvalidValue;
  if (a.n <= 16 * 132) {  // not more than a block on each multiprocessor
    if (a.m <= 8) return launch_kernel<1>(fp8_kernel<T, 8, 16, 3>, blocks, 32 * 16, 0, c.stream, a);
    return launch_kernel<1>(fp8_kernel<T, 16, 16, 2>, blocks, 32 * 16, 0, c.stream, a);
  }
  if (a.m <= 8) return launch_kernel<1>(fp8_kernel<T, 8, 8, 4>, blocks, 32 * 8, 0, c.stream, a);
  return launch_kernel<1>(fp8_kernel<T, 16, 8, 3>, blocks, 32 * 8, 0, c.stream, a);
}

}  // namespace decode

template <>
cudaError_t run<FP8, __nv_bfloat16>(const DecodeCall& c) {
  return decode::run_fp8<__nv_bfloat16>(c);
}
template <>
cudaError_t run<FP8, __half>(const DecodeCall& c) {
  return decode::run_fp8<__half>(c);
}

}  // namespace aoquant

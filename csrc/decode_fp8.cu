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

// TOKENS: rows of x at most, 8 or 16. WARPS: of a block of 16 rows of W, along K. S: steps that a warp asks for ahead, by
// asynchronous copies, each lane for the bytes that it will read itself (see decode_rows.cuh).
template <typename T, int TOKENS, int WARPS, int S>
__global__ void __launch_bounds__(32 * WARPS) fp8_kernel(const DecodeArgs a) {
#ifdef AOQUANT_HOPPER
  constexpr int MT = TOKENS / 8, PITCH = 20;  // rows of a block, and a pad for the banks
  extern __shared__ __align__(128) uint8_t shared[];
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

  const uint8_t* ring = shared + warp * S * 1024 + lane * 16;
  const uint32_t to = uint32_t(__cvta_generic_to_shared(ring));
  float acc[MT][4] = {};
  auto fetch_codes = [&](int i) {  // always ends a group of copies
    const int at = (warp + i * WARPS) * 64;
    const bool inside = i < mine && at + 16 * t < a.k;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to + (i % S) * 1024 + h * 512), "l"(inside ? rows[h] + at : a.codes),
                   "r"(inside ? 16 : 0)
                   : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  auto fetch_x = [&](uint4 (&x)[MT][2], int i) {
    const int at = (warp + i * WARPS) * 64;
    const bool inside = i < mine && at + 16 * t < a.k;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) x[m][h] = inside && 8 * m + g < a.m ? reinterpret_cast<const uint4*>(tokens[m] + at)[h] : make_uint4(0, 0, 0, 0);
  };
  auto multiply = [&](const uint4 (&x)[MT][2], int i) {
    asm volatile("cp.async.wait_group %0;" ::"n"(S - 2) : "memory");
    uint4 codes[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) codes[h] = *reinterpret_cast<const uint4*>(ring + (i % S) * 1024 + h * 512);
    fetch_codes(i + S - 1);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t lower[2], upper[2];
      pairs(lower, (&codes[0].x)[j], T());
      pairs(upper, (&codes[1].x)[j], T());
      const uint32_t w[4] = {lower[0], upper[0], lower[1], upper[1]};
#pragma unroll
      for (int m = 0; m < MT; ++m) Pair<T>::mma(acc[m], w, (&x[m][j / 2].x)[2 * (j % 2)], (&x[m][j / 2].x)[2 * (j % 2) + 1]);
    }
  };
  // the kernel before this one may still run (programmatic launch): until it has ended, nothing is read
  prefetch_rows<FP8>(a, first_row, 16, 0, 1);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#pragma unroll
  for (int i = 0; i < S - 1; ++i) fetch_codes(i);
  uint4 even[MT][2], odd[MT][2];
  fetch_x(even, 0);
  for (int i = 0; i < mine; i += 2) {
    fetch_x(odd, i + 1);
    multiply(even, i);
    if (i + 1 == mine) break;
    fetch_x(even, i + 2);
    multiply(odd, i + 1);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
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

template <typename T, int TOKENS, int WARPS, int S>
cudaError_t launch_fp8(const DecodeArgs& a, cudaStream_t stream) {
  return launch_kernel<1>(fp8_kernel<T, TOKENS, WARPS, S>, a, (a.n + 15) / 16, 32 * WARPS, WARPS * S * 1024, stream);
}

template <typename T>
cudaError_t run_fp8(const DecodeCall& c) {
  DecodeArgs a = c.args;
  a.times = 1.0f;
  if (!decode_is_few(a.m)) return cudaErrorInvalidValue;
  if (a.n <= 16 * 132)  // not more than a block on each multiprocessor
    return a.m <= 8 ? launch_fp8<T, 8, 16, 8>(a, c.stream) : launch_fp8<T, 16, 16, 8>(a, c.stream);
  return a.m <= 8 ? launch_fp8<T, 8, 8, 8>(a, c.stream) : launch_fp8<T, 16, 8, 8>(a, c.stream);
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

// y = x W^T for up to 16 rows of x and W in e4m3, a scale for each row of W being a factor of its sums: the few rows of
// decode.cuh, with 8 bits. From 17 rows on decode_plan.cuh chooses the kernel, as for 4 bits.
//
// As in decode.cuh, W is the left operand of mma.m16n8k16, and k is permuted alike on both sides. Warp s % WARPS
// multiplies step s of 64 values, and the warps' sums are added in order. So a row of y depends on that row of x and on
// W alone. A lane holds 16 contiguous values of two rows of W and 16 of a row of x. A product takes four of them, as
// two pairs. Warps do not share x, because they multiply different parts of K.
//
// Asynchronous copies bring W, for the reasons in decode_rows.cuh. A lane asks for the bytes that it will read itself,
// S steps of RT units of 16 rows ahead. It asks for x AHEAD steps ahead, once for all RT units. If N allows it, there
// are as many blocks as multiprocessors, or a few less.
#include "decode_plan.cuh"
#include "fp8_pairs.cuh"

namespace aoquant {

namespace decode {

template <int TOKENS, int RT, int WARPS, int S>
struct Fp8Layout {
  static constexpr int ROWS = 16 * RT, UNITS = S * RT, UNIT = 1024, PITCH = ROWS + 4;  // a pad for the banks
  static constexpr int RING = WARPS * UNITS * UNIT, PARTIAL = WARPS * TOKENS * PITCH * 4, BYTES = RING > PARTIAL ? RING : PARTIAL;
  static_assert(UNITS >= 2 && BYTES <= 227 * 1024);
};

// Bytes from one row of x that is encoded here to the next: 16 more than its values, for the banks.
__host__ __device__ inline int x_pitch(int k) { return 2 * k + 16; }

// TOKENS: rows of x, at most: 8 or 16. RT: units of 16 rows of W in a block; n is at least 16 RT if RT > 1. WARPS: of a
// block, along K. S: steps in flight in a warp. ENCODES: the block encodes x into shared memory behind the ring, row by
// row with a pad.
template <typename T, int TOKENS, int RT, int WARPS, int S, int COUNT, bool ENCODES>
__global__ void __launch_bounds__(32 * WARPS, RT == 1 && ENCODES ? 2 : 1) fp8_kernel(const __grid_constant__ Several<COUNT> several) {
#ifdef AOQUANT_HOPPER
  const BlockPlace place = place_of(several);
  const DecodeArgs& a = several.of[place.which];
  prefetch_rows<FP8>(a, place.block * 16 * RT, 16 * RT);
  prefetch_columns<T>(a, place.block * 16 * RT, 16 * RT);
  using Layout = Fp8Layout<TOKENS, RT, WARPS, S>;
  constexpr int MT = TOKENS / 8, ROWS = Layout::ROWS, PITCH = Layout::PITCH, UNITS = Layout::UNITS;
  constexpr bool NAN_APART = std::is_same_v<T, __nv_bfloat16>;  // float16's conversion makes a NaN of a NaN
  // steps ahead that x is asked for; 16 warps have the registers for that many, and more hide more of L2's latency
  constexpr int AHEAD = ENCODES ? 1 : S > 4 ? S / (MT + 1) : MT == 1 ? S : (S + 1) / 2;
  static_assert(S % AHEAD == 0);
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  // the last block may overlap the one before it; both write the same bits to the shared rows
  const int first_row = RT == 1 ? place.block * ROWS : min(place.block * ROWS, a.n - ROWS);
  const int steps = (a.k + 63) / 64, mine = steps > warp ? (steps - warp + WARPS - 1) / WARPS : 0;
  const uint8_t* low = a.codes + int64_t(min(first_row + g, a.n - 1)) * a.k + 16 * t + 64 * warp;
  const uint8_t* high = a.codes + int64_t(min(first_row + 8 + g, a.n - 1)) * a.k + 16 * t + 64 * warp;
  const int64_t sixteen_rows = int64_t(16) * a.k;
  const T* tokens[MT];
#pragma unroll
  for (int m = 0; m < MT; ++m) tokens[m] = static_cast<const T*>(a.x) + int64_t(min(8 * m + g, a.m - 1)) * a.k + 16 * t;

  uint8_t* const ring = shared + warp * UNITS * Layout::UNIT + lane * 16;
  const uint32_t to = uint32_t(__cvta_generic_to_shared(ring));
  // place, s * RT + r, is a constant; always ends a group of copies. Beyond K the ring has zeros.
  auto fetch = [&](int place, int i) {
    const int64_t at = int64_t(i) * WARPS * 64 + place % RT * sixteen_rows;
    const int bytes = (warp + i * WARPS) * 64 + 16 * t < a.k ? 16 : 0;
    if (i < mine) {
      const uint8_t *from = bytes ? low + at : a.codes, *other = bytes ? high + at : a.codes;
      DEVICE_ASSERT(from + 16 <= a.codes + int64_t(a.n) * a.k && other + 16 <= a.codes + int64_t(a.n) * a.k);
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to + place * Layout::UNIT), "l"(from), "r"(bytes) : "memory");
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to + place * Layout::UNIT + 512), "l"(other), "r"(bytes) : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  uint8_t* const encoded = shared + Layout::BYTES;
  const int pitch = x_pitch(a.k);
  uint4 next_x[AHEAD][MT][2];
  auto fetch_x = [&](int place, int i) {  // place is a constant
    const int at = (warp + i * WARPS) * 64;
    const bool inside = i < mine && at + 16 * t < a.k;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (!inside || 8 * m + g >= a.m) next_x[place][m][h] = make_uint4(0, 0, 0, 0);
        else if (ENCODES) next_x[place][m][h] = reinterpret_cast<const uint4*>(encoded + (8 * m + g) * pitch + 2 * (at + 16 * t))[h];
        else next_x[place][m][h] = reinterpret_cast<const uint4*>(tokens[m] + at)[h];
  };
  uint4 next_codes[2];  // the next unit, from shared memory into registers, while this one is multiplied
  auto take = [&](int place) {
#pragma unroll
    for (int h = 0; h < 2; ++h) next_codes[h] = *reinterpret_cast<const uint4*>(ring + place * Layout::UNIT + h * 512);
  };
  // the kernel before this one may still run (programmatic launch): until it has ended, nothing is read
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  auto fetch_first = [&] {
#pragma unroll
    for (int place = 0; place < UNITS; ++place) fetch(place, place / RT);
  };
  __shared__ float alpha_here[TOKENS];
  __shared__ uint32_t most_here[TOKENS];
  if constexpr (ENCODES) {
    EncodedHere<T, 32 * WARPS, FP8_ROW> rows(a, min(a.m, TOKENS));
    fetch_first();
    rows.encode([&](int token, int b, int h) { return encoded + token * pitch + 32 * b + 16 * h; }, alpha_here, most_here);
    __syncthreads();
    fetch_x(0, 0);
  } else {
#pragma unroll
    for (int place = 0; place < AHEAD; ++place) fetch_x(place, place);
    fetch_first();
  }
  float acc[RT][MT][4] = {};
  asm volatile("cp.async.wait_group %0;" ::"n"(UNITS - 1) : "memory");
  take(0);
  for (int base = 0; base < mine; base += S) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const int i = base + s;
      if (i >= mine) break;
      uint4 x[MT][2];
#pragma unroll
      for (int m = 0; m < MT; ++m) x[m][0] = next_x[s % AHEAD][m][0], x[m][1] = next_x[s % AHEAD][m][1];
      fetch_x(s % AHEAD, i + AHEAD);
#pragma unroll
      for (int r = 0; r < RT; ++r) {
        const uint4 codes[2] = {next_codes[0], next_codes[1]};
        asm volatile("cp.async.wait_group %0;" ::"n"(UNITS - 2) : "memory");
        take((s * RT + r + 1) % UNITS);
        uint32_t nan = 0;
        if (NAN_APART)
#pragma unroll
          for (int j = 0; j < 4; ++j) nan |= nan_bits((&codes[0].x)[j]) | nan_bits((&codes[1].x)[j]);
        auto multiply = [&](auto pairs) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            uint32_t lower[2], upper[2];
            pairs(lower, (&codes[0].x)[j]);
            pairs(upper, (&codes[1].x)[j]);
            const uint32_t w[4] = {lower[0], upper[0], lower[1], upper[1]};
#pragma unroll
            for (int m = 0; m < MT; ++m) Pair<T>::mma(acc[r][m], w, (&x[m][j / 2].x)[2 * (j % 2)], (&x[m][j / 2].x)[2 * (j % 2) + 1]);
          }
        };
        // one branch a unit: with one for each word, no word's conversion would begin before the last one's has ended
        if (NAN_APART && __any_sync(0xFFFFFFFFu, nan)) multiply([](uint32_t (&out)[2], uint32_t w) { pairs(out, w, T()); });
        else multiply([](uint32_t (&out)[2], uint32_t w) { pairs_of_numbers(out, w, T()); });
        fetch(s * RT + r, i + S);
      }
    }
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  float* partial = reinterpret_cast<float*>(shared);  // (WARPS, TOKENS, PITCH)
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) partial[(warp * TOKENS + 8 * m + 2 * t + i % 2) * PITCH + 16 * r + g + 8 * (i / 2)] = acc[r][m][i];
  __syncthreads();
  for (int o = threadIdx.x; o < min(a.m, TOKENS) * ROWS; o += 32 * WARPS) {
    const int token = o / ROWS, row = o % ROWS;
    float v = partial[token * PITCH + row];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) v += partial[(w * TOKENS + token) * PITCH + row];
    store<T>(a, v, ENCODES ? alpha_here[token] : alpha_x_of(a, token), token, first_row + row);
  }
#endif
}

template <typename T, int TOKENS, int RT, int WARPS, int S, bool ENCODES>
cudaError_t launch_fp8_as(const DecodeArgs& a, cudaStream_t stream) {
  constexpr int ROWS = 16 * RT;
  return launch_siblings(fp8_kernel<T, TOKENS, RT, WARPS, S, 1, ENCODES>, fp8_kernel<T, TOKENS, RT, WARPS, S, SIBLINGS, ENCODES>, a,
                         ROWS, 32 * WARPS, Fp8Layout<TOKENS, RT, WARPS, S>::BYTES + (ENCODES ? a.m * x_pitch(a.k) : 0), stream);
}

template <typename T, int TOKENS, int RT, int WARPS, int S>
cudaError_t launch_fp8(const DecodeArgs& a, cudaStream_t stream) {
  if constexpr (TOKENS == 8)
    if (a.encodes) return launch_fp8_as<T, TOKENS, RT, WARPS, S, true>(a, stream);
  return launch_fp8_as<T, TOKENS, RT, WARPS, S, false>(a, stream);
}

// The number of warps, and so the order of additions, is a function of n alone.
template <typename T, int TOKENS>
cudaError_t launch_fp8_of(const DecodeArgs& a, cudaStream_t stream) {
  switch (decode_fp8_units(a.n)) {
    case 1: return launch_fp8<T, TOKENS, 1, 16, 6>(a, stream);
    case 2: return launch_fp8<T, TOKENS, 2, 8, 4>(a, stream);
    case 4: return launch_fp8<T, TOKENS, 4, 8, 2>(a, stream);
    default: return launch_fp8<T, TOKENS, 7, 8, 1>(a, stream);
  }
}

template <typename T>
cudaError_t run_fp8(const DecodeCall& c) {
  DecodeArgs a = c.args;
  a.times = 1.0f;
  if (!decode_is_few(a.m)) return run_many<FP8, T>(a, c.image, c.stream);
  return a.m <= 8 ? launch_fp8_of<T, 8>(a, c.stream) : launch_fp8_of<T, 16>(a, c.stream);
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

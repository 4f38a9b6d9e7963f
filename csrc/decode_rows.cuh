// decode.cuh's product for large W: the same units of 16 rows x 128 values, brought by asynchronous copies.
//
// decode.cuh keeps bytes that wait for their turn in registers; this kernel keeps them in shared memory. A warp waits
// for loads into registers by one of six counters, and a counter waits for all of its loads. So with many loads in
// flight the first is as late as the last. Asynchronous copies are waited for in order. So a warp asks for a unit S
// steps ahead, and each lane copies the bytes that it will read itself.
//
// A block has RT units of rows, and pairs x in registers once for all of them. RT leaves enough blocks for every
// multiprocessor to have one. A block's warps share out K step by step: step s belongs to slice s % (WARPS * CK). If W
// has few rows, CK = 2 blocks of a cluster share out K, and one sends its sums to the other.
//
// Every warp waits for the scales of all of the block's rows, so they are asked for first. They lie in shared memory
// row by row as in memory, with a pitch that puts 8 rows into different banks.
//
// Order of sums: a warp's steps, then warps, then blocks of the cluster. The last block may overlap the one before it;
// both write the same bits to the shared rows.
#pragma once

#include "decode.cuh"

namespace aoquant {

namespace decode {

// Bytes of a row's scales, for whole steps of 128 values; and bytes from one row to the next in shared memory, 16 more
// than a multiple of 32.
template <int F>
__host__ __device__ inline int scale_width(const DecodeArgs& a) {
  const int steps = (a.k + 127) / 128;
  return F == INT4 ? max(1, (steps * 128) >> a.group_log2) * 2 : steps * (F == MXFP4 ? 4 : 8);
}
template <int F>
__host__ __device__ inline int scale_pitch(const DecodeArgs& a) {
  return (scale_width<F>(a) + 15) / 32 * 32 + 16;
}
template <int F>
__device__ __forceinline__ int scale_at(const DecodeArgs& a, int k) {
  return F == INT4 ? (k >> a.group_log2) * 2 : F == MXFP4 ? k / 32 : k / 16;
}

// Copies a block's rows of scales into shared memory. A row has `bytes` in memory and `width` in shared memory; the
// rest is zeros.
struct ScaleRows {
  const uint8_t* from;
  int bytes, width, pitch, first, last, tile_log2;
};

template <int UNIT>
__device__ __forceinline__ void stage_by(const ScaleRows& s, uint32_t to, int rows, int threads) {
  const int chunks = s.width / UNIT;
  const uint32_t inverse = 0xFFFFFFFFu / uint32_t(chunks) + 1;  // 2^32 / chunks, rounded up; 0 for 1
  for (int i = threadIdx.x; i < rows * chunks; i += threads) {
    const int r = chunks == 1 ? i : __umulhi(i, inverse), at = (i - r * chunks) * UNIT;
    const bool there = at < s.bytes;
    const uint8_t* source = s.from + uint64_t(uint32_t(min(s.first + r, s.last)) >> s.tile_log2) * s.bytes + (there ? at : 0);
    const uint32_t place = to + r * s.pitch + at;
    DEVICE_ASSERT(at + UNIT <= s.pitch && (!there || at + UNIT <= s.bytes));
    if constexpr (UNIT == 1) asm volatile("st.shared.u8 [%0], %1;" ::"r"(place), "r"(there ? uint32_t(*source) : 0) : "memory");
    else if constexpr (UNIT == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(source) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(place), "l"(source), "n"(UNIT), "r"(there ? UNIT : 0) : "memory");
  }
}

__device__ __forceinline__ void stage(const ScaleRows& s, const uint8_t* to, int rows, int threads) {
  const uint32_t place = uint32_t(__cvta_generic_to_shared(to));
  const uint32_t all = uint32_t(reinterpret_cast<uintptr_t>(s.from)) | s.bytes | s.width;
  if (all % 16 == 0) stage_by<16>(s, place, rows, threads);
  else if (all % 4 == 0) stage_by<4>(s, place, rows, threads);
  else stage_by<1>(s, place, rows, threads);
}

// Shared memory holds, per warp, a ring of codes and a ring of x; then the scales. Partial sums later overwrite all
// three. The cluster's inbox follows.
template <int F, int TOKENS, int RT, int WARPS, int S, int CK>
struct RowsLayout {
  static constexpr int ROWS = 16 * RT, UNIT = 1024, CODES = WARPS * S * RT * UNIT;
  static constexpr int TOKEN = 320;  // a token's 256 bytes and 64 for the banks
  static constexpr int PITCH = ROWS + 4;
  static __host__ __device__ int x_stage(int tokens) { return tokens * TOKEN; }
  static __host__ __device__ int scales_at(int tokens) { return CODES + WARPS * S * x_stage(tokens); }
  static __host__ __device__ int scales(const DecodeArgs& a) { return ROWS * scale_pitch<F>(a); }
  static __host__ __device__ int inbox_at(const DecodeArgs& a, int tokens) {
    return max(scales_at(tokens) + (F == INT4 ? 2 : 1) * scales(a), WARPS * tokens * PITCH * 4);
  }
  static int bytes(const DecodeArgs& a, int tokens) {
    return max(inbox_at(a, tokens) + (CK - 1) * tokens * ROWS * 4, CK > 1 ? MORE_THAN_HALF : 0);
  }
  static bool fits(const DecodeArgs& a) { return a.n >= ROWS && bytes(a, TOKENS) <= 227 * 1024; }  // whatever m is
};

#ifdef AOQUANT_HOPPER
// Computes a block's rows of y. TOKENS: rows of x, at most: 8 or 16. RT: units of 16 rows of W in a block. WARPS, CK:
// warps of a block and blocks of a cluster, along K. S: steps in flight. block: which of the W's blocks this is, or
// which of its clusters.
template <int F, typename T, int TOKENS, int RT, int WARPS, int S, int CK>
__device__ __forceinline__ void multiply_large(const DecodeArgs& a, const int block, uint8_t* shared) {
  using Layout = RowsLayout<F, TOKENS, RT, WARPS, S, CK>;
  constexpr int THREADS = 32 * WARPS, SLICES = CK * WARPS, MT = TOKENS / 8, UNITS = S * RT;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int rank = CK > 1 ? block % CK : 0, slice = rank * WARPS + warp, tokens = min(a.m, TOKENS), x_stage = Layout::x_stage(tokens);
  const int first_row = min(block / CK * Layout::ROWS, a.n - Layout::ROWS);
  const int steps = (a.k + 127) / 128, mine = steps > slice ? (steps - slice + SLICES - 1) / SLICES : 0;
  const bool tail = a.k % 128 != 0;  // then a step has lanes outside K: x is zero there, W the row's end, scales zero
  const int pitch = scale_pitch<F>(a), zeros = Layout::scales(a);

  // codes: row g of the first unit, this lane's 16 bytes of the step that is asked for next; other rows follow 8 by 8
  const uint32_t row_bytes = a.k / 2, eight_rows = 8 * row_bytes;
  const uint8_t* const row = a.codes + uint64_t(uint32_t(first_row + g)) * row_bytes;
  const uint8_t *ahead = row + 64 * slice + 16 * t, *const end = row + row_bytes - 16;
  uint8_t* const codes_ring = shared + warp * UNITS * Layout::UNIT + lane * 16;
  const uint32_t codes_to = uint32_t(__cvta_generic_to_shared(codes_ring));
  auto fetch_codes = [&](int place, bool there) {  // place is a constant, s * RT + r; always ends a group of copies
    const uint8_t* from = tail && ahead > end ? end : ahead;
    const uint8_t *low = from + uint64_t(eight_rows) * (2 * (place % RT)), *high = from + uint64_t(eight_rows) * (2 * (place % RT) + 1);
    const uint32_t to = codes_to + place * Layout::UNIT;
    DEVICE_ASSERT(!there || (holds_codes(a, low, 16) && holds_codes(a, high, 16)));
    DEVICE_ASSERT(place >= 0 && place < UNITS);
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
        "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n@p cp.async.cg.shared.global.L2::128B [%2], [%3], 16;\n}\n"
        "cp.async.commit_group;" ::"r"(to), "l"(low), "r"(to + 512), "l"(high), "r"(int(there))
        : "memory");
  };
  // x: chunk c of a token holds k = 8 c to 8 c + 7. Lane t wants the chunks 4 t + j. They are stored at 4 j + t, so
  // that what a warp reads at once is contiguous.
  uint8_t* const x_ring = shared + Layout::CODES + warp * S * x_stage;
  const int chunk = lane % 16, helped = lane / 16;
  const uint32_t x_to = uint32_t(__cvta_generic_to_shared(x_ring)) + helped * Layout::TOKEN + ((chunk % 4) * 4 + chunk / 4) * 16;
  int x_at = slice * 128 + chunk * 8;  // of the step that is asked for next
  const T* x_from = static_cast<const T*>(a.x) + int64_t(helped) * a.k + x_at;
  const int64_t two_tokens = 2 * int64_t(a.k);
  auto fetch_x = [&](int s, bool there) {
    if (there) {
      const bool inside = x_at < a.k;
      const T* from = inside ? x_from : static_cast<const T*>(a.x);
      uint32_t to = x_to + s * x_stage;
      for (int token = helped; token < tokens; token += 2, to += 2 * Layout::TOKEN, from += two_tokens) {
        DEVICE_ASSERT(!inside || holds_x(a, token, x_at, 8));
        copy_async(to, from, inside);
      }
    }
    x_at += 128 * SLICES, x_from += 128 * SLICES;
  };
  const uint8_t* x_here[MT];  // a lane without a token reads another lane's; its sums are not stored
#pragma unroll
  for (int m = 0; m < MT; ++m) x_here[m] = x_ring + min(8 * m + g, tokens - 1) * Layout::TOKEN + t * 16;

  // this block runs: others may write to it
  if constexpr (CK > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  // the kernel before this one may still run (programmatic launch): until it has ended, nothing is read
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  uint8_t* const scale_area = shared + Layout::scales_at(tokens);
  ScaleRows scale_rows = {static_cast<const uint8_t*>(a.scale), F == INT4 ? (a.k >> a.group_log2) * 2 : a.k / (F == MXFP4 ? 32 : 16), scale_width<F>(a),
                          pitch, first_row, a.n - 1, a.tile_log2};
  stage(scale_rows, scale_area, Layout::ROWS, THREADS);
  if constexpr (F == INT4) {
    scale_rows.from = static_cast<const uint8_t*>(a.zero);
    stage(scale_rows, scale_area + zeros, Layout::ROWS, THREADS);
  }
#pragma unroll
  for (int s = 0; s < S; ++s) fetch_x(s, s < mine);
  asm volatile("cp.async.commit_group;" ::: "memory");
#pragma unroll
  for (int s = 0; s < S; ++s) {
#pragma unroll
    for (int r = 0; r < RT; ++r) fetch_codes(s * RT + r, s < mine);
    ahead += 64 * SLICES;
  }
  asm volatile("cp.async.wait_group %0;" ::"n"(UNITS) : "memory");
  __syncthreads();  // scales are there

  float acc[RT][MT][4] = {};
  const uint8_t* const my_scales = scale_area + g * pitch;
  uint4 next_codes[2];
  RawScale next_scale[2];
  // the next unit, from shared memory into registers, while this one is multiplied
  auto take = [&](int place, const uint8_t* scales) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      next_codes[h] = *reinterpret_cast<const uint4*>(codes_ring + place * Layout::UNIT + h * 512);
      const uint8_t* p = scales + (2 * (place % RT) + h) * (8 * pitch);
      if constexpr (F == MXFP4) next_scale[h].s = *p;
      else next_scale[h].s = *reinterpret_cast<const uint16_t*>(p);
      if constexpr (F == INT4) next_scale[h].z = *reinterpret_cast<const uint16_t*>(p + zeros);
    }
  };
  auto scales_of = [&](int i) { return my_scales + scale_at<F>(a, (slice + min(i, mine - 1) * SLICES) * 128 + 32 * t); };
  const uint8_t* scales = scales_of(0);
  asm volatile("cp.async.wait_group %0;" ::"n"(UNITS - 1) : "memory");
  if (mine > 0) take(0, scales);
  for (int base = 0; base < mine; base += S) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const int i = base + s;
      if (i >= mine) break;
      __syncwarp();  // every lane has waited for its copies of this step of x
      uint32_t x[MT][4][4];
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint4 v = *reinterpret_cast<const uint4*>(x_here[m] + s * x_stage + j * 64);
          x[m][j][0] = __byte_perm(v.x, v.z, 0x5410), x[m][j][1] = __byte_perm(v.x, v.z, 0x7632);
          x[m][j][2] = __byte_perm(v.y, v.w, 0x5410), x[m][j][3] = __byte_perm(v.y, v.w, 0x7632);
        }
      __syncwarp();  // and has read it
      fetch_x(s, i + S < mine);
#pragma unroll
      for (int r = 0; r < RT; ++r) {
        const uint4 codes[2] = {next_codes[0], next_codes[1]};
        const Scale<T> scale[2] = {scale_pairs<F, T>(next_scale[0], a), scale_pairs<F, T>(next_scale[1], a)};
        asm volatile("cp.async.wait_group %0;" ::"n"(UNITS - 2) : "memory");
        if (r + 1 == RT) scales = scales_of(i + 1);
        take((s * RT + r + 1) % UNITS, scales);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t lower[4], upper[4];
          operands<F, T>(lower, (&codes[0].x)[j], scale[0].s[j / 2], scale[0].z[j / 2]);
          operands<F, T>(upper, (&codes[1].x)[j], scale[1].s[j / 2], scale[1].z[j / 2]);
          const uint32_t first[4] = {lower[0], upper[0], lower[1], upper[1]}, second[4] = {lower[2], upper[2], lower[3], upper[3]};
#pragma unroll
          for (int m = 0; m < MT; ++m) {
            Pair<T>::mma(acc[r][m], first, x[m][j][0], x[m][j][1]);
            Pair<T>::mma(acc[r][m], second, x[m][j][2], x[m][j][3]);
          }
        }
        fetch_codes(s * RT + r, i + S < mine);
      }
      ahead += 64 * SLICES;
    }
  }

  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  float *partial = reinterpret_cast<float*>(shared), *inbox = reinterpret_cast<float*>(shared + Layout::inbox_at(a, tokens));
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 16 * r + g + 8 * (i / 2), token = 8 * m + 2 * t + i % 2;
        DEVICE_ASSERT(at < Layout::ROWS);
        if (token < tokens) partial[(warp * tokens + token) * Layout::PITCH + at] = acc[r][m][i];
      }
  if constexpr (CK > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // the first block runs
  __syncthreads();
  for (int o = threadIdx.x; o < tokens * Layout::ROWS; o += THREADS) {
    const int token = o / Layout::ROWS, at = o % Layout::ROWS;
    float v = partial[token * Layout::PITCH + at];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) v += partial[(w * tokens + token) * Layout::PITCH + at];
    if (CK == 1) store<T>(a, v, token, first_row + at);
    else if (rank == 0) partial[token * Layout::PITCH + at] = v;
    else send_to_first(inbox + ((rank - 1) * tokens + token) * Layout::ROWS + at, v);
  }
  if constexpr (CK > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    if (rank > 0) return;
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    for (int o = threadIdx.x; o < tokens * Layout::ROWS; o += THREADS) {
      const int token = o / Layout::ROWS, at = o % Layout::ROWS;
      float v = partial[token * Layout::PITCH + at];
#pragma unroll
      for (int c = 0; c < CK - 1; ++c) v += inbox[(c * tokens + token) * Layout::ROWS + at];
      store<T>(a, v, token, first_row + at);
    }
  }
}
#endif

template <int F, typename T, int TOKENS, int RT, int WARPS, int S, int CK>
__global__ void __launch_bounds__(32 * WARPS, 1) rows_kernel(const DecodeArgs a) {
#ifdef AOQUANT_HOPPER
  extern __shared__ __align__(128) uint8_t shared[];
  prefetch_columns<T>(a, min(int(blockIdx.x) / CK * 16 * RT, a.n - 16 * RT), 16 * RT);
  multiply_large<F, T, TOKENS, RT, WARPS, S, CK>(a, blockIdx.x, shared);
#endif
}

template <int F, typename T, int TOKENS, int RT, int WARPS, int S, int CK>
cudaError_t launch_rows(const DecodeArgs& a, cudaStream_t stream) {
  using Layout = RowsLayout<F, TOKENS, RT, WARPS, S, CK>;
  const int blocks = (a.n + Layout::ROWS - 1) / Layout::ROWS * CK;
  return launch_kernel<CK>(rows_kernel<F, T, TOKENS, RT, WARPS, S, CK>, blocks, 32 * WARPS, Layout::bytes(a, min(a.m, TOKENS)), stream, a);
}

}  // namespace decode
}  // namespace aoquant

// y = x W^T for tens to hundreds of rows of x and a packed W: Hopper's wgmma, with W decoded into registers.
//
// As in decode.cuh, a lane multiplies the 32 contiguous values of two rows of W that it holds. A step of 128 values has
// one place in a ring in shared memory, which is filled some steps ahead of its use. The place has W's codes, x, and a
// word of scales for each 32 values. The copy engine brings codes and x. fp8 has no scales here: a row's scale is a
// factor of its sums.
//
// wgmma reads x from shared memory, so no warp can pair its values on the way. So a small kernel first writes x once in
// the order in which W comes, as images of shared memory. The second kernel starts while the first runs (programmatic
// launch). It sends for W at once, and for x after it has waited for the first kernel. That one encodes x too, if the
// product is to.
//
// A block has RG x KG groups of four warps that multiply and one group that fills the ring. It has 64 x RG rows of W
// and TM rows of x. Each block of a cluster takes a run of K's steps, and the block's KG groups take these steps in
// turn. All sums are added in order. So here too a row of y is a function of that row of x and W alone, whatever TM is.
//
// A row needs 2 bytes of scales a step, but a load moves 32, and the first level of cache cannot keep the other 30 for
// all rows. So each warp loads four steps' scales of a row at once, and lanes exchange them.
#pragma once

#include "copy_engine.cuh"
#include "decode.cuh"
#include "fp8_pairs.cuh"
#include "row_encoder.cuh"
#include "wgmma.cuh"

namespace aoquant::decode {

// A thread holds 32 values, k = 32 t + 8 j + 0..7 for t = 0..3. `paired` gives the p-th pair of all t, in the order in
// which W is decoded: (k + p, k + p + 4); of fp8 (k, k + 2), (k + 1, k + 3) and the same of k + 4. `chunk_of` gives
// which 16 bytes of a row of 128 bytes they are. Products 0..3 of a step lie in its first half, for j = 0 and 1.
template <int F>
__device__ __forceinline__ uint4 paired(const uint4 (&v)[4], int p) {
  uint32_t pair[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const uint32_t low = p < 2 ? v[t].x : F == FP8 ? v[t].z : v[t].y, high = p >= 2 ? v[t].w : F == FP8 ? v[t].y : v[t].z;
    pair[t] = __byte_perm(low, high, p % 2 ? 0x7632 : 0x5410);
  }
  return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}
__device__ __forceinline__ int chunk_of(int j, int p) { return (2 * j + p / 2) % 4 * 2 + p % 2; }

// A block has 16 tokens of one step. A thread reads k = 32 t + 8 j + 0..7 for t = 0..3 and writes their four pairs of
// all t.
template <int F, typename T, int TM>
__global__ void __launch_bounds__(64) arrange(const T* __restrict__ x, uint4* __restrict__ image, int m, int k) {
#ifdef AOQUANT_HOPPER
  __shared__ uint4 tile[2][16][8];  // two halves of a step, rows of 128 bytes
  asm volatile("griddepcontrol.launch_dependents;");
  const int j = threadIdx.x % 4, row = threadIdx.x / 4, step = blockIdx.x, first = blockIdx.y * 16, token = first + row;
  uint4 v[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int at = step * 128 + 32 * t + 8 * j;
    v[t] = token < m && at < k ? *reinterpret_cast<const uint4*>(x + int64_t(token) * k + at) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int p = 0; p < 4; ++p) tile[j / 2][row][chunk_of(j, p) ^ (row % 8)] = paired<F>(v, p);
  __syncthreads();
  // (2, TM, 8) chunks of 16 bytes
  uint4* to = image + (int64_t(first / TM) * gridDim.x + step) * TM * 16 + first % TM * 8;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int i = q * 64 + threadIdx.x;
    to[i / 128 * TM * 8 + i % 128] = (&tile[0][0][0])[i];
  }
#endif
}

// `arrange` of x that it encodes first, in the format of rows that goes with W's. A block has a row, or zeros behind the
// last one. shared: the row's operand.
template <int F>
constexpr int ROW_FORMAT = F == NVFP4 ? NVFP4_ROW : F == FP8 ? FP8_ROW : 0;
template <int F, typename T, int TM>
__global__ void __launch_bounds__(1024) encode_arranged(const T* __restrict__ x, uint4* __restrict__ image, float* __restrict__ scale, int m, int k) {
#ifdef AOQUANT_HOPPER
  extern __shared__ __align__(16) uint4 row[];
  asm volatile("griddepcontrol.launch_dependents;");
  const int token = blockIdx.x, steps = (k + 127) / 128;
  if (token < m) {
    auto put = [&](int b, const rows::Sixteen& values) { row[2 * b] = values.half[0], row[2 * b + 1] = values.half[1]; };
    const float s = rows::encode_row(x + int64_t(token) * k, k, ROW_FORMAT<F>, false, put);
    if (threadIdx.x == 0) scale[token] = s;
  }
  __syncthreads();
  uint4* to = image + int64_t(token / TM) * steps * TM * 16 + token % TM * 8;
  for (int i = threadIdx.x; i < 4 * steps; i += blockDim.x) {
    const int step = i / 4, j = i % 4;
    uint4 v[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int at = step * 128 + 32 * t + 8 * j;
      v[t] = token < m && at < k ? row[at / 8] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int p = 0; p < 4; ++p) to[step * TM * 16 + j / 2 * TM * 8 + (chunk_of(j, p) ^ (token % 8))] = paired<F>(v, p);
  }
#endif
}

// Four values that lie at the same KG places of every block's shared memory, summed in order.
template <int CK, int KG>
__device__ __forceinline__ float4 cluster_sum4(const float* mine, int pitch) {
  float4 v[CK * KG];
#pragma unroll
  for (int i = 0; i < CK * KG; ++i) {
    const float* from = mine + i % KG * pitch;
    if constexpr (CK == 1) {
      v[i] = *reinterpret_cast<const float4*>(from);
    } else {
      uint32_t there;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(uint32_t(__cvta_generic_to_shared(from))), "r"(i / KG));
      asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v[i].x), "=f"(v[i].y), "=f"(v[i].z), "=f"(v[i].w) : "r"(there) : "memory");
    }
  }
#pragma unroll
  for (int i = 1; i < CK * KG; ++i) v[0].x += v[i].x, v[0].y += v[i].y, v[0].z += v[i].z, v[0].w += v[i].w;
  return v[0];
}

// The factors and summands of columns n .. n + 3 of y, as `finished` of decode.cuh uses them, read once for all rows.
template <typename T>
struct Columns {
  float alpha[4], bias[4];
  __device__ __forceinline__ Columns(const DecodeArgs& a, int n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = min(n + e, a.n - 1);
      alpha[e] = alpha_w_of(a, at);
      bias[e] = bias_of<T>(a, at);
    }
  }
  __device__ __forceinline__ void store(const DecodeArgs& a, float4 v, int m, int n) const {
    DEVICE_ASSERT(m >= 0 && m < a.m && n >= 0);
    const float alpha_x = alpha_x_of(a, m);
    T y[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] = T((&v.x)[e] * a.times * alpha_x * alpha[e] + bias[e]);
    T* to = static_cast<T*>(a.y) + int64_t(m) * a.n + n;
    if (a.n % 4) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (n + e < a.n) to[e] = y[e];
    } else if (n < a.n) {
      *reinterpret_cast<uint2*>(to) = *reinterpret_cast<uint2*>(y);
    }
  }
};

template <int F>
constexpr int CODE_BITS = F == FP8 ? 8 : 4;

// D: steps in flight, a multiple of KG. A place of the ring: x, W, scales. R: tiles of 64 rows that a group multiplies.
// BITS: of a code. CODES: bytes of a row of W in a step.
template <int RG, int KG, int TM, int D, int R = 1, int BITS = 4>
struct TileLayout {
  static constexpr int ROWS = 64 * RG * R, MULTIPLY = 128 * RG * KG, THREADS = MULTIPLY + 128, CODES = 16 * BITS;
  static constexpr int X = TM * 256, W = ROWS * CODES, S = BITS == 4 ? ROWS * 16 : 0, PLACE = X + W + S, PITCH = ROWS + 4, PARTIAL = TM * PITCH * 4;
  static constexpr int BARRIERS = D * PLACE > KG * PARTIAL ? D * PLACE : KG * PARTIAL, BYTES = BARRIERS + 16 * D;
  // Registers: an even share for all, then traded between groups of four warps, unless the share is all that a thread can
  // have. FILLS: of the group that fills the ring. MULTIPLIES: of the groups that multiply.
  static constexpr int EVEN = 65536 / THREADS / 8 * 8, FILLS = R == 1 ? 56 : 80, MULTIPLIES = (EVEN * THREADS - FILLS * 128) / MULTIPLY / 8 * 8;
  static constexpr bool TRADES = EVEN < 256;
  static_assert(D % KG == 0 && PLACE % 1024 == 0);
  static_assert(BYTES >= MORE_THAN_HALF && BYTES <= 227 * 1024);
};

#ifdef AOQUANT_HOPPER
// What a lane holds in a step: 32 values of `row` of a block's W, and as many of row + 8. place: the first one of the
// ring that this lane multiplies. `load` takes the step that lies `at` bytes behind it, and `operands` decodes the j-th
// eight values of both rows.
template <int F, typename T, typename Layout>
struct LaneRows {
  const uint8_t *codes_at, *scales_at;
  uint4 codes[2];
  Scale<T> scale[2];

  __device__ __forceinline__ LaneRows(const uint8_t* place, int row, int t)
      : codes_at(place + Layout::X + row * 64 + 16 * t), scales_at(place + Layout::X + Layout::W + row * 16 + 4 * t) {
    asm volatile("" : "+l"(codes_at), "+l"(scales_at));
  }
  __device__ __forceinline__ void load(const DecodeArgs& a, int at) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      codes[h] = *reinterpret_cast<const uint4*>(codes_at + at + 8 * h * 64);
      const uint32_t raw = *reinterpret_cast<const uint32_t*>(scales_at + at + 8 * h * 16);
      scale[h] = scale_pairs<F, T>(RawScale{raw, raw >> 16}, a);
    }
  }
  __device__ __forceinline__ void operands(uint32_t (&lower)[4], uint32_t (&upper)[4], int j) {
    decode::operands<F, T>(lower, (&codes[0].x)[j], scale[0].s[j / 2], scale[0].z[j / 2]);
    decode::operands<F, T>(upper, (&codes[1].x)[j], scale[1].s[j / 2], scale[1].z[j / 2]);
  }
  __device__ __forceinline__ void spoil(float*, int) const {}
};

// fp8: 32 bytes of each row, in two chunks of 16. The copy engine puts chunk c of a row at c ^ (row % 8), so eight lanes
// that read at once, two rows' chunks of one parity, find different banks.
//
// In bfloat16 a NaN code is decoded as 480, and remembered. It makes NaN of all of its row's sums, whatever x is, so
// `spoil` does that after the last product.
template <typename T, typename Layout>
struct LaneRows<FP8, T, Layout> {
  static constexpr bool NAN_APART = std::is_same_v<T, __nv_bfloat16>;
  const uint8_t* codes_at[2];
  uint4 codes[2][2];  // of a row, chunk by chunk
  uint32_t nan[2] = {};

  __device__ __forceinline__ LaneRows(const uint8_t* place, int row, int t) {
#pragma unroll
    for (int c = 0; c < 2; ++c) codes_at[c] = place + Layout::X + row * 128 + ((2 * t + c) ^ (row % 8)) * 16;
    asm volatile("" : "+l"(codes_at[0]), "+l"(codes_at[1]));
  }
  __device__ __forceinline__ void load(const DecodeArgs&, int at) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int c = 0; c < 2; ++c) codes[h][c] = *reinterpret_cast<const uint4*>(codes_at[c] + at + 8 * h * 128);
  }
  __device__ __forceinline__ void decode_row(uint32_t (&out)[4], int h, int j) {
    const uint32_t* words = &codes[h][j / 2].x + j % 2 * 2;
    uint32_t pairs[2][2];
    pairs_apart(pairs[0], words[0], T());
    pairs_apart(pairs[1], words[1], T());
#pragma unroll
    for (int p = 0; p < 4; ++p) out[p] = pairs[p / 2][p % 2];
    if (NAN_APART) nan[h] |= nan_carries(words[0]) | nan_carries(words[1]);
  }
  __device__ __forceinline__ void operands(uint32_t (&lower)[4], uint32_t (&upper)[4], int j) {
    decode_row(lower, 0, j);
    decode_row(upper, 1, j);
  }
  // sums: of the lane's first row, that of the next token PITCH floats on; the warp has put them.
  __device__ __forceinline__ void spoil(float* sums, int tokens) const {
    if (!NAN_APART) return;
    __syncwarp();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t of_row = __ballot_sync(~0u, (nan[h] & NAN_CARRIES) != 0) >> (lane & 28) & 15;  // its four lanes
      if (of_row)
        for (int token = lane % 4; token < tokens; token += 4) sums[token * Layout::PITCH + 8 * h] = __uint_as_float(0x7FFFFFFFu);
    }
  }
};

// The warps that multiply have made all products, and the ring is free.
template <typename Layout>
__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  asm volatile("bar.sync 1, %0;" ::"n"(Layout::MULTIPLY) : "memory");
}

// Puts the sums of one wgmma into their places, token by token, from first_token on. row: of acc's first value.
template <typename Layout, int COUNT>
__device__ __forceinline__ void put_sums(uint8_t* ring, const float (&acc)[COUNT], uint32_t thread, int row, int first_token) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int token = first_token + i / 4 * 8 + 2 * (thread % 4) + i % 2, at = row + 8 * (i / 2 % 2);
    DEVICE_ASSERT(at < Layout::ROWS);
    reinterpret_cast<float*>(ring)[token * Layout::PITCH + at] = acc[i];
  }
}

// Adds the sums that were put over groups and blocks, and writes them. thread: one of Layout::MULTIPLY.
template <typename T, typename Layout, int KG, int TM, int CK>
__device__ __forceinline__ void write_sums(const DecodeArgs& a, uint8_t* ring, uint32_t thread, int rank, int first_row, int first_token) {
  constexpr int ROWS = Layout::ROWS;
  const float* partial = reinterpret_cast<const float*>(ring);
  if constexpr (CK > 1) cluster_sync();
  else asm volatile("bar.sync 1, %0;" ::"n"(Layout::MULTIPLY) : "memory");
  constexpr int QUADS = ROWS / 4, EACH = Layout::MULTIPLY / QUADS, STRIDE = EACH * CK, ALL = TM / STRIDE, BATCH = ALL < 8 / CK / KG ? ALL : 8 / CK / KG;
  const int column = thread % QUADS * 4, tokens = min(TM, a.m - first_token);
  const Columns<T> columns(a, first_row + column);
#pragma unroll 1
  for (int token = rank * EACH + thread / QUADS; token < tokens; token += STRIDE * BATCH) {
    float4 v[BATCH];  // several sums at once, because each waits for shared memory
#pragma unroll
    for (int b = 0; b < BATCH; ++b) v[b] = cluster_sum4<CK, KG>(partial + (token + b * STRIDE) * Layout::PITCH + column, TM * Layout::PITCH);
#pragma unroll
    for (int b = 0; b < BATCH; ++b)
      if (token + b * STRIDE < tokens) columns.store(a, v[b], first_token + token + b * STRIDE, first_row + column);
  }
  if constexpr (CK > 1)  // no block leaves while others read its shared memory
    asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

// The last part of the warps that multiply. row: of acc's first value; turn: the thread's group along K.
template <typename T, typename Layout, int KG, int TM, int TN, int CK, typename Rows>
__device__ __forceinline__ void write_tiles(const DecodeArgs& a, uint8_t* ring, const float (&acc)[TM / TN][TN / 2], const Rows& rows, uint32_t thread,
                                            int row, int turn, int rank, int first_row, int first_token) {
  end_products<Layout>();
#pragma unroll
  for (int r = 0; r < TM / TN; ++r) put_sums<Layout>(ring, acc[r], thread, row, turn * TM + r * TN);
  rows.spoil(reinterpret_cast<float*>(ring) + turn * TM * Layout::PITCH + row, TM);
  write_sums<T, Layout, KG, TM, CK>(a, ring, thread, rank, first_row, first_token);
}

// The work of the warps that multiply: they sum their steps out of the ring, add over groups and blocks, and write.
// base, full, empty: addresses of the ring and of its barriers; thread: one of Layout::MULTIPLY.
template <int F, typename T, typename Layout, int RG, int KG, int TM, int CK, int D>
__device__ __forceinline__ void multiply_tiles(const DecodeArgs& a, uint8_t* ring, uint32_t base, uint32_t full, uint32_t empty, uint32_t thread,
                                               int warp, int rank, int first_row, int first_token, int mine) {
  constexpr int PLACE = Layout::PLACE;
  const int lane = thread % 32;
  constexpr int TN = TM < 128 ? TM : 128;  // tokens of one wgmma
  const int g = lane / 4, t = lane % 4, row = warp % (4 * RG) * 16 + g, turn = warp / (4 * RG);
  float acc[TM / TN][TN / 2];
#pragma unroll
  for (int r = 0; r < TM / TN; ++r)
#pragma unroll
    for (int i = 0; i < TN / 2; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(acc[r][i]));
  LaneRows<F, T, Layout> rows(ring + turn * PLACE, row, t);
  const uint32_t tiles_at = base + turn * PLACE, my_full = full + 8 * turn, my_empty = empty + 8 * turn;
  int parity = 0;
#pragma unroll 1
  for (int i0 = turn; i0 < mine; i0 += D, parity ^= 1)
#pragma unroll
    for (int d = 0; d < D; d += KG) {  // a constant, and so are all addresses
      if (i0 + d >= mine) break;
      wait(my_full + 8 * d, parity);
      rows.load(a, d * PLACE);
      // x's tile for wgmma: its address in 16 bytes, rows of 128 swizzled bytes, 1024 bytes from 8 rows to the next 8
      const uint64_t tile = ((tiles_at + d * PLACE) >> 4 & 0x3FFF) | uint64_t(0x40000040) << 32 | 1 << 16;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t lower[4], upper[4];
        rows.operands(lower, upper, j);
        const uint32_t first[4] = {lower[0], upper[0], lower[1], upper[1]}, second[4] = {lower[2], upper[2], lower[3], upper[3]};
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int product = 2 * j + h;
#pragma unroll
          for (int r = 0; r < TM / TN; ++r)
            Wgmma<TN>::template run<T>(acc[r], h ? second : first, tile + (product / 4 * TM * 128 + r * TN * 128 + product % 4 * 32) / 16);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        // the first wait of a step ends the products of the step before
        if (j == 0 && (d > 0 || i0 > turn) && lane == 0) arrive(my_empty + 8 * (d > 0 ? d - KG : D - KG));
      }
    }
  write_tiles<T, Layout, KG, TM, TN, CK>(a, ring, acc, rows, thread, row, turn, rank, first_row, first_token);
}

// The work of the four warps that fill the ring. Scales pass through registers, where `word(scale)` makes words of
// them. One thread calls `bring(step, place)`, which copies the rest. warp: of the four; from, mine: the first step and
// the number of steps; turn: of the ring, advanced here.
template <int F, typename Layout, int RG, int D, typename Word, typename Bring>
__device__ __forceinline__ void fill_steps(const DecodeArgs& a, uint8_t* ring, uint32_t full, uint32_t empty, int warp, bool copies, int first_row, int from,
                                           int mine, Turn<D>& turn, Word word, Bring bring) {
  constexpr int PLACE = Layout::PLACE, X = Layout::X, W = Layout::W;
  constexpr int AHEAD = 2, U = 2 * RG;
  const int lane = threadIdx.x % 32, first = warp * 16 * RG + lane / 4, t = lane % 4;
  const int log2_steps = F == INT4 ? a.group_log2 - 5 : 0;  // steps that four scales of a row last for
  // of a row, those of 32 values as one
  const uint32_t scales = F == INT4 ? uint32_t(a.k) >> a.group_log2 : uint32_t(a.k) / 32;
  uint32_t rows[U];
#pragma unroll
  for (int u = 0; u < U; ++u) rows[u] = (uint32_t(min(first_row + first + 8 * u, a.n - 1)) >> a.tile_log2) * scales;
  RawScale raw[AHEAD][U];
  const int first_four = from >> log2_steps, last_four = (from + mine - 1) >> log2_steps;
  auto fetch = [&](int four, RawScale (&to)[U]) {
#pragma unroll
    for (int u = 0; u < U; ++u) to[u] = load_scale<F>(a, rows[u] + 4 * four + t, 0, four <= last_four && 4 * four + t < scales);
  };
#pragma unroll
  for (int p = 0; p < AHEAD; ++p) fetch(first_four + p, raw[p]);
  // for x; all else is older than the kernel that makes it
  if (copies) asm volatile("griddepcontrol.wait;" ::: "memory");
  int i = 0;
#pragma unroll 1
  for (int four0 = first_four; four0 <= last_four; four0 += AHEAD)
#pragma unroll
    for (int p = 0; p < AHEAD; ++p) {
      const int end = min(mine, ((four0 + p + 1) << log2_steps) - from);
#pragma unroll 1
      for (; i < end; ++i, turn.next()) {
        wait(empty + 8 * turn.at, turn.parity);
        DEVICE_ASSERT(turn.at < D && first + 8 * (U - 1) < Layout::ROWS);
        if (copies) bring(i, turn.at);
        uint32_t* to = reinterpret_cast<uint32_t*>(ring + turn.at * PLACE + X + W) + first * 4 + t;
        const int holder = (lane & 28) | (((4 * (from + i) + t) >> log2_steps) & 3);
#pragma unroll
        for (int u = 0; u < U; ++u) to[32 * u] = F == INT4 ? __shfl_sync(~0u, word(raw[p][u]), holder) : word(raw[p][u]);
        __syncwarp();
        if (lane == 0) arrive(full + 8 * turn.at);
      }
      fetch(four0 + p + AHEAD, raw[p]);
    }
}

// The same for a block of one tile, whose ring has scales as they lie in memory. With fp8 one thread does it all.
template <int F, typename Layout, int RG, int D, typename Bring>
__device__ __forceinline__ void fill_ring(const DecodeArgs& a, uint8_t* ring, uint32_t full, uint32_t empty, int warp, bool copies, int first_row, int from,
                                          int mine, Bring bring) {
  Turn<D> turn;
  turn.parity = 1;  // the first time a place is free
  if constexpr (F == FP8) {
    if (!copies) return;
    asm volatile("griddepcontrol.wait;" ::: "memory");  // for x
#pragma unroll 1
    for (int i = 0; i < mine; ++i, turn.next()) {
      wait(empty + 8 * turn.at, turn.parity);
      bring(i, turn.at);
    }
    return;
  }
  auto word = [](const RawScale& raw) { return F == INT4 ? raw.s | raw.z << 16 : raw.s; };
  fill_steps<F, Layout, RG, D>(a, ring, full, empty, warp, copies, first_row, from, mine, turn, word, bring);
}
#endif

// The places of W in the ring are as LaneRows reads them.
template <int F, typename Layout>
cudaError_t map_codes(CUtensorMap* map, const DecodeArgs& a) {
  return map_bytes(map, a.codes, a.n, F == FP8 ? a.k : a.k / 2, Layout::ROWS, Layout::CODES, F == FP8 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE);
}

template <int F, typename T, int RG, int KG, int TM, int CK, int D>
__global__ void __launch_bounds__(TileLayout<RG, KG, TM, D>::THREADS, 1)
    tiles(const __grid_constant__ CUtensorMap codes_map, const DecodeArgs a, const uint8_t* __restrict__ image) {
#ifdef AOQUANT_HOPPER
  extern __shared__ __align__(1024) uint8_t ring[];  // what wgmma reads repeats every 1024 bytes
  using Layout = TileLayout<RG, KG, TM, D, 1, CODE_BITS<F>>;
  constexpr int ROWS = Layout::ROWS, PLACE = Layout::PLACE, X = Layout::X, W = Layout::W, WARPS = Layout::MULTIPLY / 32;
  uint32_t base = uint32_t(__cvta_generic_to_shared(ring)), thread = threadIdx.x;
  // what it cannot see through, the compiler does not make again inside the loop
  asm volatile("" : "+r"(base), "+r"(thread));
  const uint32_t full = base + Layout::BARRIERS, empty = full + 8 * D;
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const int rank = CK > 1 ? blockIdx.x % CK : 0, first_row = blockIdx.x / CK * ROWS, first_token = blockIdx.y * TM;
  const int steps = (a.k + 127) / 128, from = steps * rank / CK, mine = steps * (rank + 1) / CK - from;
  const bool copies = thread == Layout::MULTIPLY;

  auto copy_w = [&](int i, int place) {
    expect(full + 8 * place, X + W);
    copy_box(codes_map, base + place * PLACE + X, (from + i) * Layout::CODES, first_row, full + 8 * place);
  };
  if (copies) {
    for (int d = 0; d < D; ++d) {
      init_barrier(full + 8 * d, F == FP8 ? 1 : 1 + 4);  // the copies, and the warps that bring scales
      init_barrier(empty + 8 * d, 4 * RG);
    }
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
    for (int i = 0; i < D && i < mine; ++i) copy_w(i, i);
  }
  __syncthreads();

  if (warp >= WARPS) {  // the ring
    if constexpr (Layout::TRADES) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Layout::FILLS));
    const uint8_t* source = image + (int64_t(blockIdx.y) * steps + from) * X;
    fill_ring<F, Layout, RG, D>(a, ring, full, empty, warp - WARPS, copies, first_row, from, mine, [&](int i, int place) {
      if (i >= D) copy_w(i, place);
      copy_bytes(source + int64_t(i) * X, base + place * PLACE, X, full + 8 * place);
    });
  } else {
    if constexpr (Layout::TRADES) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Layout::MULTIPLIES));
    multiply_tiles<F, T, Layout, RG, KG, TM, CK, D>(a, ring, base, full, empty, thread, warp, rank, first_row, first_token, mine);
  }
#endif
}

// image: workspace of ceil(m / TM) * TM rows of steps * 256 bytes, and of 4 bytes for the scale of a row of x that is
// encoded here
template <int F, typename T, int RG, int KG, int TM, int CK, int D>
cudaError_t launch_tiles(DecodeArgs a, uint8_t* image, cudaStream_t stream) {
  using Layout = TileLayout<RG, KG, TM, D, 1, CODE_BITS<F>>;
  auto* function = tiles<F, T, RG, KG, TM, CK, D>;
  const int steps = (a.k + 127) / 128, tiles_m = (a.m + TM - 1) / TM;
  CUtensorMap codes;
  cudaError_t error = map_codes<F, Layout>(&codes, a);
  if (error != cudaSuccess) return error;
  const T* x = static_cast<const T*>(a.x);
  uint4* to = reinterpret_cast<uint4*>(image);
  if (a.encodes) {
    float* scale = reinterpret_cast<float*>(image + int64_t(tiles_m) * TM * steps * 256);
    a.alpha_x = scale, a.alpha_x_stride = 1;
    if constexpr (ROW_FORMAT<F> != 0) encode_arranged<F, T, TM><<<tiles_m * TM, rows::encode_threads(a.k), 2 * a.k, stream>>>(x, to, scale, a.m, a.k);
  } else {
    arrange<F, T, TM><<<dim3(steps, tiles_m * TM / 16), 64, 0, stream>>>(x, to, a.m, a.k);
  }
  return launch_kernel<CK>(function, dim3((a.n + Layout::ROWS - 1) / Layout::ROWS * CK, tiles_m), Layout::THREADS, Layout::BYTES, stream, codes, a, static_cast<const uint8_t*>(image));
}

}  // namespace aoquant::decode

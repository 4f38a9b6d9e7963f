// y = x W^T for up to 32 rows of x and a packed W in one launch, once the rows are not few (decode_call.cuh). It is
// decode_tiles.cuh's product, but the warps that fill the ring read x as it lies in memory and pair its values on the
// way.
//
// decode_tiles.cuh has a small kernel reorder x first. For few rows that second launch costs more than it saves. Here
// two groups of four warps take turns in filling the ring, AHEAD of the steps in use: the copy engine brings W's codes,
// and x and the scales pass through registers. With the same cuts of K sums are added in decode_tiles.cuh's order, so
// the bits are the same. From 33 rows on, this kernel was slower than decode_tiles.cuh on an H200
// (docs/evidence/decode-speed.md).
#pragma once

#include "decode_tiles.cuh"

namespace aoquant::decode {

constexpr int ONCE_TOKENS = 32;  // rows of x at most, a quarter of a group's threads each

template <int F, int RG, int KG, int D>
struct OnceLayout : TileLayout<RG, KG, ONCE_TOKENS, D, 1, CODE_BITS<F>> {
  static constexpr int GROUPS = 2, THREADS = TileLayout<RG, KG, ONCE_TOKENS, D, 1, CODE_BITS<F>>::MULTIPLY + 128 * GROUPS;
  static_assert(D % GROUPS == 0);
};

template <int F, typename T, int RG, int KG, int CK, int D, int AHEAD>
__global__ void __launch_bounds__(OnceLayout<F, RG, KG, D>::THREADS, 1) tiles_once(const __grid_constant__ CUtensorMap codes_map, const DecodeArgs a) {
#ifdef AOQUANT_HOPPER
  extern __shared__ __align__(1024) uint8_t ring[];
  using Layout = OnceLayout<F, RG, KG, D>;
  constexpr int ROWS = Layout::ROWS, PLACE = Layout::PLACE, X = Layout::X, W = Layout::W, WARPS = Layout::MULTIPLY / 32, GROUPS = Layout::GROUPS;
  uint32_t base = uint32_t(__cvta_generic_to_shared(ring)), thread = threadIdx.x;
  asm volatile("" : "+r"(base), "+r"(thread));
  const uint32_t full = base + Layout::BARRIERS, empty = full + 8 * D;
  const int lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
  const int rank = CK > 1 ? blockIdx.x % CK : 0, first_row = blockIdx.x / CK * ROWS;
  const int steps = (a.k + 127) / 128, from = steps * rank / CK, mine = steps * (rank + 1) / CK - from;
  if (thread == Layout::MULTIPLY) {
    for (int d = 0; d < D; ++d) {
      init_barrier(full + 8 * d, 1 + 4);  // the copy, and the warps that bring x and scales
      init_barrier(empty + 8 * d, 4 * RG);
    }
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;");

  if (warp >= WARPS) {  // the ring
    constexpr int U = 2 * RG;
    const int group = (warp - WARPS) / 4, in_group = (thread - Layout::MULTIPLY) % 128;
    const int t = lane % 4, first = in_group / 32 * 16 * RG + lane / 4;  // of W's rows
    const int j = in_group % 4, token = in_group / 4;                    // of x
    const uint32_t scales = F == INT4 ? uint32_t(a.k) >> a.group_log2 : uint32_t(a.k) / 32;
    uint32_t rows[U];
#pragma unroll
    for (int u = 0; u < U; ++u) rows[u] = (uint32_t(min(first_row + first + 8 * u, a.n - 1)) >> a.tile_log2) * scales;
    const T* x = static_cast<const T*>(a.x) + int64_t(token) * a.k + 8 * j;
    struct Step {
      uint4 x[4];
      RawScale scale[U];
    } ahead[AHEAD];
    auto fetch = [&](Step& to, int i) {
      const int start = (from + i) * 128;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const bool there = i < mine && token < a.m && start + 32 * q + 8 * j < a.k;
        to.x[q] = make_uint4(0, 0, 0, 0);
        DEVICE_ASSERT(!there || holds_x(a, token, start + 32 * q + 8 * j, 8));
        if (there) to.x[q] = __ldg(reinterpret_cast<const uint4*>(x + start + 32 * q));
      }
      if constexpr (F != FP8)
#pragma unroll
        for (int u = 0; u < U; ++u) to.scale[u] = load_scale<F>(a, rows[u], start + 32 * t, i < mine && start + 32 * t < a.k);
    };
    // all that this kernel reads may be what the one before it wrote
    asm volatile("griddepcontrol.wait;" ::: "memory");
    Turn<D> turn;
    turn.parity = 1;  // the first time a place is free
    for (int skip = 0; skip < group; ++skip) turn.next();
#pragma unroll
    for (int p = 0; p < AHEAD; ++p) fetch(ahead[p], group + p * GROUPS);
#pragma unroll 1
    for (int i0 = group; i0 < mine; i0 += GROUPS * AHEAD)
#pragma unroll
      for (int p = 0; p < AHEAD; ++p) {
        const int i = i0 + p * GROUPS;
        if (i >= mine) break;
        wait(empty + 8 * turn.at, turn.parity);
        if (in_group == 0) {
          expect(full + 8 * turn.at, W);
          copy_box(codes_map, base + turn.at * PLACE + X, (from + i) * Layout::CODES, first_row, full + 8 * turn.at);
        }
        uint8_t* place = ring + turn.at * PLACE;
        DEVICE_ASSERT(turn.at < D && first + 8 * (U - 1) < ROWS && from + i < steps);
        uint32_t* to = reinterpret_cast<uint32_t*>(place + X + W) + first * 4 + t;
        if constexpr (F != FP8)
#pragma unroll
          for (int u = 0; u < U; ++u) to[32 * u] = F == INT4 ? ahead[p].scale[u].s | ahead[p].scale[u].z << 16 : ahead[p].scale[u].s;
#pragma unroll
        for (int q = 0; q < 4; ++q)
          reinterpret_cast<uint4*>(place)[(j / 2 * ONCE_TOKENS + token) * 8 + (chunk_of(j, q) ^ (token % 8))] = paired<F>(ahead[p].x, q);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // x is wgmma's
        __syncwarp();
        if (lane == 0) arrive(full + 8 * turn.at);
        fetch(ahead[p], i + GROUPS * AHEAD);
#pragma unroll
        for (int skip = 0; skip < GROUPS; ++skip) turn.next();
      }
  } else {
    multiply_tiles<F, T, Layout, RG, KG, ONCE_TOKENS, CK, D>(a, ring, base, full, empty, thread, warp, rank, first_row, 0, mine);
  }
#endif
}

template <int F, typename T, int RG, int KG, int CK, int D, int AHEAD>
cudaError_t launch_once(const DecodeArgs& a, cudaStream_t stream) {
  using Layout = OnceLayout<F, RG, KG, D>;
  auto* function = tiles_once<F, T, RG, KG, CK, D, AHEAD>;
  CUtensorMap codes;
  cudaError_t error = map_codes<F, Layout>(&codes, a);
  if (error != cudaSuccess) return error;
  return launch_kernel<CK>(function, dim3((a.n + Layout::ROWS - 1) / Layout::ROWS * CK), Layout::THREADS, Layout::BYTES, stream, codes, a);
}

}  // namespace aoquant::decode

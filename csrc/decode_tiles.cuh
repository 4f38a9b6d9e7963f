// y = x W^T for tens to hundreds of rows of x and a packed 4-bit W: Hopper's wgmma, with W decoded into registers.
//
// As in decode.cuh a lane multiplies the 16 contiguous bytes of two rows of W that it holds. Here both operands come through rings in
// shared memory, filled by the copy engine: W's codes as they lie in memory, many steps of 128 values ahead of their use, because they
// come from far, and x, wgmma's operand there, where nothing can be paired on the way. So a first small kernel writes x once in the order
// in which W comes, as images of shared memory. The second kernel starts while the first runs (programmatic launch), sends for W, and
// waits for the first before it sends for x.
//
// A block is RT x 128 rows of W, two groups of four warps that multiply, a warp that copies, and TM rows of x; blocks of a cluster share
// out K, each a run of steps, and their sums are added in order. So here too a row of y is a function of that row of x and W alone.
#pragma once

#include "copy_engine.cuh"
#include "decode.cuh"
#include "wgmma.cuh"

namespace aoquant::decode {

// Thread: a token, a step and a j. It reads k = 32 t + 8 j + 0..7 for t = 0..3 and writes, for p = 0..3, the pairs (k + p, k + p + 4) of all t.
template <typename T, int TM>
__global__ void __launch_bounds__(64) arrange(const T* __restrict__ x, uint4* __restrict__ image, int m, int k, int steps) {
#ifdef AOQUANT_HOPPER
  asm volatile("griddepcontrol.launch_dependents;");
  const int i = blockIdx.x * 64 + threadIdx.x, j = i % 4, step = i / 4 % steps, token = i / 4 / steps;
  if (token >= (m + TM - 1) / TM * TM) return;
  uint4 v[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int at = step * 128 + 32 * t + 8 * j;
    v[t] = token < m && at < k ? *reinterpret_cast<const uint4*>(x + int64_t(token) * k + at) : make_uint4(0, 0, 0, 0);
  }
  const int row = token % TM;
  uint4* tile = image + (int64_t(token / TM) * steps + step) * TM * 16;  // (2, TM, 8) chunks of 16 bytes
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    uint32_t pair[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) pair[t] = __byte_perm(p < 2 ? v[t].x : v[t].y, p < 2 ? v[t].z : v[t].w, p % 2 ? 0x7632 : 0x5410);
    const int product = 2 * j + p / 2, chunk = product % 4 * 2 + p % 2;  // which wgmma of the step; which 16 bytes of a row of 128
    tile[(product / 4 * TM + row) * 8 + (chunk ^ (row % 8))] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
#endif
}

// Four values that lie at the same place of every block's shared memory, summed in the order of the blocks.
template <int CK>
__device__ __forceinline__ float4 cluster_sum4(const float* mine) {
  if constexpr (CK == 1) return *reinterpret_cast<const float4*>(mine);
  const uint32_t at = uint32_t(__cvta_generic_to_shared(mine));
  float4 v[CK];
#pragma unroll
  for (int c = 0; c < CK; ++c) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(c));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v[c].x), "=f"(v[c].y), "=f"(v[c].z), "=f"(v[c].w) : "r"(there) : "memory");
  }
#pragma unroll
  for (int c = 1; c < CK; ++c) v[0].x += v[c].x, v[0].y += v[c].y, v[0].z += v[c].z, v[0].w += v[c].w;
  return v[0];
}

// Outputs n .. n + 3 of row m, as one word where that is aligned.
template <typename T>
__device__ __forceinline__ void store4(const DecodeArgs& a, float4 v, int m, int n) {
  if (a.n % 4) {
#pragma unroll
    for (int e = 0; e < 4; ++e) store<T>(a, (&v.x)[e], m, n + e);
  } else if (n < a.n) {
    T y[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] = T(finished<T>(a, (&v.x)[e], m, n + e));
    *reinterpret_cast<uint2*>(static_cast<T*>(a.y) + int64_t(m) * a.n + n) = *reinterpret_cast<uint2*>(y);
  }
}

// RT: tiles of 128 rows of W a block. TM: rows of x. DX, DW: steps of x and of W in flight.
template <int RT, int TM, int DX, int DW>
struct TileLayout {
  static constexpr bool TRADE = RT * TM > 128;  // registers, between groups of four warps: those that multiply need more than an even share
  static constexpr int THREADS = TRADE ? 384 : 288;  // 8 warps multiply, one copies
  static constexpr int ROWS = 128 * RT, X = TM * 256, W = ROWS * 64, PITCH = ROWS + 4, PARTIAL = TM * PITCH * 4, RINGS = DX * X + DW * W;
  static constexpr int BARRIERS = RINGS > PARTIAL ? RINGS : PARTIAL;
  static constexpr int BYTES = BARRIERS + 8 * (2 * DX + DW);
  static_assert(BYTES <= 227 * 1024);
};

template <int F, typename T, int RT, int TM, int CK, int DX, int DW>
__global__ void __launch_bounds__(TileLayout<RT, TM, DX, DW>::THREADS, RT * TM > 64 ? 1 : 2)
    tiles(const __grid_constant__ CUtensorMap codes_map, const DecodeArgs a, const uint8_t* __restrict__ image) {
#ifdef AOQUANT_HOPPER
  extern __shared__ __align__(1024) uint8_t rings[];  // what wgmma reads repeats every 1024 bytes
  using Layout = TileLayout<RT, TM, DX, DW>;
  constexpr int ROWS = Layout::ROWS;
  const uint32_t base = uint32_t(__cvta_generic_to_shared(rings));
  const uint32_t full_x = base + Layout::BARRIERS, empty_x = full_x + 8 * DX, full_w = empty_x + 8 * DX;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = CK > 1 ? blockIdx.x % CK : 0, first_row = blockIdx.x / CK * ROWS, first_token = blockIdx.y * TM;
  const int steps = (a.k + 127) / 128, from = steps * rank / CK, mine = steps * (rank + 1) / CK - from;

  if (threadIdx.x == 256) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&codes_map) : "memory");
    for (int d = 0; d < DX; ++d) {
      init_barrier(full_x + 8 * d, 1);
      init_barrier(empty_x + 8 * d, 8);
    }
    for (int d = 0; d < DW; ++d) init_barrier(full_w + 8 * d, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp >= 8) {  // the copies
    if constexpr (Layout::TRADE) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) {
      const uint8_t* source = image + (int64_t(blockIdx.y) * steps + from) * Layout::X;
      auto copy_w = [&](int i, int d) {
        if (i >= mine) return;
        expect(full_w + 8 * d, Layout::W);
        copy_box(codes_map, base + DX * Layout::X + d * Layout::W, (from + i) * 64, first_row, full_w + 8 * d);
      };
#pragma unroll 1
      for (int i = 0; i < DW; ++i) copy_w(i, i);
      asm volatile("griddepcontrol.wait;" ::: "memory");  // for `image`; all else is older than the kernel that makes it
      Turn<DX> turn;
      Turn<DW> turn_w;
      turn.parity = 1;  // the first time a place is free
#pragma unroll 1
      for (int i = 0; i < mine; ++i, turn.next()) {
        wait(empty_x + 8 * turn.at, turn.parity);
        if (i >= DX) {  // step i - DX is done with: its place in W's ring is free too
          copy_w(i - DX + DW, turn_w.at);
          turn_w.next();
        }
        expect(full_x + 8 * turn.at, Layout::X);
        copy_bytes(source + int64_t(i) * Layout::X, base + turn.at * Layout::X, Layout::X, full_x + 8 * turn.at);
      }
    }
  } else {
    if constexpr (Layout::TRADE) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int g = lane / 4, t = lane % 4;
    float acc[RT][TM / 2];
#pragma unroll
    for (int r = 0; r < RT; ++r)
#pragma unroll
      for (int i = 0; i < TM / 2; ++i)  // what it cannot see through, the compiler does not make again inside the loop
        asm volatile("mov.f32 %0, 0f00000000;" : "=f"(acc[r][i]));
    uint32_t scales[RT][2];
#pragma unroll
    for (int r = 0; r < RT; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t row = min(first_row + 128 * r + 16 * warp + 8 * h + g, a.n - 1);
        scales[r][h] = (row >> a.tile_log2) * (F == INT4 ? uint32_t(a.k) >> a.group_log2 : uint32_t(a.k) / 32);
      }
    RawScale raw[RT][2];
    auto fetch = [&](int i, int r) {
      const int start = (from + i) * 128 + 32 * t;
#pragma unroll
      for (int h = 0; h < 2; ++h) raw[r][h] = load_scale<F>(a, scales[r][h], start, i < mine && start < a.k);
    };
#pragma unroll
    for (int r = 0; r < RT; ++r) fetch(0, r);
    const uint8_t* codes_at = rings + DX * Layout::X + (16 * warp + g) * 64 + 16 * t;
    Turn<DX> turn, before;
    Turn<DW> turn_w;
#pragma unroll 1
    for (int i = 0; i < mine; ++i) {
      wait(full_w + 8 * turn_w.at, turn_w.parity);
#pragma unroll
      for (int r = 0; r < RT; ++r) {
        uint4 codes[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) codes[h] = *reinterpret_cast<const uint4*>(codes_at + turn_w.at * Layout::W + (128 * r + 8 * h) * 64);
        const Scale<T> scale[2] = {scale_pairs<F, T>(raw[r][0], a), scale_pairs<F, T>(raw[r][1], a)};
        fetch(i + 1, r);
        if (r == 0) wait(full_x + 8 * turn.at, turn.parity);
        // x's tile for wgmma: its address in 16 bytes, rows of 128 swizzled bytes, 1024 bytes from 8 rows to the next 8
        const uint64_t tile = ((base + turn.at * Layout::X) >> 4 & 0x3FFF) | uint64_t(0x40000040) << 32 | 1 << 16;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t lower[4], upper[4];
          operands<F, T>(lower, (&codes[0].x)[j], scale[0].s[j / 2], scale[0].z[j / 2]);
          operands<F, T>(upper, (&codes[1].x)[j], scale[1].s[j / 2], scale[1].z[j / 2]);
          const uint32_t first[4] = {lower[0], upper[0], lower[1], upper[1]}, second[4] = {lower[2], upper[2], lower[3], upper[3]};
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int product = 2 * j + h;
            Wgmma<TM>::template run<T>(acc[r], h ? second : first, tile + (product / 4 * TM * 128 + product % 4 * 32) / 16);
          }
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (r == 0 && j == 0) {  // the wait ended the previous step's last products
            if (i > 0 && lane == 0) arrive(empty_x + 8 * before.at);
            before = turn;
          }
        }
      }
      turn.next();
      turn_w.next();
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    asm volatile("bar.sync 1, 256;" ::: "memory");  // all products are made, and the rings are free
    float* partial = reinterpret_cast<float*>(rings);
#pragma unroll
    for (int r = 0; r < RT; ++r)
#pragma unroll
      for (int i = 0; i < TM / 2; ++i) {
        const int row = 128 * r + 16 * warp + g + 8 * (i / 2 % 2), token = i / 4 * 8 + 2 * t + i % 2;
        partial[token * Layout::PITCH + row] = acc[r][i];
      }
    if constexpr (CK > 1) cluster_sync();
    else asm volatile("bar.sync 1, 256;" ::: "memory");
    const int outputs = min(TM, a.m - first_token) * (ROWS / 4);
    for (int o = rank * 256 + threadIdx.x; o < outputs; o += CK * 256) {
      const int token = o / (ROWS / 4), row = o % (ROWS / 4) * 4;
      store4<T>(a, cluster_sum4<CK>(partial + token * Layout::PITCH + row), first_token + token, first_row + row);
    }
    if constexpr (CK > 1)  // nobody leaves while others read
      asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  }
#endif
}

// image: workspace of ceil(m / TM) * TM * steps * 256 bytes
template <int F, typename T, int RT, int TM, int CK, int DX, int DW>
cudaError_t launch_tiles(const DecodeArgs& a, uint8_t* image, cudaStream_t stream) {
  using Layout = TileLayout<RT, TM, DX, DW>;
  auto* function = tiles<F, T, RT, TM, CK, DX, DW>;
  const int steps = (a.k + 127) / 128, tiles_m = (a.m + TM - 1) / TM;
  CUtensorMap codes;
  cudaError_t error = map_bytes(&codes, a.codes, a.n, a.k / 2, Layout::ROWS, 64);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::BYTES);
  if (error != cudaSuccess) return error;
  const int64_t threads = int64_t(tiles_m) * TM * steps * 4;
  arrange<T, TM><<<unsigned((threads + 63) / 64), 64, 0, stream>>>(static_cast<const T*>(a.x), reinterpret_cast<uint4*>(image), a.m, a.k, steps);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((a.n + Layout::ROWS - 1) / Layout::ROWS * CK, tiles_m);
  config.blockDim = Layout::THREADS;
  config.dynamicSmemBytes = Layout::BYTES;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = CK;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = CK > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, function, codes, a, static_cast<const uint8_t*>(image));
}

}  // namespace aoquant::decode

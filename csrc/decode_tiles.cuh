// y = x W^T for tens to hundreds of rows of x and a packed 4-bit W: Hopper's wgmma, with W decoded into registers.
//
// As in decode.cuh a lane holds 16 contiguous bytes of two rows of W and multiplies what it holds. Here x is the operand in shared
// memory, where nothing can be paired on the way: a first small kernel writes x once in the order in which W comes, as images of
// shared memory, so that the copy engine moves each step of 128 values by one plain bulk copy. The second kernel starts while the first
// runs (programmatic launch) and waits for it before its first copy.
//
// A block is 128 rows of W, two groups of four warps, and TM rows of x; blocks of a cluster share out K, each a run of steps, and their
// sums are added in order. So here too a row of y is a function of that row of x and W alone.
#pragma once

#include "decode.cuh"
#include "wgmma.cuh"

namespace aoquant::decode {

// Thread: a token, a step and a j. It reads k = 32 t + 8 j + 0..7 for t = 0..3 and writes, for p = 0..3, the pairs (k + p, k + p + 4) of all t.
template <typename T, int TM>
__global__ void __launch_bounds__(256) arrange(const T* __restrict__ x, uint4* __restrict__ image, int m, int k, int steps) {
#ifdef AOQUANT_HOPPER
  asm volatile("griddepcontrol.launch_dependents;");
  const int i = blockIdx.x * 256 + threadIdx.x, j = i % 4, step = i / 4 % steps, token = i / 4 / steps;
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

__device__ __forceinline__ void wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(barrier), "r"(parity)
      : "memory");
}

template <int TM, int D>
struct TileLayout {
  static constexpr int THREADS = TM > 128 ? 384 : 288;  // 8 warps multiply, one copies; registers are traded between groups of 4 warps
  static constexpr int PITCH = 132, STAGE = TM * 256, PARTIAL = TM * PITCH * 4, RING = D * STAGE;
  static constexpr int BYTES = (RING > PARTIAL ? RING : PARTIAL) + 1024 + 128;  // aligned by hand; barriers behind
};

// TM > 128 needs more registers than a third of them for each group of four warps
template <int F, typename T, int TM, int CK, int D>
__global__ void __launch_bounds__(TileLayout<TM, D>::THREADS, TM > 64 ? 1 : 2) tiles(const DecodeArgs a, const uint8_t* __restrict__ image) {
#ifdef AOQUANT_HOPPER
  extern __shared__ uint8_t raw_shared[];
  using Layout = TileLayout<TM, D>;
  constexpr int NB = TM >= 128 ? 128 : 64, BLOCKS = TM / NB;
  const uint32_t raw_address = uint32_t(__cvta_generic_to_shared(raw_shared)), base = (raw_address + 1023) & ~1023u;
  float* partial = reinterpret_cast<float*>(raw_shared + (base - raw_address));
  const uint32_t barriers = base + Layout::BYTES - 1024 - 128;  // D full, D empty
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = CK > 1 ? blockIdx.x % CK : 0, first_row = blockIdx.x / CK * 128, first_token = blockIdx.y * TM;
  const int steps = (a.k + 127) / 128, from = steps * rank / CK, mine = steps * (rank + 1) / CK - from;

  if (threadIdx.x == 0) {
    for (int d = 0; d < D; ++d) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * d));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 8;" ::"r"(barriers + 8 * (D + d)));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp >= 8) {  // the copies
    if constexpr (TM > 128) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      const uint8_t* source = image + (int64_t(blockIdx.y) * steps + from) * Layout::STAGE;
      for (int i = 0; i < mine; ++i) {
        const int d = i % D;
        if (i >= D) wait(barriers + 8 * (D + d), (i / D - 1) & 1);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barriers + 8 * d), "n"(Layout::STAGE) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(base + d * Layout::STAGE),
                     "l"(source + int64_t(i) * Layout::STAGE), "n"(Layout::STAGE), "r"(barriers + 8 * d)
                     : "memory");
      }
    }
  } else {
    if constexpr (TM > 128) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int g = lane / 4, t = lane % 4;
    float acc[BLOCKS][NB / 2];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int i = 0; i < NB / 2; ++i) acc[b][i] = 0.0f;
    const uint8_t* rows[2];
    uint32_t scales[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t row = min(first_row + 16 * warp + 8 * h + g, a.n - 1);
      rows[h] = a.codes + int64_t(row) * (a.k / 2);
      scales[h] = (row >> a.tile_log2) * (F == INT4 ? uint32_t(a.k) >> a.group_log2 : uint32_t(a.k) / 32);
    }
    uint4 codes[2][2];
    RawScale raw[2][2];
    auto fetch = [&](int slot, int i) {
      if (i >= mine) return;
      const int lane_start = (from + i) * 128 + 32 * t, at = min(lane_start, a.k - 32);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        codes[slot][h] = load_codes(rows[h] + at / 2);
        raw[slot][h] = load_scale<F>(a, scales[h], at, lane_start < a.k);
      }
    };
    auto step = [&](int slot, int i) {
      const int d = i % D;
      Scale<T> scale[2] = {scale_pairs<F, T>(raw[slot][0], a), scale_pairs<F, T>(raw[slot][1], a)};
      wait(barriers + 8 * d, (i / D) & 1);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t lower[4], upper[4];
        operands<F, T>(lower, (&codes[slot][0].x)[j], scale[0].s[j / 2], scale[0].z[j / 2]);
        operands<F, T>(upper, (&codes[slot][1].x)[j], scale[1].s[j / 2], scale[1].z[j / 2]);
        const uint32_t first[4] = {lower[0], upper[0], lower[1], upper[1]}, second[4] = {lower[2], upper[2], lower[3], upper[3]};
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int product = 2 * j + h;
#pragma unroll
          for (int b = 0; b < BLOCKS; ++b) {
            const uint32_t at = base + d * Layout::STAGE + product / 4 * TM * 128 + b * NB * 128 + product % 4 * 32;
            const uint64_t descriptor = uint64_t((at & 0x3FFFF) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
            Wgmma<NB>::template run<T>(acc[b], h ? second : first, descriptor);
          }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (j == 1 && i > 0 && lane == 0)  // the wait before it ended the previous step's last products
          asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barriers + 8 * (D + (i - 1) % D)) : "memory");
      }
    };
    fetch(0, 0);
    for (int i = 0; i < mine; i += 2) {
      fetch(1, i + 1);
      step(0, i);
      if (i + 1 < mine) {
        fetch(0, i + 2);
        step(1, i + 1);
      }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    asm volatile("bar.sync 1, 256;" ::: "memory");  // all products are made, and the ring is free
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int i = 0; i < NB / 2; ++i) {
        const int row = 16 * warp + g + 8 * (i / 2 % 2), token = b * NB + i / 4 * 8 + 2 * t + i % 2;
        partial[token * Layout::PITCH + row] = acc[b][i];
      }
    const int outputs = min(TM, a.m - first_token) * 128;
    asm volatile("bar.sync 1, 256;" ::: "memory");
    if constexpr (CK == 1) {
      for (int o = threadIdx.x; o < outputs; o += 256)
        store<T>(a, partial[o / 128 * Layout::PITCH + o % 128], first_token + o / 128, first_row + o % 128);
    } else {
      cluster_sync();
      for (int o = rank * 256 + threadIdx.x; o < outputs; o += CK * 256)
        store<T>(a, cluster_sum<CK>(partial + o / 128 * Layout::PITCH + o % 128), first_token + o / 128, first_row + o % 128);
      cluster_sync();  // nobody leaves while others read
    }
  }
#endif
}

// image: workspace of ceil(m / TM) * TM * steps * 256 bytes
template <int F, typename T, int TM, int CK, int D>
cudaError_t launch_tiles(const DecodeArgs& a, uint8_t* image, cudaStream_t stream) {
  using Layout = TileLayout<TM, D>;
  static_assert(Layout::BYTES <= 227 * 1024);
  const int steps = (a.k + 127) / 128, tiles_m = (a.m + TM - 1) / TM;
  auto* function = tiles<F, T, TM, CK, D>;
  cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::BYTES);
  if (error != cudaSuccess) return error;
  const int64_t threads = int64_t(tiles_m) * TM * steps * 4;
  arrange<T, TM><<<unsigned((threads + 255) / 256), 256, 0, stream>>>(static_cast<const T*>(a.x), reinterpret_cast<uint4*>(image), a.m, a.k, steps);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((a.n + 127) / 128 * CK, tiles_m);
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
  return cudaLaunchKernelEx(&config, function, a, static_cast<const uint8_t*>(image));
}

}  // namespace aoquant::decode

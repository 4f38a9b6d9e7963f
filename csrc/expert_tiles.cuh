// y = x W^T for many rows of x of each expert and a stack of packed 4-bit W's, in one launch. W is decoded into
// registers on the way to wgmma, so no kernel writes its values to memory.
//
// The ring and the groups of warps are decode_tiles.cuh's. But only the device knows which rows make a tile, so no
// kernel can reorder x beforehand: the copy engine brings x as it lies in memory. Instead the lanes put W into order.
// wgmma's product of 16 values of K takes k = 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of lane t, which is byte t of two words
// of codes (in_order.cuh).
//
// So K's values are summed in K's order, in one chain, as in any wgmma kernel that does not cut K. The bits are those
// of a GEMM of W's values (triton/grouped_kernels.py), and that GEMM may multiply prepared experts.
//
// A block has a slot of up to TM rows (slots.cuh) and 128 R rows of its expert's W. Blocks come in groups of slots x
// rows of W, so that blocks that run at once share both in the L2 cache.
//
// 128 tokens of x are 32 KB a step. A block of 128 rows of W then reads 40 KB of L2 for 1024 cycles of wgmma, more than
// a multiprocessor's share of L2's bandwidth. So with slots of 128 rows R = 2: each group of warps has two tiles of 64
// rows of W, and decodes one while it multiplies the other. A step then reads 24 KB for as much wgmma, and a block's
// fixed costs (its slot, the first bytes, the sums) are paid half as often. A slot of up to 64 rows is multiplied by
// products of that width.
#pragma once

#include "decode_experts.cuh"
#include "decode_tiles.cuh"
#include "in_order.cuh"

namespace aoquant::decode {

constexpr int EXPERT_GROUP = 8;  // slots of a group of blocks

#ifdef AOQUANT_HOPPER
// `multiply_tiles` with K in order. TN: tokens of a product, of TM in the ring. R: tiles of 64 rows, RG tiles apart.
template <int F, typename T, typename Layout, int RG, int R, int TM, int TN, int D>
__device__ __forceinline__ void multiply_in_order(const DecodeArgs& a, uint8_t* ring, uint32_t base, uint32_t full, uint32_t empty, uint32_t thread, int warp,
                                                  int first_row, int mine) {
  constexpr int PLACE = Layout::PLACE, X = Layout::X, W = Layout::W;
  const int lane = thread % 32, g = lane / 4, t = lane % 4, row = warp * 16 + g;
  float acc[R][TN / 2];
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int i = 0; i < TN / 2; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(acc[r][i]));
  const uint8_t* codes_at = ring + X + row * 64;
  const uint8_t* scales_at = ring + X + W + row * 16;
  asm volatile("" : "+l"(codes_at), "+l"(scales_at));
  const uint32_t select = select_of_lane(t), swizzle = g / 2 % 4;  // pieces of 16 bytes of rows 2 r and 2 r + 1 change places alike
  int parity = 0;
#pragma unroll 1
  for (int i0 = 0; i0 < mine; i0 += D, parity ^= 1)
#pragma unroll
    for (int d = 0; d < D; ++d) {
      if (i0 + d >= mine) break;
      wait(full + 8 * d, parity);
      uint4 scales[R][2];
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) scales[r][h] = *reinterpret_cast<const uint4*>(scales_at + d * PLACE + (r * 64 * RG + 8 * h) * 16);
      const uint64_t tile = ((base + d * PLACE) >> 4 & 0x3FFF) | uint64_t(0x40000040) << 32 | 1 << 16;
#pragma unroll
      for (int jr = 0; jr < 4 * R; ++jr) {
        const int j = jr / R, r = jr % R;
        const uint8_t* from = codes_at + d * PLACE + r * 64 * RG * 64 + (j ^ swizzle) * 16;
        uint32_t lower[2][2], upper[2][2];
        operands_in_order<F, T>(lower, *reinterpret_cast<const uint4*>(from), select, halves_of_raw<F, T>((&scales[r][0].x)[j], a));
        operands_in_order<F, T>(upper, *reinterpret_cast<const uint4*>(from + 8 * 64), select, halves_of_raw<F, T>((&scales[r][1].x)[j], a));
        const uint32_t first[4] = {lower[0][0], upper[0][0], lower[0][1], upper[0][1]}, second[4] = {lower[1][0], upper[1][0], lower[1][1], upper[1][1]};
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int product = 2 * j + h;
          Wgmma<TN>::template run<T>(acc[r], h ? second : first, tile + (product / 4 * TM * 128 + product % 4 * 32) / 16);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (jr == 0 && (d > 0 || i0 > 0) && lane == 0) arrive(empty + 8 * (d > 0 ? d - 1 : D - 1));
      }
    }
  end_products<Layout>();
#pragma unroll
  for (int r = 0; r < R; ++r) put_sums<Layout>(ring, acc[r], thread, row + r * 64 * RG, 0);
  write_sums<T, Layout, 1, TM, 1>(a, ring, thread, 0, first_row, 0);
}
#endif

template <int F, typename T, int RG, int R, int TM, int D>
__global__ void __launch_bounds__(TileLayout<RG, 1, TM, D, R>::THREADS, 1)
    expert_tiles(const __grid_constant__ CUtensorMap codes_map, const __grid_constant__ CUtensorMap x_map, const __grid_constant__ DecodeArgs stack,
                 const __grid_constant__ Groups groups, const int blocks_n) {
#ifdef AOQUANT_HOPPER
  extern __shared__ __align__(1024) uint8_t ring[];
  using Layout = TileLayout<RG, 1, TM, D, R>;
  constexpr int ROWS = Layout::ROWS, PLACE = Layout::PLACE, X = Layout::X, W = Layout::W, WARPS = Layout::MULTIPLY / 32;
  asm volatile("griddepcontrol.wait;" ::: "memory");  // all that is read may be what the kernel before this one wrote
  asm volatile("griddepcontrol.launch_dependents;");
  const int in_group = blockIdx.x % (EXPERT_GROUP * blocks_n), first_row = in_group / EXPERT_GROUP * ROWS;
  const int index = blockIdx.x / (EXPERT_GROUP * blocks_n) * EXPERT_GROUP + in_group % EXPERT_GROUP;
  if (index == 0) zero_behind<T, ROWS>(stack, groups, first_row);
  const Slot slot = find_slot<Even<TM>>(groups, index);
  if (slot.expert < 0) return;
  const DecodeArgs a = of_slot<F, T>(stack, slot);
  uint32_t base = uint32_t(__cvta_generic_to_shared(ring)), thread = threadIdx.x;
  asm volatile("" : "+r"(base), "+r"(thread));
  const uint32_t full = base + Layout::BARRIERS, empty = full + 8 * D;
  const int warp = __shfl_sync(~0u, thread / 32, 0), steps = (a.k + 127) / 128;
  const bool copies = thread == Layout::MULTIPLY;
  if (copies) {
    for (int d = 0; d < D; ++d) {
      init_barrier(full + 8 * d, 1 + 4);  // the copies, and the warps that bring scales
      init_barrier(empty + 8 * d, 4 * RG);
    }
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();

  if (warp >= WARPS) {  // the ring
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Layout::FILLS));
    const int codes_row = slot.expert * a.n + first_row;
    fill_ring<F, Layout, RG * R, D>(a, ring, full, empty, warp - WARPS, copies, first_row, 0, steps, [&](int i, int place) {
      const uint32_t to = base + place * PLACE, barrier = full + 8 * place;
      expect(barrier, X + W);
      copy_box(codes_map, to + X, i * 64, codes_row, barrier);
      copy_box(x_map, to, i * 256, slot.first, barrier);
      copy_box(x_map, to + X / 2, i * 256 + 128, slot.first, barrier);
    });
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Layout::MULTIPLIES));
    if (TM > 64 && slot.rows <= 64) multiply_in_order<F, T, Layout, RG, R, TM, 64, D>(a, ring, base, full, empty, thread, warp, first_row, steps);
    else multiply_in_order<F, T, Layout, RG, R, TM, TM, D>(a, ring, base, full, empty, thread, warp, first_row, steps);
  }
#endif
}

template <int F, typename T, int RG, int R, int TM, int D>
cudaError_t launch_expert_tiles(const DecodeArgs& stack, const Groups& groups, cudaStream_t stream) {
  using Layout = TileLayout<RG, 1, TM, D, R>;
  CUtensorMap codes, x;
  cudaError_t error = map_bytes(&codes, stack.codes, stack.n * groups.experts, stack.k / 2, Layout::ROWS, 64, CU_TENSOR_MAP_SWIZZLE_64B);
  if (error != cudaSuccess) return error;
  error = map_bytes(&x, static_cast<const uint8_t*>(stack.x), groups.rows, stack.k * 2, TM, 128, CU_TENSOR_MAP_SWIZZLE_128B);
  if (error != cudaSuccess) return error;
  const int64_t slots = most_slots(groups.rows, groups.experts, TM), blocks_n = (stack.n + Layout::ROWS - 1) / Layout::ROWS;
  const int64_t blocks = (slots + EXPERT_GROUP - 1) / EXPERT_GROUP * EXPERT_GROUP * blocks_n;
  return launch_kernel<1>(expert_tiles<F, T, RG, R, TM, D>, dim3(unsigned(blocks)), Layout::THREADS, Layout::BYTES, stream, codes, x, stack, groups,
                          int(blocks_n));
}

// Slots are of 64 rows where an expert has no more on average, else of 128.
template <int F, typename T>
cudaError_t run_expert_tiles(DecodeArgs stack, const Groups& groups, cudaStream_t stream) {
  stack.times = Folded<F, T>::TIMES;
  if (groups.rows <= 48 * int64_t(groups.experts)) return launch_expert_tiles<F, T, 2, 1, 64, 6>(stack, groups, stream);
  return launch_expert_tiles<F, T, 2, 2, 128, 4>(stack, groups, stream);
}

}  // namespace aoquant::decode

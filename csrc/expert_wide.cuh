// expert_tiles.cuh for hundreds of rows of x of each expert: slots of up to 256 rows, in blocks that stay.
//
// What holds expert_tiles.cuh back, by its machine code and its times on an H200. 128 values of K, 256 rows of W and
// 128 rows of x take 2048 cycles of wgmma. Decoding W for only 128 rows of x takes half of the instructions that a
// multiprocessor can issue in that time. Its lanes read codes in pieces as wide as four lanes need, so wgmma, copies
// and reads keep shared memory busy for 86 to 101 % of its cycles. And each block multiplies nothing for some 17
// thousand cycles, before its first product and after its last.
//
// Here 128 rows of W meet up to 256 rows of x, so W is decoded half as often. A multiprocessor has one block, which
// takes one tile after another (slots.cuh). Blocks draw tiles from a counter as they become free, because slots differ
// and short slots come last. The warps that fill the ring go on with the next tile while this one is multiplied; a
// place of the ring says which tile its bytes belong to.
//
// Two groups of warps multiply, 64 rows of W each. They share x but no barrier: while one group writes its sums out of
// its registers (turned_sums.cuh), the other has the tensor core. Products are about as wide as a slot: 64, 128, 160,
// 192 or 256 rows of x. The warps that bring scales decode them once (row_scales.cuh); the lanes that multiply need
// not.
//
// K is summed as in expert_tiles.cuh, and so the bits are the same.
#pragma once


#include "expert_tiles.cuh"
#include "row_scales.cuh"
#include "turned_sums.cuh"

namespace aoquant::decode {

// The tile that the bytes in a place of the ring belong to. expert: -1 after the last tile.
struct WideTile {
  int expert, first, rows, first_row;
};

struct WideLayout : TileLayout<2, 1, 256, 3> {
  static constexpr int SHARE = 2;  // blocks of a cluster, which share x
  static constexpr int TOKENS = 256, D = 3, GROUPS = 2, X_BOX = 64 * 128;  // bytes of 64 rows of x, of half a step
  static constexpr int FILLS = 72, MULTIPLIES = 216;  // registers, as TileLayout's
  static_assert(FILLS * 128 + MULTIPLIES * MULTIPLY == EVEN * THREADS);
  // Size of the queue of drawn tiles. One block of a cluster can be at most D + 1 tiles ahead of the other.
  static constexpr int DRAWN = 8;
  static constexpr int TILES = BARRIERS + 16 * D, NEXT = TILES + 16 * D, SAID = NEXT + 16 * DRAWN, ALL = SAID + 8 * DRAWN;
  static_assert(WideCut::HEIGHT == TOKENS && WideCut::SHORT == 128 && WideCut::SHARES == 160);  // widths of products
  static_assert(ALL <= 227 * 1024 && ROWS == 64 * GROUPS && sizeof(WideTile) == 16 && DRAWN > D + 1);
};

#ifdef AOQUANT_HOPPER
struct WideRing {
  uint8_t* at;
  uint32_t base, full, empty, said;  // addresses in shared memory
};

__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}

// One lane for each block of the cluster arrives at that block's barrier, which lies where `barrier` does here.
__device__ __forceinline__ void arrive_at_all(uint32_t barrier, int lane) {
  if (lane < WideLayout::SHARE)
    asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(barrier), "r"(lane)
                 : "memory");
}

// Tile `index` of the tiles of a cut's slots. If `index` is beyond them, it is reduced by their number.
template <typename Cut>
__device__ __forceinline__ WideTile tile_of(const Groups& groups, int& index, int slots, int blocks) {
  if (index >= slots * blocks) {
    index -= slots * blocks;
    return {-1, 0, 0, 0};
  }
  const TilePlace place = tile_place<EXPERT_GROUP>(index, slots, blocks);
  const Slot slot = find_slot<Cut>(groups, place.slot);
  return {slot.expert, slot.first, slot.rows, place.block * WideLayout::SHARE * WideLayout::ROWS};
}

// Sends a tile into the shared memory of a block of the cluster, where `barrier` counts its bytes.
__device__ __forceinline__ void send_tile(uint32_t to, uint32_t barrier, int rank, const WideTile& tile) {
  asm volatile(
      "{\n.reg .b32 p, q;\nmapa.shared::cluster.u32 p, %0, %2;\nmapa.shared::cluster.u32 q, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [p], {%3, %4, %5, %6}, [q];\n}" ::"r"(to),
      "r"(barrier), "r"(rank), "r"(tile.expert), "r"(tile.first), "r"(tile.rows), "r"(tile.first_row)
      : "memory");
}

// Like `copy_box`, into the same place of each block of the cluster; each block's own barrier counts the bytes.
__device__ __forceinline__ void copy_box_to_all(const CUtensorMap& map, uint32_t to, int column, int row, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(&map),
               "r"(column), "r"(row), "r"(barrier), "h"(uint16_t((1 << WideLayout::SHARE) - 1))
               : "memory");
}

// Multiplies a tile whose slot is `TN` rows wide, and writes its sums. warp: one of 8; chunks: K's groups of 32 values.
template <int F, typename T, int TN>
__device__ __forceinline__ void multiply_wide(const DecodeArgs& stack, const WideTile& tile, const WideRing& ring, Turn<WideLayout::D>& turn, int warp, int lane,
                                              int chunks) {
  using Layout = WideLayout;
  const int g = lane / 4, t = lane % 4, lower = warp * 16 + turned_row(g, 0), upper = warp * 16 + turned_row(g, 1);
  const uint32_t select = select_of_lane(t);
  float acc[TN / 2];
#pragma unroll
  for (int i = 0; i < TN / 2; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(acc[i]));
  int before = 0;  // the place of the step before
#pragma unroll 1
  for (int left = chunks; left > 0; left -= 4) {
    const uint32_t place = ring.base + turn.at * Layout::PLACE, codes = place + Layout::X, scales = codes + Layout::W;
    wait(ring.full + 8 * turn.at, turn.parity);
    const uint4 words[2] = {load_shared(scales + lower * 16), load_shared(scales + upper * 16)};
    uint4 next[2];
    auto take = [&](int j) {
      next[0] = load_shared(codes + lower * 64 + piece_of_64(lower, j) * 16);
      next[1] = load_shared(codes + upper * 64 + piece_of_64(upper, j) * 16);
    };
    take(0);
    const uint64_t box = (place >> 4 & 0x3FFF) | uint64_t(0x40000040) << 32 | 1 << 16;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j == 2 && left <= 2) break;  // the last step, with half of its values
      const uint4 now[2] = {next[0], next[1]};
      if (j < 3) take(j + 1);
      uint32_t low[2][2], high[2][2];
      operands_in_order<F, T>(low, now[0], select, halves_of_word<F, T>((&words[0].x)[j], stack));
      operands_in_order<F, T>(high, now[1], select, halves_of_word<F, T>((&words[1].x)[j], stack));
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t w[4] = {low[h][0], high[h][0], low[h][1], high[h][1]};
        Wgmma<TN>::template run<T>(acc, w, box + (j / 2 * (Layout::X / 2) + (2 * j + h) % 4 * 32) / 16);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      // the first wait of a step ends the products of the step before
      if (j == 0 && left < chunks) arrive_at_all(ring.empty + 8 * before, lane);
    }
    before = turn.at;
    turn.next();
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  arrive_at_all(ring.empty + 8 * before, lane);
  // pointers are made here, because the loop above has no registers for them
  write_turned<F, T>(of_slot<F, T>(stack, Slot{tile.expert, tile.first, tile.rows}), acc, lane, tile.first_row + warp * 16);
}

// The work of the warps that multiply, until no tiles are left.
template <int F, typename T>
__device__ __forceinline__ void multiply_tiles_wide(const DecodeArgs& stack, const WideRing& ring, int warp, int lane) {
  using Layout = WideLayout;
  const WideTile* tiles = reinterpret_cast<const WideTile*>(ring.at + Layout::TILES);
  Turn<Layout::D> turn;
  const int chunks = stack.k / 32;
#pragma unroll 1
  while (true) {
    wait(ring.full + 8 * turn.at, turn.parity);
    const WideTile tile = tiles[turn.at];
    if (tile.expert < 0) return;
    if (tile.rows > 192) multiply_wide<F, T, 256>(stack, tile, ring, turn, warp, lane, chunks);
    else if (tile.rows > 160) multiply_wide<F, T, 192>(stack, tile, ring, turn, warp, lane, chunks);
    else if (tile.rows > 128) multiply_wide<F, T, 160>(stack, tile, ring, turn, warp, lane, chunks);
    else if (tile.rows > 64) multiply_wide<F, T, 128>(stack, tile, ring, turn, warp, lane, chunks);
    else multiply_wide<F, T, 64>(stack, tile, ring, turn, warp, lane, chunks);
  }
}

// The work of the four warps that fill the ring: tiles, and their bytes. warp: of the four; copies: whether this
// thread, of the first warp, sends for bytes; rank: of the block among the blocks that share x.
template <int F, typename T>
__device__ __forceinline__ void fill_wide(const CUtensorMap& codes_map, const CUtensorMap& x_map, const DecodeArgs& stack, const Groups& groups, int* drawn,
                                          bool row_scales, const WideRing& ring, int warp, int lane, bool copies, int rank) {
  using Layout = WideLayout;
  WideTile* tiles = reinterpret_cast<WideTile*>(ring.at + Layout::TILES);
  const WideTile* next = reinterpret_cast<const WideTile*>(ring.at + Layout::NEXT);
  constexpr int SHARE = Layout::SHARE;
  const int rows = SHARE * Layout::ROWS, blocks = (stack.n + rows - 1) / rows, steps = (stack.k + 127) / 128;
  const bool draws = warp == 0 && rank == 0;
  const int long_slots = draws ? count_slots<LongSlots>(groups) : 0, short_slots = draws ? count_slots<ShortSlots>(groups) : 0;
  int index = int(blockIdx.x) / SHARE;
  Turn<Layout::D> turn;
  turn.parity = 1;  // the first time a place is free
#pragma unroll 1
  for (int draw = 0;; ++draw) {
    const uint32_t at = draw % Layout::DRAWN, said = ring.said + 8 * at;
    if (copies) expect(said, sizeof(WideTile));
    int later = 0;
    if (draws) {
      WideTile found = tile_of<LongSlots>(groups, index, long_slots, blocks);
      if (found.expert < 0) found = tile_of<ShortSlots>(groups, index, short_slots, blocks);
      if (lane < SHARE) send_tile(ring.base + Layout::NEXT + 16 * at, said, lane, found);
      if (copies) later = atomicAdd(drawn, 1);  // needed behind this tile
    }
    wait(said, draw / Layout::DRAWN % 2);
    WideTile tile = next[at];
    if (tile.expert < 0) break;
    tile.first_row += rank * Layout::ROWS;
    const DecodeArgs a = of_slot<F, T>(stack, Slot{tile.expert, tile.first, tile.rows});
    auto word = [&](const RawScale& raw) { return word_of_raw<F, T>(raw, a); };
    auto bring = [&](int i, int place) {
      tiles[place] = tile;
      const uint32_t to = ring.base + place * Layout::PLACE, barrier = ring.full + 8 * place;
      const int boxes = (tile.rows + 63) / 64;
      expect(barrier, boxes * 2 * Layout::X_BOX + Layout::W);
      copy_box(codes_map, to + Layout::X, i * 64, tile.expert * stack.n + tile.first_row, barrier);
#pragma unroll 1
      for (int b = rank; b < boxes; b += SHARE)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t half = to + h * (Layout::X / 2) + b * Layout::X_BOX;
          copy_box_to_all(x_map, half, i * 256 + h * 128, tile.first + 64 * b, barrier);
        }
    };
    if (row_scales)
      fill_row_scales<F, Layout, Layout::D>(stack, ring.at, ring.full, ring.empty, warp, lane, copies, tile.expert, tile.first_row, steps, turn, word,
                                            bring);
    else
      fill_steps<F, Layout, Layout::GROUPS, Layout::D>(a, ring.at, ring.full, ring.empty, warp, copies, tile.first_row, 0, steps, turn, word, bring);
    if (draws) index = int(gridDim.x) / SHARE + __shfl_sync(~0u, later, 0);
  }
  wait(ring.empty + 8 * turn.at, turn.parity);
  if (copies) {
    tiles[turn.at] = WideTile{-1, 0, 0, 0};
    arrive(ring.full + 8 * turn.at);
  }
  __syncwarp();
  if (lane == 0) arrive(ring.full + 8 * turn.at);
}
#endif

// row_scales: whether row_scales.cuh brings the scales.
template <int F, typename T>
__global__ void __launch_bounds__(WideLayout::THREADS, 1)
    expert_wide(const __grid_constant__ CUtensorMap codes_map, const __grid_constant__ CUtensorMap x_map, const __grid_constant__ DecodeArgs stack,
                const __grid_constant__ Groups groups, int* drawn, const bool row_scales) {
#ifdef AOQUANT_HOPPER
  extern __shared__ __align__(1024) uint8_t ring[];
  using Layout = WideLayout;
  constexpr int WARPS = Layout::MULTIPLY / 32;
  asm volatile("griddepcontrol.wait;" ::: "memory");  // all that is read may be what the kernel before this one wrote
  asm volatile("griddepcontrol.launch_dependents;");
  for (int column = int(blockIdx.x) * Layout::ROWS; column < stack.n; column += int(gridDim.x) * Layout::ROWS)
    zero_behind<T, Layout::ROWS>(stack, groups, column);
  const uint32_t base = uint32_t(__cvta_generic_to_shared(ring)), full = base + Layout::BARRIERS;
  const WideRing places = {ring, base, full, full + 8 * Layout::D, base + Layout::SAID};
  uint32_t thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // or it is read again in each step
  const int warp = __shfl_sync(~0u, int(thread) / 32, 0), lane = thread % 32;
  const bool copies = thread == Layout::MULTIPLY;
  if (copies) {
    for (int d = 0; d < Layout::D; ++d) {
      init_barrier(places.full + 8 * d, 1 + 4);  // the copies, and the warps that bring scales
      init_barrier(places.empty + 8 * d, WARPS * Layout::SHARE);
    }
    for (int d = 0; d < Layout::DRAWN; ++d) init_barrier(places.said + 8 * d, 1);
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
  }
  cluster_sync();
  if (warp >= WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Layout::FILLS));
    fill_wide<F, T>(codes_map, x_map, stack, groups, drawn, row_scales, places, warp - WARPS, lane, copies, int(blockIdx.x) % Layout::SHARE);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Layout::MULTIPLIES));
    multiply_tiles_wide<F, T>(stack, places, warp, lane);
  }
  __syncwarp();
  cluster_sync();  // no block leaves while the other one sends to its shared memory
#endif
}

// This is a kernel and not a memset, because a programmatic launch has to follow a kernel.
static __global__ void __launch_bounds__(1) nothing_drawn(int* drawn) { *drawn = 0; }

// Whether this kernel takes the call: experts have so many rows that slots of 256 are mostly full.
inline bool wide_takes(const DecodeArgs& stack, const Groups& groups) { return stack.n % 4 == 0 && groups.rows > 128 * int64_t(groups.experts); }

// blocks: that a device runs at once; drawn: workspace of one integer.
template <int F, typename T>
cudaError_t run_expert_wide(DecodeArgs stack, const Groups& groups, int blocks, int* drawn, cudaStream_t stream) {
  using Layout = WideLayout;
  constexpr int SHARE = Layout::SHARE;
  stack.times = Folded<F, T>::TIMES;
  CUtensorMap codes, x;
  cudaError_t error = map_bytes(&codes, stack.codes, stack.n * groups.experts, stack.k / 2, Layout::ROWS, 64, CU_TENSOR_MAP_SWIZZLE_64B);
  if (error != cudaSuccess) return error;
  error = map_bytes(&x, static_cast<const uint8_t*>(stack.x), groups.rows, stack.k * 2, 64, 128, CU_TENSOR_MAP_SWIZZLE_128B);
  if (error != cudaSuccess) return error;
  nothing_drawn<<<1, 1, 0, stream>>>(drawn);
  const int64_t rows = SHARE * Layout::ROWS, most = most_slots(groups.rows, groups.experts, Layout::TOKENS) * ((stack.n + rows - 1) / rows);
  const int64_t clusters = most < blocks / SHARE ? most : blocks / SHARE;
  return launch_kernel<SHARE>(expert_wide<F, T>, dim3(unsigned(clusters * SHARE)), Layout::THREADS, Layout::ALL, stream, codes, x, stack, groups, drawn,
                              RowScales<F>::takes(stack));
}

}  // namespace aoquant::decode

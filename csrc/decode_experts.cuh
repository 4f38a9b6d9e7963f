// y = x W^T for few rows of x of each expert and a stack of packed 4-bit W's, in one launch. A block multiplies one
// slot by some rows of W, as decode.cuh or decode_rows.cuh does.
//
// A block finds its slot (slots.cuh), moves its pointers to that expert and to those rows of x, and is then a block of
// the dense kernel. The slots of one expert are neighbours in launch order, so later slots find the codes that the
// first one read in the L2 cache. K is cut by (n, k) alone, never by the number of rows.
//
// A block of a small expert has few units to multiply. It spends most of its time before the first product (finding its
// slot, the first bytes) and after the last one (sums). So if there are many such blocks, they have 64 rows of W
// instead of 32, brought by decode_rows.cuh's asynchronous copies. They have as many warps and bytes in flight as
// decode.cuh's blocks, whose 64 rows would take too many registers. Both add in the same order.
#pragma once

#include "decode.cuh"
#include "decode_rows.cuh"
#include "slots.cuh"

namespace aoquant::decode {

constexpr int SMALL_BLOCKS = 4;            // of four warps, on a multiprocessor
constexpr int64_t SMALL_EXPERT = 1 << 22;  // values of W

// The product of one slot. a: of the stack, n rows an expert.
template <int F, typename T>
__device__ __forceinline__ DecodeArgs of_slot(const DecodeArgs& stack, const Slot& slot) {
  DecodeArgs a = stack;
  const int64_t row = int64_t(slot.expert) * a.n, scale_row = row >> a.tile_log2;
  const int64_t scale_bytes = F == INT4 ? (a.k >> a.group_log2) * 2 : a.k / (F == MXFP4 ? 32 : 16);
  a.codes += row * (a.k / 2);
  a.scale = static_cast<const uint8_t*>(a.scale) + scale_row * scale_bytes;
  if (F == INT4) a.zero = static_cast<const uint8_t*>(a.zero) + scale_row * scale_bytes;
  if (a.alpha_w) a.alpha_w += row * a.alpha_w_stride;
  if (a.alpha_x) a.alpha_x += slot.first * a.alpha_x_stride;
  a.x = static_cast<const T*>(a.x) + int64_t(slot.first) * a.k;
  a.y = static_cast<T*>(a.y) + int64_t(slot.first) * a.n;
  a.m = slot.rows;
  return a;
}

// Zeros columns `first` to `first` + COLUMNS of the rows of y behind the last expert's. There are seldom any.
template <typename T, int COLUMNS>
__device__ __forceinline__ void zero_behind(const DecodeArgs& stack, const Groups& groups, int first) {
  const int behind = load_end(groups, groups.experts - 1), columns = min(COLUMNS, stack.n - first);
  for (int64_t i = threadIdx.x; i < int64_t(groups.rows - behind) * columns; i += blockDim.x)
    static_cast<T*>(stack.y)[(behind + i / columns) * stack.n + first + i % columns] = T(0.0f);
}

// Finds the block's slot. The blocks of the first slot also zero the rows behind the last expert's.
template <typename T, int HEIGHT, int COLUMNS>
__device__ __forceinline__ Slot slot_of_block(const DecodeArgs& stack, const Groups& groups) {
  asm volatile("griddepcontrol.wait;" ::: "memory");  // for `ends`
  if (blockIdx.x == 0) zero_behind<T, COLUMNS>(stack, groups, blockIdx.y * COLUMNS);
  return find_slot<Even<HEIGHT>>(groups, blockIdx.x);
}

template <int F, typename T, int TOKENS, int RT, int WARPS, int D>
__global__ void __launch_bounds__(32 * WARPS) experts_kernel(const __grid_constant__ DecodeArgs stack, const __grid_constant__ Groups groups) {
#ifdef AOQUANT_HOPPER
  extern __shared__ __align__(128) uint8_t shared[];
  const Slot slot = slot_of_block<T, TOKENS, 16 * RT>(stack, groups);
  if (slot.expert < 0) return;
  const DecodeArgs a = of_slot<F, T>(stack, slot);
  multiply<F, T, TOKENS, RT, WARPS, D>(a, blockIdx.y * 16 * RT, shared);
#endif
}

template <int F, typename T, int TOKENS, int RT, int WARPS, int S>
__global__ void __launch_bounds__(32 * WARPS, WARPS == 4 ? SMALL_BLOCKS : 1) experts_large_kernel(const __grid_constant__ DecodeArgs stack, const __grid_constant__ Groups groups) {
#ifdef AOQUANT_HOPPER
  extern __shared__ __align__(128) uint8_t shared[];
  const Slot slot = slot_of_block<T, TOKENS, 16 * RT>(stack, groups);
  if (slot.expert < 0) return;
  const DecodeArgs a = of_slot<F, T>(stack, slot);
  multiply_large<F, T, TOKENS, RT, WARPS, S, 1>(a, blockIdx.y, shared);
#endif
}

template <int TOKENS, int ROWS>
dim3 blocks_of(const DecodeArgs& stack, const Groups& groups) {
  return dim3(unsigned(most_slots(groups.rows, groups.experts, TOKENS)), (stack.n + ROWS - 1) / ROWS);
}

template <int F, typename T, int TOKENS, int RT, int WARPS, int D>
cudaError_t launch_experts(const DecodeArgs& stack, const Groups& groups, cudaStream_t stream) {
  return launch_kernel<1>(experts_kernel<F, T, TOKENS, RT, WARPS, D>, blocks_of<TOKENS, 16 * RT>(stack, groups), 32 * WARPS,
                          shared_bytes<TOKENS, RT, WARPS, D>(), stream, stack, groups);
}

template <int F, typename T, int TOKENS, int RT, int WARPS, int S>
cudaError_t launch_experts_large(const DecodeArgs& stack, const Groups& groups, cudaStream_t stream) {
  using Layout = RowsLayout<F, TOKENS, RT, WARPS, S, 1>;
  return launch_kernel<1>(experts_large_kernel<F, T, TOKENS, RT, WARPS, S>, blocks_of<TOKENS, Layout::ROWS>(stack, groups), 32 * WARPS,
                          Layout::bytes(stack, TOKENS), stream, stack, groups);
}

// TOKENS: rows of a slot. A row's sums are those of WARPS slices of K, in order.
template <int F, typename T, int TOKENS>
cudaError_t run_experts_in(const DecodeArgs& stack, const Groups& groups, cudaStream_t stream) {
  if (decode_is_large(stack.n, stack.k)) {
    if (stack.n > 8192 && RowsLayout<F, TOKENS, 7, 8, 1, 1>::fits(stack)) return launch_experts_large<F, T, TOKENS, 7, 8, 1>(stack, groups, stream);
    if (RowsLayout<F, TOKENS, 4, 8, 1, 1>::fits(stack)) return launch_experts_large<F, T, TOKENS, 4, 8, 1>(stack, groups, stream);
    return launch_experts<F, T, TOKENS, 2, 8, 2>(stack, groups, stream);
  }
  if constexpr (TOKENS == 8) {
    using Layout = RowsLayout<F, TOKENS, 4, 4, 1, 1>;
    const dim3 blocks = blocks_of<TOKENS, Layout::ROWS>(stack, groups);  // some of them empty, so four times as many as run at once
    const bool enough = int64_t(blocks.x) * blocks.y >= 4 * SMALL_BLOCKS * 132;
    if (enough && int64_t(stack.n) * stack.k <= SMALL_EXPERT && Layout::fits(stack)) return launch_experts_large<F, T, TOKENS, 4, 4, 1>(stack, groups, stream);
  }
  return launch_experts<F, T, TOKENS, 2, 4, 3>(stack, groups, stream);
}

template <int F, typename T>
cudaError_t run_experts(DecodeArgs stack, const Groups& groups, cudaStream_t stream) {
  stack.times = Folded<F, T>::TIMES;
  // an expert of a few rows more than the average has them in one slot
  if (groups.rows <= 4 * int64_t(groups.experts)) return run_experts_in<F, T, 8>(stack, groups, stream);
  return run_experts_in<F, T, 16>(stack, groups, stream);
}

}  // namespace aoquant::decode

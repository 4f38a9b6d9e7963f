// Rows of x sorted by expert, cut into slots: up to HEIGHT rows of one expert each. What experts have is known on the
// device alone, so a block finds its slot itself. There are as many blocks as slots could be, and those without one end
// at once.
//
// `ends` (experts,) holds for each expert the row behind its last.
#pragma once

#include <cstdint>

namespace aoquant {

struct Groups {
  const int* ends;
  int experts, rows;  // rows: of x, some of which may lie behind the last expert's
};

// expert: -1 where there is none.
struct Slot {
  int expert, first, rows;
};

// Slots that there are, at most: of as many experts as can have rows, each with a slot of one row.
inline int64_t most_slots(int64_t rows, int64_t experts, int64_t height) {
  const int64_t hit = rows < experts ? rows : experts;
  return hit + (rows - hit) / height;
}

// A tile: a slot and a block of rows of W. Tiles come in groups of GROUP slots x blocks, slots first, so that those that are
// multiplied at once share x and W in the L2 cache. slots: how many there are.
struct TilePlace {
  int slot, block;
};
template <int GROUP>
#ifdef __CUDACC__
__host__ __device__
#endif
inline TilePlace tile_place(int index, int slots, int blocks) {
  const int first = index / (GROUP * blocks) * GROUP, left = slots - first, height = left < GROUP ? left : GROUP;
  const int in_group = index % (GROUP * blocks);
  return {first + in_group % height, in_group / height};
}

#if defined(__CUDACC__) || defined(AOQUANT_HOST_WARP)  // a host's program may say what a warp is
// Volatile, so that it stays behind the wait for the kernel that wrote it.
__device__ __forceinline__ int load_end(const Groups& groups, int expert) {
  return *static_cast<const volatile int*>(groups.ends + expert);
}

// How many slots there are, counted by every warp for itself.
template <int HEIGHT>
__device__ __forceinline__ int count_slots(const Groups& groups) {
  const int lane = threadIdx.x % 32;
  int slots = 0;
  for (int e = lane; e < groups.experts; e += 32)
    slots += (load_end(groups, e) - (e ? load_end(groups, e - 1) : 0) + HEIGHT - 1) / HEIGHT;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) slots += __shfl_xor_sync(~0u, slots, d);
  return slots;
}

// Slot `index`, found by every warp for itself: a lane takes four experts, so one wait suffices up to 128 of them.
template <int HEIGHT>
__device__ __forceinline__ Slot find_slot(const Groups& groups, const int index) {
  constexpr int EACH = 4;
  const int lane = threadIdx.x % 32;
  int before = 0, start = 0;  // slots and rows of the experts that were looked at
  for (int base = 0; base < groups.experts; base += 32 * EACH) {
    int end[EACH], slots[EACH], all = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) end[i] = load_end(groups, min(base + EACH * lane + i, groups.experts - 1));
    int from = __shfl_up_sync(~0u, end[EACH - 1], 1);
    if (lane == 0) from = start;
    const int first = from;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      slots[i] = (end[i] - from + HEIGHT - 1) / HEIGHT, all += slots[i], from = end[i];
    }
    int upto = all;  // and of the lanes in front of this one
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int more = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += more;
    }
    upto += before;
    const uint32_t behind = __ballot_sync(~0u, upto > index);
    if (behind) {
      Slot slot = {-1, 0, 0};
      int left = index - (upto - all), row = first;
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        if (slot.expert < 0 && left < slots[i]) slot = {base + EACH * lane + i, row + left * HEIGHT, min(HEIGHT, end[i] - row - left * HEIGHT)};
        left -= slots[i], row = end[i];
      }
      const int holder = __ffs(behind) - 1;
      return {__shfl_sync(~0u, slot.expert, holder), __shfl_sync(~0u, slot.first, holder), __shfl_sync(~0u, slot.rows, holder)};
    }
    before = __shfl_sync(~0u, upto, 31), start = __shfl_sync(~0u, end[EACH - 1], 31);
  }
  return {-1, 0, 0};
}
#endif

}  // namespace aoquant

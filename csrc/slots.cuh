// Cuts rows of x, sorted by expert, into slots; a slot has rows of one expert. Only the device knows how many rows an
// expert has, so a block finds its slot itself. The launch has as many blocks as there could be slots; a block without
// a slot ends at once.
//
// `ends` (experts,) holds for each expert the index after its last row.
//
// A cut says which slots an expert's rows make: `Even`, or for expert_wide.cuh `LongSlots` and `ShortSlots`.
//
// In expert_wide.cuh a slot's cost is its width (64 to 256 rows), and at least half of a full slot, because W is
// decoded either way. Splitting 286 rows as 256 + 30 costs 1.5; 160 + 126 costs 1.125. A block draws one tile after
// another, some 8 if experts are few and large. Short slots are drawn last, to fill the tail.
#pragma once

#include <cstdint>

namespace aoquant {

struct Groups {
  const int* ends;
  int experts, rows;  // rows: of x, some of which may lie behind the last expert's
};

// expert: -1 if the slot does not exist.
struct Slot {
  int expert, first, rows;
};

// The largest possible number of slots: as many experts as can have rows have a slot of one row each.
inline int64_t most_slots(int64_t rows, int64_t experts, int64_t height) {
  const int64_t hit = rows < experts ? rows : experts;
  return hit + (rows - hit) / height;
}

// A tile is a slot and a block of rows of W. Tiles come in groups of GROUP slots x blocks, slots first, so that tiles
// that are multiplied at once share x and W in the L2 cache. slots: their number.
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

// A slot's rows within its expert: the first one, and how many.
struct Span {
  int first, rows;
};

#ifdef __CUDACC__
#define AOQUANT_CUT __host__ __device__ __forceinline__ constexpr
#else
#define AOQUANT_CUT constexpr
#endif

// Slots of HEIGHT rows, and what is left.
template <int HEIGHT>
struct Even {
  static AOQUANT_CUT int count(int rows) { return (rows + HEIGHT - 1) / HEIGHT; }
  static AOQUANT_CUT Span span(int rows, int i) { return {i * HEIGHT, rows - i * HEIGHT < HEIGHT ? rows - i * HEIGHT : HEIGHT}; }
};

// Slots of 256 rows, and the rest. If the rest would be 64 rows or fewer, the slot before it keeps 160, and the last
// slot takes the others. Only the last slot can be short, of at most 128 rows.
struct WideCut {
  static constexpr int HEIGHT = 256, SHORT = 128, FEW = 64, SHARES = 160;  // SHARES: rows of a slot that gives some to the last
  static AOQUANT_CUT int all(int rows) { return (rows + HEIGHT - 1) / HEIGHT; }
  static AOQUANT_CUT bool shares(int rows) { return rows > HEIGHT && rows - (all(rows) - 1) * HEIGHT <= FEW; }
  static AOQUANT_CUT int last_first(int rows) { return (all(rows) - 1) * HEIGHT - (shares(rows) ? HEIGHT - SHARES : 0); }
  static AOQUANT_CUT bool ends_short(int rows) { return rows > 0 && rows - last_first(rows) <= SHORT; }
};
struct LongSlots {
  static AOQUANT_CUT int count(int rows) { return WideCut::all(rows) - WideCut::ends_short(rows); }
  static AOQUANT_CUT Span span(int rows, int i) {
    const int last = WideCut::last_first(rows), first = i * WideCut::HEIGHT;
    if (first >= last) return {last, rows - last};
    return {first, last - first < WideCut::HEIGHT ? last - first : WideCut::HEIGHT};
  }
};
struct ShortSlots {
  static AOQUANT_CUT int count(int rows) { return WideCut::ends_short(rows); }
  static AOQUANT_CUT Span span(int rows, int) { return {WideCut::last_first(rows), rows - WideCut::last_first(rows)}; }
};
#undef AOQUANT_CUT

#if defined(__CUDACC__) || defined(AOQUANT_HOST_WARP)  // a host's program may say what a warp is
// Volatile, so that it stays behind the wait for the kernel that wrote it.
__device__ __forceinline__ int load_end(const Groups& groups, int expert) {
  return *static_cast<const volatile int*>(groups.ends + expert);
}

// How many slots there are, counted by every warp for itself.
template <typename Cut>
__device__ __forceinline__ int count_slots(const Groups& groups) {
  const int lane = threadIdx.x % 32;
  int slots = 0;
  for (int e = lane; e < groups.experts; e += 32)
    slots += Cut::count(load_end(groups, e) - (e ? load_end(groups, e - 1) : 0));
#pragma unroll
  for (int d = 16; d > 0; d /= 2) slots += __shfl_xor_sync(~0u, slots, d);
  return slots;
}

// Finds slot `index`; every warp finds it for itself. A lane takes four experts, so up to 128 experts need one wait.
template <typename Cut>
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
      slots[i] = Cut::count(end[i] - from), all += slots[i], from = end[i];
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
        if (slot.expert < 0 && left < slots[i]) {
          const Span span = Cut::span(end[i] - row, left);
          slot = {base + EACH * lane + i, row + span.first, span.rows};
        }
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

// csrc/slots.cuh on a CPU: 32 threads are a warp, and meet where its lanes exchange values.
#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#define AOQUANT_HOST_WARP
#define __device__
#define __forceinline__ inline

using std::min;

namespace {

thread_local struct {
  int x;
} threadIdx;
// Sleeps; std::barrier spins first, which starves 32 threads of a busy machine's two cores.
struct Meeting {
  pthread_barrier_t all;
  Meeting() { pthread_barrier_init(&all, nullptr, 32); }
  ~Meeting() { pthread_barrier_destroy(&all); }
  void arrive_and_wait() { pthread_barrier_wait(&all); }
} meeting;
int board[32];

int read_from(int value, int lane) {
  board[threadIdx.x] = value;
  meeting.arrive_and_wait();
  const int read = board[lane];
  meeting.arrive_and_wait();
  return read;
}

int __shfl_sync(unsigned, int value, int lane) { return read_from(value, lane); }
int __shfl_up_sync(unsigned, int value, int by) { return read_from(value, threadIdx.x < by ? threadIdx.x : threadIdx.x - by); }
int __shfl_xor_sync(unsigned, int value, int by) { return read_from(value, threadIdx.x ^ by); }
unsigned __ballot_sync(unsigned, bool said) {
  board[threadIdx.x] = said;
  meeting.arrive_and_wait();
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= unsigned(board[lane]) << lane;
  meeting.arrive_and_wait();
  return all;
}
int __ffs(unsigned v) { return __builtin_ffs(int(v)); }

}  // namespace

#include "slots.cuh"

// Slots of HEIGHT = 8 rows: (most_slots, 3) expert, first row, rows; -1 for the expert where there is none. Returns how
// many that is.
extern "C" int64_t find_slots(const int* ends, int experts, int rows, int* found) {
  const aoquant::Groups groups = {ends, experts, rows};
  const int64_t most = aoquant::most_slots(rows, experts, 8);
  if (!found) return most;
  std::vector<std::thread> warp;
  for (int lane = 0; lane < 32; ++lane)
    warp.emplace_back([&, lane] {
      threadIdx.x = lane;
      for (int i = 0; i < most; ++i) {
        const aoquant::Slot slot = aoquant::find_slot<8>(groups, i);
        if (lane == i % 32) found[3 * i] = slot.expert, found[3 * i + 1] = slot.first, found[3 * i + 2] = slot.rows;
      }
    });
  for (auto& lane : warp) lane.join();
  return most;
}

// How many slots of 8 rows there are, as a warp counts them.
extern "C" int count_slots(const int* ends, int experts, int rows) {
  const aoquant::Groups groups = {ends, experts, rows};
  std::vector<int> counted(32);
  std::vector<std::thread> warp;
  for (int lane = 0; lane < 32; ++lane)
    warp.emplace_back([&, lane] {
      threadIdx.x = lane;
      counted[lane] = aoquant::count_slots<8>(groups);
    });
  for (auto& lane : warp) lane.join();
  return std::ranges::count(counted, counted[0]) == 32 ? counted[0] : -1;
}

// The places of `count` tiles in groups of 8 slots: (count, 2) slot, block of rows of W.
extern "C" void tile_places(int slots, int blocks, int count, int* found) {
  for (int i = 0; i < count; ++i) {
    const aoquant::TilePlace place = aoquant::tile_place<8>(i, slots, blocks);
    found[2 * i] = place.slot, found[2 * i + 1] = place.block;
  }
}

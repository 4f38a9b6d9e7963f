// Encoders of four-over-six and GridFlip: codes, signed e4m3 scales, and the decoded values, in one pass over x.
//
// A thread holds one block of 16 values, so a sum over them is in order; `contest.cuh` says how a block is decided.
#include <cstring>

#include "common.cuh"
#include "contest.cuh"

namespace aoquant {
namespace {

constexpr int THREADS = 256;

// Blocks of threads on a multiprocessor: float32 wants more than 64 registers for a thread.
template <typename T>
constexpr int RESIDENT = sizeof(T) == 4 ? 3 : 4;

struct Shared {
  Entry table[128];
  uint32_t warps[THREADS / 32];
};

// All threads make the tensor's numbers and the table of scales. Numbers that the caller gives need no memory, so they
// are made before the kernel in front has ended.
__device__ __forceinline__ Outer prepare(const Args& p, Shared& shared) {
  uint32_t most = p.known;
  let_next_begin();
  if (p.n_partials) {
    wait_for_inputs();
#pragma unroll 3
    for (int i = threadIdx.x; i < p.n_partials; i += THREADS) most = max(most, uint32_t(p.partials[i]));
    most = __reduce_max_sync(0xFFFFFFFFu, most);
    if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < THREADS / 32; ++j) most = max(most, shared.warps[j]);
  }
  Outer o = make_outer(most);
  if (threadIdx.x < 128) shared.table[threadIdx.x] = make_entry(threadIdx.x, o.down);
  wait_for_inputs();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.outer = o.t;
  __syncthreads();
  return o;
}

// One-dimensional blocks and squared errors. The kernel goes from the end of x to its beginning, because the cache
// still holds what the amax was found in last.
template <typename T, int EFFORT>
__global__ void __launch_bounds__(THREADS, RESIDENT<T>) encode_kernel(const Args p) {
  __shared__ Shared shared;
  Outer o = prepare(p, shared);
  bool rough = can_be_rough(o, p.shift);
  int blocks = int(p.rows * p.groups), stride = gridDim.x * THREADS;
  int block = ((blocks + THREADS - 1) / THREADS - 1 - int(blockIdx.x)) * THREADS + threadIdx.x;
  if (block >= blocks) block -= stride;
  const T* from = static_cast<const T*>(p.x);
  Packed<T> next;
  if (block >= 0) next.load(from + int64_t(block) * 16);
  for (; block >= 0; block -= stride) {
    Packed<T> x = next;
    if (block >= stride) next.load(from + int64_t(block - stride) * 16);
    encode_block<EFFORT>(p, o, rough, shared.table, x, block);
  }
}

// Every option, by the exact contest alone: tiles of 16 x 16, and other metrics. A thread holds a tile, 16 values at a
// time.
template <typename T>
__global__ void __launch_bounds__(THREADS) exact_kernel(const Args p) {
  __shared__ Shared shared;
  Outer o = prepare(p, shared);
  int64_t tiles = (p.rows + p.tile - 1) / p.tile * p.groups, stride = int64_t(gridDim.x) * THREADS;
  for (int64_t tile = int64_t(blockIdx.x) * THREADS + threadIdx.x; tile < tiles; tile += stride) {
    encode_tile<T>(p, o, shared.table, tile);
  }
}

template <typename T>
void launch(Args p, cudaStream_t stream) {
  auto blocks_for = [](int64_t work) { return (work + THREADS - 1) / THREADS; };
  if (p.tile > 1 || p.metric != MSE) {
    launch_early(exact_kernel<T>, int(blocks_for((p.rows + p.tile - 1) / p.tile * p.groups)), THREADS, stream, p);
    return;
  }
  auto kernel = p.effort == FOUR_OVER_SIX ? encode_kernel<T, FOUR_OVER_SIX>
              : p.effort == BASE ? encode_kernel<T, BASE>
              : p.effort == SIDED ? encode_kernel<T, SIDED> : encode_kernel<T, SEARCH>;
  int64_t wanted = blocks_for(p.rows * p.groups), most = int64_t(multiprocessors()) * RESIDENT<T>;
  launch_early(kernel, int(wanted < most ? wanted : most), THREADS, stream, p);
}

// Runs the contest of `formats/contest.py` over x (R, K): codes (R, K / 2), scale (ceil(R / tile), K / 16) bytes, outer
// (1, 1), and values (R, K), or (0, 0) for out = 0. The amax is the largest of `amax`, int32 bits of float32 magnitudes
// (finite_absmax's), and of `known`, which is 0 if the caller knows none.
std::tuple<Tensor, Tensor, Tensor, Tensor> encode_grids(
    const Tensor& x, const Tensor& amax, double known, int64_t effort, int64_t metric, int64_t tile, double c, bool alternating, int64_t out,
    bool operand) {
  check_floats(x, 2);
  STD_TORCH_CHECK(x.size(1) % 16 == 0, "x must be (R, K) with K a multiple of 16");
  check_tensor(amax, "amax", x, ANY_DIMENSIONS, sizeof(int));
  check_type(amax, "amax", {ScalarType::Int});
  STD_TORCH_CHECK(effort >= FOUR_OVER_SIX && effort <= SEARCH && metric >= MSE && metric <= ABSMAX, "effort and metric must be of Effort and Metric");
  STD_TORCH_CHECK(tile > 0 && tile <= 16, "tiles have 1 to 16 rows, got ", tile);
  int64_t rows = x.size(0), k = x.size(1);
  STD_TORCH_CHECK(rows * k / 16 < int64_t(1) << 30, "x must hold fewer than 2^34 values");
  DeviceGuard guard(x.get_device_index());
  const ScalarType type_of_values = values_type(out);
  auto float_bits = [](float v) { uint32_t u; std::memcpy(&u, &v, sizeof u); return u; };
  Tensor codes = make(x, {rows, k / 2}, ScalarType::Byte), scale = make(x, {(rows + tile - 1) / tile, k / 16}, ScalarType::Byte);
  Tensor outer = make(x, {1, 1}, ScalarType::Float), values = out ? make(x, {rows, k}, type_of_values) : make(x, {0, 0}, ScalarType::Byte);

  Args p{static_cast<const int32_t*>(amax.data_ptr()), int(amax.numel()), float_bits(float(known)), x.data_ptr(),
         static_cast<uint8_t*>(codes.data_ptr()), static_cast<uint8_t*>(scale.data_ptr()), static_cast<float*>(outer.data_ptr()),
         values.data_ptr(), int(out), int(operand), rows, int(k / 16), int(effort), int(metric), int(tile), make_shift(c, alternating)};
  auto type = x.scalar_type();
  auto stream = current_stream(x);
  if (type == ScalarType::BFloat16) launch<__nv_bfloat16>(p, stream);
  else if (type == ScalarType::Half) launch<__half>(p, stream);
  else launch<float>(p, stream);
  check_launch();
  return {codes, scale, outer, values};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(aoquant_native, m) {
  m.def(
      "encode_grids(Tensor x, Tensor amax, float known, int effort, int metric, int tile, float c, bool alternating, int out, bool operand) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(aoquant_native, CUDA, m) { m.impl("encode_grids", TORCH_BOX(&encode_grids)); }

}  // namespace aoquant

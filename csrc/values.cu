// The operand that a packed W is, as a GEMM of many rows reads it: decoded in one launch, for the host's sake. Triton's
// decoders (ops/triton) make the same bytes, and take Python five times as long to call.
//
// A thread makes 8 values of a row, 16 bytes, of the 4 or 8 bytes of their codes. The arithmetic is decode.cuh's, whose
// pairs (k, k + 4) are put back into k's order.
#include "common.cuh"
#include "decode.cuh"
#include "decode_op.cuh"
#include "fp8_pairs.cuh"

namespace aoquant {

namespace {

constexpr int THREADS = 256, AHEAD = 4;

template <int F, typename T>
__device__ __forceinline__ uint4 eight(const DecodeArgs& a, int64_t row, int at) {
  using namespace decode;
  DEVICE_ASSERT(row < a.n && at + 8 <= a.k);
  if constexpr (F == FP8) {
    const uint2 w = *reinterpret_cast<const uint2*>(a.codes + row * a.k + at);
    uint32_t low[2], high[2];
    pairs(low, w.x, T());
    pairs(high, w.y, T());
    return make_uint4(low[0], low[1], high[0], high[1]);
  } else {
    const uint32_t w = *reinterpret_cast<const uint32_t*>(a.codes + (row * a.k + at) / 2);
    const uint32_t scales = F == INT4 ? uint32_t(a.k) >> a.group_log2 : uint32_t(a.k) / 32;
    const Scale<T> scale = scale_pairs<F, T>(load_scale<F>(a, (uint32_t(row) >> a.tile_log2) * scales, at, true), a);
    const int half = at / 16 % 2;
    uint32_t v[4];
    operands<F, T>(v, w, scale.s[half], scale.z[half]);
    if constexpr (Folded<F, T>::YES) {
      const uint32_t times = Pair<T>::both(Folded<F, T>::TIMES);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = mul<T>(v[i], times);
    }
    return make_uint4(__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[2], v[3], 0x5410), __byte_perm(v[0], v[1], 0x7632), __byte_perm(v[2], v[3], 0x7632));
  }
}

template <int F, typename T>
__global__ void __launch_bounds__(THREADS) values_kernel(const DecodeArgs a) {
#ifdef AOQUANT_HOPPER
  wait_for_inputs();
  let_next_begin();
  const int64_t total = int64_t(a.n) * (a.k / 8), first = int64_t(blockIdx.x) * THREADS * AHEAD + threadIdx.x;
  uint4* y = static_cast<uint4*>(a.y);
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    const int64_t unit = first + int64_t(i) * THREADS;
    if (unit < total) y[unit] = eight<F, T>(a, unit / (a.k / 8), int(unit % (a.k / 8)) * 8);
  }
#endif
}

template <int F, typename T>
void decode(const DecodeArgs& a, cudaStream_t stream) {
  const int64_t per_block = THREADS * AHEAD, blocks = (int64_t(a.n) * (a.k / 8) + per_block - 1) / per_block;
  launch_early(values_kernel<F, T>, int(blocks), THREADS, stream, a);
  check_launch();
}

template <typename T>
void decode_as(int format, const DecodeArgs& a, cudaStream_t stream) {
  if (format == INT4) decode<INT4, T>(a, stream);
  else if (format == NVFP4) decode<NVFP4, T>(a, stream);
  else if (format == GRIDFLIP) decode<GRIDFLIP, T>(a, stream);
  else if (format == FP8) decode<FP8, T>(a, stream);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) decode<MXFP4, T>(a, stream);
}

// -> (n, k) in the type that the plan says: what the codes are, without the factors of sums.
Tensor decode_values(const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& zero, int64_t packed_plan) {
  const LinearPlan plan(packed_plan);
  const ScalarType type = plan.half ? ScalarType::Half : ScalarType::BFloat16;
  const int64_t n = codes.size(0), k = codes.size(1) * (plan.format == FP8 ? 1 : 2);
  const std::optional<Tensor> none;
  const DecodeWeight w = {codes, scale, zero, none, none};
  check_weight(w, type, k, plan.packing());
  DeviceGuard guard(codes.get_device_index());
  const int64_t size[] = {n, k};
  Tensor values = torch::stable::new_empty(codes, {size, 2}, type);
  DecodeArgs a = arguments(w, k, plan.packing());
  a.y = values.data_ptr();
  if (n == 0) return values;
  if (plan.half) decode_as<__half>(plan.format, a, current_stream(codes));
  else decode_as<__nv_bfloat16>(plan.format, a, current_stream(codes));
  return values;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(aoquant_native, m) { m.def("decode_values(Tensor codes, Tensor scale, Tensor? zero, int plan) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(aoquant_native, CUDA, m) { m.impl("decode_values", TORCH_BOX(&decode_values)); }

}  // namespace aoquant

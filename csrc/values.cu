// The operand that a packed W is, as a GEMM of many rows reads it: decoded in one launch, for the host's sake. Triton's
// decoders (ops/triton) make the same bytes, and take Python five times as long to call.
//
// A thread makes 8 values, 16 bytes, of the 4 or 8 bytes of their codes, in each of some rows that follow one another: it
// asks for the codes and scales of all of them before it decodes the first. A block's threads lie side by side along K, so
// that nothing is divided by K. The arithmetic is decode.cuh's, whose pairs (k, k + 4) are put back into k's order.
#include "common.cuh"
#include "decode.cuh"
#include "decode_op.cuh"
#include "fp8_pairs.cuh"

namespace aoquant {

namespace {

constexpr int THREADS = 256, ROWS = 4;

// The codes of 8 values, and what decodes them.
template <int F>
struct Eight {
  using Codes = std::conditional_t<F == FP8, uint2, uint32_t>;
  Codes codes;
  decode::RawScale scale;  // not of fp8, whose scales are factors of sums
};

template <int F>
__device__ __forceinline__ Eight<F> load_eight(const DecodeArgs& a, int row, int at) {
  DEVICE_ASSERT(row < a.n && at + 8 <= a.k);
  Eight<F> e;
  e.codes = *reinterpret_cast<const typename Eight<F>::Codes*>(a.codes + (int64_t(row) * a.k + at) / (F == FP8 ? 1 : 2));
  if constexpr (F != FP8) {
    const uint32_t scales = F == INT4 ? uint32_t(a.k) >> a.group_log2 : uint32_t(a.k) / 32;
    e.scale = decode::load_scale<F>(a, (uint32_t(row) >> a.tile_log2) * scales, at, true);
  }
  return e;
}

// half: which 16 of a scale's 32 columns these are
template <int F, typename T>
__device__ __forceinline__ uint4 values(const Eight<F>& e, const DecodeArgs& a, int half) {
  using namespace decode;
  if constexpr (F == FP8) {
    uint32_t low[2], high[2];
    pairs(low, e.codes.x, T());
    pairs(high, e.codes.y, T());
    return make_uint4(low[0], low[1], high[0], high[1]);
  } else {
    RawScale raw = e.scale;
    if constexpr (F == NVFP4) raw.s >>= 8 * half;  // then only one of two scales is decoded; GridFlip's differ in more than bytes
    const int of = F == GRIDFLIP ? half : 0;
    const Scale<T> scale = scale_pairs<F, T>(raw, a);
    uint32_t v[4];
    operands<F, T>(v, e.codes, scale.s[of], scale.z[of]);
    if constexpr (Folded<F, T>::YES) {
      const uint32_t times = Pair<T>::both(Folded<F, T>::TIMES);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = mul<T>(v[i], times);
    }
    return make_uint4(__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[2], v[3], 0x5410), __byte_perm(v[0], v[1], 0x7632), __byte_perm(v[2], v[3], 0x7632));
  }
}

// Grid: rows of W along x, whose limit is 2^31, and columns along y.
template <int F, typename T>
__global__ void __launch_bounds__(THREADS) values_kernel(const DecodeArgs a) {
#ifdef AOQUANT_HOPPER
  wait_for_inputs();
  let_next_begin();
  const int first = blockIdx.x * ROWS, at = (blockIdx.y * THREADS + threadIdx.x) * 8;
  if (at >= a.k) return;
  Eight<F> eight[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) eight[i] = load_eight<F>(a, min(first + i, a.n - 1), at);
  uint4* y = static_cast<uint4*>(a.y) + (int64_t(first) * a.k + at) / 8;
#pragma unroll
  for (int i = 0; i < ROWS; ++i, y += a.k / 8)
    if (first + i < a.n) *y = values<F, T>(eight[i], a, at / 16 % 2);
#endif
}

template <int F, typename T>
void decode(const DecodeArgs& a, cudaStream_t stream) {
  constexpr int COLUMNS = THREADS * 8;
  launch_early(values_kernel<F, T>, dim3((a.n + ROWS - 1) / ROWS, (a.k + COLUMNS - 1) / COLUMNS), THREADS, stream, a);
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
  STD_TORCH_CHECK(codes.is_cuda(), "codes must be on a CUDA device");
  check_tensor(codes, "codes", codes, 2);
  const int64_t n = codes.size(0), k = codes.size(1) * (plan.format == FP8 ? 1 : 2);
  const std::optional<Tensor> none;
  const DecodeWeight w = {codes, scale, zero, none, none};
  check_weight(w, type, k, plan.packing(), codes);
  DeviceGuard guard(codes.get_device_index());
  Tensor values = make(codes, {n, k}, type);
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

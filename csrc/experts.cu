// The operator over decode_experts.cuh, expert_tiles.cuh and expert_wide.cuh: y[s] = x[s] W_e^T * alpha_x[s] *
// alpha_w[e], rounded once, where e is the expert of row s. Rows are sorted by expert. Which rows an expert has stays
// on the device, so a CUDA graph takes any routing.
#include "common.cuh"
#include "decode_experts.cuh"
#include "decode_op.cuh"
#include "expert_wide.cuh"

namespace aoquant {

namespace {

using bf16 = __nv_bfloat16;

// like: a tensor of the device.
template <int F>
cudaError_t run(bool many, const DecodeArgs& stack, const Groups& groups, const Tensor& like, cudaStream_t stream) {
  if (!many) return decode::run_experts<F, bf16>(stack, groups, stream);
  if (!decode::wide_takes(stack, groups)) return decode::run_expert_tiles<F, bf16>(stack, groups, stream);
  const Tensor drawn = make(like, {1}, ScalarType::Int);
  return decode::run_expert_wide<F, bf16>(stack, groups, multiprocessors(), static_cast<int*>(drawn.data_ptr()), stream);
}

// x (s, k) bfloat16; ends (experts,) int32; codes (experts * n, k / 2) and the scales and zeros of all experts; alpha_x
// (s, 1), alpha_w (experts * n, 1); many: whether experts have so many rows that wgmma pays. -> y (s, n), zero behind
// the last expert's rows.
Tensor experts_mm(const Tensor& x, const Tensor& ends, const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& zero,
                  const std::optional<Tensor>& alpha_x, const std::optional<Tensor>& alpha_w, int64_t packed_plan, bool many) {
  const LinearPlan plan(packed_plan);
  check_input(x, 2, {ScalarType::BFloat16});
  check_tensor(ends, "ends", x, 1, sizeof(int));
  check_type(ends, "ends", {ScalarType::Int});
  check_tensor(codes, "codes", x, 2);
  const int64_t s = x.size(0), k = x.size(1), experts = ends.numel(), rows = codes.size(0);
  STD_TORCH_CHECK(experts > 0 && rows > 0 && rows % experts == 0, "ends must have as many experts as share the rows of codes evenly");
  for (const auto* alpha : {&alpha_x, &alpha_w}) {
    if (!*alpha) continue;
    const int64_t wanted = alpha == &alpha_x ? s : rows;
    check_alpha(**alpha, "alpha", x, wanted);
    STD_TORCH_CHECK((*alpha)->numel() == wanted, "alpha must be one a row");
  }
  const int64_t n = rows / experts;
  STD_TORCH_CHECK(n % (int64_t(1) << plan.tile_log2) == 0, "experts must have whole tiles of rows that share scales");
  const std::optional<Tensor> none;
  const DecodeWeight w = {codes, scale, zero, alpha_w, none};
  check_weight(w, ScalarType::BFloat16, k, plan.packing(), x);
  DeviceGuard guard(x.get_device_index());
  Tensor y = make(x, {s, n}, ScalarType::BFloat16);
  if (s == 0) return y;
  DecodeArgs stack = arguments(w, k, plan.packing());
  stack.n = int(n);
  stack.x = x.data_ptr(), stack.y = y.data_ptr();
  stack.alpha_x = alpha_x ? static_cast<const float*>(alpha_x->data_ptr()) : nullptr;
  stack.alpha_x_stride = 1, stack.alpha_w_stride = 1;
  const Groups groups = {static_cast<const int*>(ends.data_ptr()), int(experts), int(s)};
  const cudaStream_t stream = current_stream(x);
  cudaError_t error = cudaErrorInvalidValue;
  if (plan.format == INT4) error = run<INT4>(many, stack, groups, x, stream);
  if (plan.format == NVFP4) error = run<NVFP4>(many, stack, groups, x, stream);
  if (plan.format == MXFP4) error = run<MXFP4>(many, stack, groups, x, stream);
  if (plan.format == GRIDFLIP) error = run<GRIDFLIP>(many, stack, groups, x, stream);
  STD_TORCH_CHECK(error == cudaSuccess, "the experts' CUDA launch failed: ", cudaGetErrorString(error));
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(aoquant_native, m) {
  m.def(
      "experts_mm(Tensor x, Tensor ends, Tensor codes, Tensor scale, Tensor? zero, Tensor? alpha_x, Tensor? alpha_w, int plan, bool many) -> "
      "Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(aoquant_native, CUDA, m) { m.impl("experts_mm", TORCH_BOX(&experts_mm)); }

}  // namespace aoquant

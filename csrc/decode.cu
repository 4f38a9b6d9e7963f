// The operator over decode.cuh, decode_rows.cuh and decode_tiles.cuh: y = x W^T * alpha_x * alpha_w + bias, rounded
// once, W packed in 4 bits.
//
// decode_plan.cuh says which kernel runs.
#include "common.cuh"
#include "decode_call.cuh"

namespace aoquant {

namespace {

template <int F>
cudaError_t run_as(const DecodeCall& c, ScalarType type) {
  return type == ScalarType::BFloat16 ? run<F, __nv_bfloat16>(c) : run<F, __half>(c);
}

const void* pointer(const std::optional<Tensor>& t) { return t ? t->data_ptr() : nullptr; }

void check(const Tensor& t, const char* name, int align) {
  STD_TORCH_CHECK(t.is_cuda() && t.is_contiguous() && reinterpret_cast<uintptr_t>(t.data_ptr()) % align == 0, name,
                  " must be contiguous, on a CUDA device and aligned to ", align, " bytes");
}

void check_alpha(const std::optional<Tensor>& t, const char* name, int64_t rows) {
  if (!t) return;
  check(*t, name, 4);
  STD_TORCH_CHECK(t->scalar_type() == ScalarType::Float && (t->numel() == 1 || t->numel() == rows), name, " must be float32, one or one a row");
}

int log2_of(int64_t v) {
  int log2 = 0;
  while ((int64_t(1) << log2) < v) ++log2;
  STD_TORCH_CHECK((int64_t(1) << log2) == v, "a power of two is needed, got ", v);
  return log2;
}

// format: `Format` of decode_call.cuh. codes (n, k / 2) uint8; scale, zero: what the format stores, FP4 scales as
//     bytes; tile: rows of W
// that share a row of scales; shift, odd_shift: GridFlip's c of even and odd blocks. y (m, n) in x's dtype.
Tensor decode_mm(const Tensor& x, const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& zero,
                 const std::optional<Tensor>& alpha_x, const std::optional<Tensor>& alpha_w, const std::optional<Tensor>& bias, int64_t format,
                 int64_t group, int64_t tile, double shift, double odd_shift) {
  const int64_t m = x.size(0), k = x.size(1), n = codes.size(0);
  const auto type = x.scalar_type();
  check(x, "x", 16);
  check(codes, "codes", 16);
  check(scale, "scale", 2);
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Half, "x must be bfloat16 or float16");
  STD_TORCH_CHECK(k % 32 == 0 && codes.size(1) == k / 2 && k % group == 0 && m > 0, "codes must be (n, k / 2), and k a multiple of 32 and of the group");
  STD_TORCH_CHECK(scale.numel() == (n + tile - 1) / tile * (k / group), "scale must be (n / tile, k / group)");
  if (format == INT4) {
    STD_TORCH_CHECK(group >= 32, "groups have at least 32 values");
    STD_TORCH_CHECK(zero && zero->numel() == scale.numel() && scale.scalar_type() == type && zero->scalar_type() == type && tile == 1,
                    "scale and zero must be (n, k / group) in x's type");
    check(*zero, "zero", 2);
  }
  check_alpha(alpha_x, "alpha_x", m);
  check_alpha(alpha_w, "alpha_w", n);
  if (bias) {
    check(*bias, "bias", 2);
    STD_TORCH_CHECK(bias->numel() == n && (bias->scalar_type() == type || bias->scalar_type() == ScalarType::Float), "bias must be (n,) in x's type or float32");
  }
  DeviceGuard guard(x.get_device_index());
  Tensor y = torch::stable::new_empty(x, {m, n});
  // x as decode_tiles.cuh wants it, for whichever kernel it is
  const int64_t tokens = m <= 64 ? 64 : (m + 255) / 256 * 256;
  Tensor image = torch::stable::new_empty(x, {decode_is_few(m) ? 1 : tokens * ((k + 127) / 128) * 256}, ScalarType::Byte);
  DecodeCall call = {};
  DecodeArgs& a = call.args;
  a.codes = static_cast<const uint8_t*>(codes.data_ptr());
  a.scale = scale.data_ptr();
  a.zero = pointer(zero);
  a.x = x.data_ptr();
  a.alpha_x = static_cast<const float*>(pointer(alpha_x));
  a.alpha_w = static_cast<const float*>(pointer(alpha_w));
  a.bias = pointer(bias);
  a.y = y.data_ptr();
  a.m = int(m), a.n = int(n), a.k = int(k), a.group_log2 = log2_of(group), a.tile_log2 = log2_of(tile);
  a.alpha_x_stride = alpha_x && alpha_x->numel() > 1;
  a.alpha_w_stride = alpha_w && alpha_w->numel() > 1;
  a.bias_is_float = bias && bias->scalar_type() == ScalarType::Float;
  a.shift = float(shift), a.odd_shift = float(odd_shift);
  call.image = static_cast<uint8_t*>(image.data_ptr());
  call.stream = current_stream(x);
  cudaError_t error = cudaErrorInvalidValue;
  if (format == INT4) error = run_as<INT4>(call, type);
  if (format == NVFP4) error = run_as<NVFP4>(call, type);
  if (format == MXFP4 && type == ScalarType::BFloat16) error = run<MXFP4, __nv_bfloat16>(call);
  if (format == GRIDFLIP) error = run_as<GRIDFLIP>(call, type);
  STD_TORCH_CHECK(error == cudaSuccess, "decode_mm: CUDA launch failed: ", cudaGetErrorString(error));
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(aoquant_native, m) {
  m.def(
      "decode_mm(Tensor x, Tensor codes, Tensor scale, Tensor? zero, Tensor? alpha_x, Tensor? alpha_w, Tensor? bias, int format, int group, "
      "int tile, float shift, float odd_shift) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(aoquant_native, CUDA, m) { m.impl("decode_mm", TORCH_BOX(&decode_mm)); }

}  // namespace aoquant

// The operator over decode.cuh, decode_rows.cuh, decode_fp8.cu, decode_once.cuh and decode_tiles.cuh: y = x W^T *
// alpha_x * alpha_w + bias, rounded once, with W packed in 4 bits or in fp8. The operator that encodes x as well is in
// linear.cu. decode_plan.cuh chooses the kernel.
#include "common.cuh"
#include "decode_op.cuh"

namespace aoquant {

namespace {

template <int F>
cudaError_t run_as(const DecodeCall& c, ScalarType type) {
  return type == ScalarType::BFloat16 ? run<F, __nv_bfloat16>(c) : run<F, __half>(c);
}

const void* pointer(const std::optional<Tensor>& t) { return t ? t->data_ptr() : nullptr; }

int log2_of(int64_t v) {
  int log2 = 0;
  while ((int64_t(1) << log2) < v) ++log2;
  STD_TORCH_CHECK((int64_t(1) << log2) == v, "a power of two is needed, got ", v);
  return log2;
}

}  // namespace

void check_weight(const DecodeWeight& w, ScalarType type, int64_t k, const DecodePlan& plan, const Tensor& beside) {
  const int64_t format = plan.format, group = plan.group, tile = plan.tile;
  STD_TORCH_CHECK(format >= INT4 && format <= FP8 && group > 0 && tile > 0, "the plan must name a Format, and groups and tiles of at least 1");
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Half, "x must be bfloat16 or float16");
  check_tensor(w.codes, "codes", beside, 2, 16);
  check_bytes(w.codes, "codes");
  check_tensor(w.scale, "scale", beside, ANY_DIMENSIONS, 2);
  const int64_t n = w.codes.size(0);
  STD_TORCH_CHECK(k % 32 == 0 && w.codes.size(1) == (format == FP8 ? k : k / 2) && k % group == 0,
                  "codes must be (n, k / 2), or (n, k) of fp8, and k a multiple of 32 and of the group");
  STD_TORCH_CHECK(format == FP8 || w.scale.numel() == (n + tile - 1) / tile * (k / group), "scale must be (n / tile, k / group)");
  if (format != FP8 && format != INT4) check_bytes(w.scale, "scale");
  STD_TORCH_CHECK(format != MXFP4 || type == ScalarType::BFloat16, "e8m0 scales are multiplied in bfloat16");
  if (format == INT4) {
    STD_TORCH_CHECK(group >= 32, "groups have at least 32 values");
    STD_TORCH_CHECK(w.zero && w.zero->numel() == w.scale.numel() && w.scale.scalar_type() == type && w.zero->scalar_type() == type && tile == 1,
                    "scale and zero must be (n, k / group) in x's type");
    check_tensor(*w.zero, "zero", beside, ANY_DIMENSIONS, 2);
  }
  if (w.alpha) check_alpha(*w.alpha, "alpha_w", beside, n);
  if (w.bias) {
    check_tensor(*w.bias, "bias", beside, ANY_DIMENSIONS, 2);
    STD_TORCH_CHECK(w.bias->numel() == n && (w.bias->scalar_type() == type || w.bias->scalar_type() == ScalarType::Float),
                    "bias must be (n,) in x's type or float32");
  }
}

DecodeArgs arguments(const DecodeWeight& w, int64_t k, const DecodePlan& plan) {
  DecodeArgs a = {};
  a.codes = static_cast<const uint8_t*>(w.codes.data_ptr());
  a.scale = w.scale.data_ptr();
  a.zero = pointer(w.zero);
  a.alpha_w = static_cast<const float*>(pointer(w.alpha));
  a.alpha_w_stride = w.alpha && w.alpha->numel() > 1;
  a.bias = pointer(w.bias);
  a.bias_is_float = w.bias && w.bias->scalar_type() == ScalarType::Float;
  a.n = int(w.codes.size(0)), a.k = int(k), a.group_log2 = log2_of(plan.group), a.tile_log2 = log2_of(plan.tile);
  a.shift = float(plan.shift), a.odd_shift = float(plan.odd_shift);
  return a;
}

namespace {

// Launches the kernel of a call whose arguments are complete.
void launch(DecodeCall& call, int64_t format, const Tensor& like) {
  const auto type = like.scalar_type();
  const int64_t m = call.args.m, k = call.args.k;
  std::optional<Tensor> image;
  if (decode_reorders(int(format), m, call.args.encodes)) {  // x as decode_tiles.cuh wants it, for whichever kernel it is
    const int64_t tokens = m <= 64 ? 64 : (m + 255) / 256 * 256;
    image = make(like, {tokens * ((k + 127) / 128 * 256 + 4)}, ScalarType::Byte);
    call.image = static_cast<uint8_t*>(image->data_ptr());
  }
  cudaError_t error = cudaErrorInvalidValue;
  if (format == INT4) error = run_as<INT4>(call, type);
  if (format == NVFP4) error = run_as<NVFP4>(call, type);
  if (format == MXFP4 && type == ScalarType::BFloat16) error = run<MXFP4, __nv_bfloat16>(call);
  if (format == GRIDFLIP) error = run_as<GRIDFLIP>(call, type);
  if (format == FP8) error = run_as<FP8>(call, type);
  if (error != cudaSuccess) cudaGetLastError();  // reported here, and not by the next call of another library too
  STD_TORCH_CHECK(error == cudaSuccess, "the product's CUDA launch failed: ", cudaGetErrorString(error));
}

bool packed_alike(const DecodeProduct& a, const DecodeProduct& b) {
  return a.plan.format == b.plan.format && a.plan.group == b.plan.group && a.plan.tile == b.plan.tile;
}

// Whether two W's may share a launch: each would be multiplied by the same kernel if it came alone.
bool alike(const DecodeProduct& a, const DecodeProduct& b, int64_t m, int64_t k) {
  const int format = int(a.plan.format);
  const int64_t n = a.w.codes.size(0), other = b.w.codes.size(0);
  if (!packed_alike(a, b) || n == other) return packed_alike(a, b);
  return decode_takes_siblings(format, m, other, k) && decode_cut(format, m, n, k) == decode_cut(format, m, other, k);
}

}  // namespace

void decode_into(const DecodeProduct* products, int64_t count, const Tensor& like, const void* x, int64_t m, int64_t k, const Alpha& alpha_x,
                 bool encodes) {
  int64_t next = 0;
  while (next < count) {
    DecodeArgs args[SIBLINGS];
    int64_t taken = 0;
    const DecodeProduct& first = products[next];
    const int64_t format = first.plan.format, n = first.w.codes.size(0);
    const int64_t most = decode_takes_siblings(int(format), m, n, k) ? SIBLINGS : 1;
    while (taken < most && next + taken < count && alike(first, products[next + taken], m, k)) {
      const DecodeProduct& p = products[next + taken];
      DecodeArgs& a = args[taken];
      a = arguments(p.w, k, p.plan);
      a.x = x;
      a.alpha_x = alpha_x.of;
      a.alpha_x_stride = alpha_x.rows;
      a.y = p.y.data_ptr();
      a.m = int(m);
      a.encodes = encodes;
      if (taken > 0) args[taken - 1].sibling = &a;
      ++taken;
    }
    DecodeCall call = {args[0], nullptr, current_stream(like)};
    launch(call, format, like);
    next += taken;
  }
}

namespace {

// y (m, n) in x's dtype.
Tensor decode_mm(const Tensor& x, const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& zero,
                 const std::optional<Tensor>& alpha_x, const std::optional<Tensor>& alpha_w, const std::optional<Tensor>& bias, int64_t format,
                 int64_t group, int64_t tile, double shift, double odd_shift) {
  check_input(x, 2, {ScalarType::BFloat16, ScalarType::Half});
  check_tensor(codes, "codes", x, 2);
  const int64_t m = x.size(0), n = codes.size(0);
  STD_TORCH_CHECK(m > 0, "x must have rows");
  if (alpha_x) check_alpha(*alpha_x, "alpha_x", x, m);
  const DecodeWeight w = {codes, scale, zero, alpha_w, bias};
  const DecodePlan plan = {format, group, tile, shift, odd_shift};
  check_weight(w, x.scalar_type(), x.size(1), plan, x);
  DeviceGuard guard(x.get_device_index());
  Tensor y = make(x, {m, n}, x.scalar_type());
  const Alpha rows = {static_cast<const float*>(pointer(alpha_x)), alpha_x && alpha_x->numel() > 1};
  const DecodeProduct product = {y, w, plan};
  decode_into(&product, 1, x, x.data_ptr(), m, x.size(1), rows);
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

// Operators on CPU tensors: checks, the level of instructions, and rows of W spread over torch's threads.
//
// LibTorch is seen through its stable ABI, as csrc's CUDA library sees it. `aoquant/ops/native_cpu.py` loads this one.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdlib>
#include <cstring>
#include <optional>
#include <tuple>

#include "arguments.h"
#include "kernels.h"

namespace aoquant::cpu {

namespace {

constexpr int64_t STRIP = 16;         // rows of W that a thread takes at least
constexpr int64_t WORK = 1 << 17;     // multiplications that are worth another thread
constexpr int64_t FEW_VALUES = 1 << 14;  // of x, which need no memory from torch
constexpr int64_t LONGEST = 1 << 16;  // K of integer sums: 255 * 128 * K stays within int32

bool bfloat16(const Tensor& t) { return t.scalar_type() == ScalarType::BFloat16; }

void check_matrix(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_cpu(), name, " must be on a CPU");
  check_tensor(t, name, t, 2);
}

void check_floats(const Tensor& t, const char* name) { check_type(t, name, {ScalarType::BFloat16, ScalarType::Float}); }

// The kernels for this machine, or for AVX2 where ATEN_CPU_CAPABILITY holds PyTorch's own below AVX-512.
const Kernels* kernels() {
  static const Kernels* const found = []() -> const Kernels* {
#if defined(__x86_64__)
    const char* asked = getenv("ATEN_CPU_CAPABILITY");
    const bool lower = asked && (!strcmp(asked, "avx2") || !strcmp(asked, "default"));
    const auto has = [](auto... answers) { return (answers && ...); };
    if (!lower && has(__builtin_cpu_supports("avx512f"), __builtin_cpu_supports("avx512bw"), __builtin_cpu_supports("avx512dq"), __builtin_cpu_supports("avx512vl"), __builtin_cpu_supports("avx512vnni"))) return &avx512::KERNELS;
    return has(__builtin_cpu_supports("avx2"), __builtin_cpu_supports("fma")) ? &baseline::KERNELS : nullptr;
#else
    return &baseline::KERNELS;
#endif
  }();
  return found;
}

const Kernels& chosen() {
  STD_TORCH_CHECK(kernels(), "this CPU has no AVX2");
  return *kernels();
}

// 0: no kernels for this CPU; 1: AVX2, or whatever a CPU that is no x86 has; 2: AVX-512 with VNNI
int64_t level() {
#if defined(__x86_64__)
  if (kernels() == &avx512::KERNELS) return 2;
#endif
  return kernels() != nullptr;
}

Weight weight(const Tensor& codes, const std::optional<Tensor>& scale, const std::optional<Tensor>& zero, int64_t kind, int64_t group) {
  check_matrix(codes, "codes");
  STD_TORCH_CHECK(kind >= INT4 && kind <= INT8, "kind must be one of Kind");
  check_bytes(codes, "codes");
  const int64_t n = codes.size(0), k = codes.size(1) * (kind == INT8 ? 1 : 2);
  STD_TORCH_CHECK(k > 0 && k % 32 == 0, "K must be a multiple of 32");
  Weight w = {Kind(kind), false, static_cast<const uint8_t*>(codes.data_ptr()), nullptr, nullptr, n, k, group, 0};
  if (kind == INT8) return w;
  STD_TORCH_CHECK(group > 0 && group % 32 == 0 && k % group == 0, "groups must be multiples of 32 that divide K");
  w.groups = k / group;
  STD_TORCH_CHECK(scale.has_value(), "codes of 4 bits have scales");
  const auto check = [&](const Tensor& t, const char* name) {
    check_matrix(t, name);
    STD_TORCH_CHECK(t.size(0) == n && t.size(1) == k / group, name, " must be (N, K / group)");
  };
  check(*scale, "scale"), check_floats(*scale, "scale");
  w.bfloat16 = bfloat16(*scale), w.scale = scale->data_ptr();
  STD_TORCH_CHECK(kind != INT4 || zero.has_value(), "int4 codes have zeros");
  if (zero) {
    check(*zero, "zero");
    STD_TORCH_CHECK(zero->scalar_type() == (kind == INT4 ? scale->scalar_type() : ScalarType::Char), "zero is in the scale's type, or int8");
    w.zero = zero->data_ptr();
  }
  return w;
}

Epilogue epilogue(const Tensor& y, const std::optional<Tensor>& alpha_x, const std::optional<Tensor>& alpha_w, const std::optional<Tensor>& bias) {
  Epilogue e = {y.data_ptr(), bfloat16(y), false, nullptr, nullptr, 0, 0, nullptr};
  const auto alpha = [&](const std::optional<Tensor>& t, const char* name, int64_t rows, const float*& p, int64_t& step) {
    if (!t) return;
    check_alpha(*t, name, y, rows);
    p = static_cast<const float*>(t->data_ptr()), step = t->numel() > 1;
  };
  alpha(alpha_x, "alpha_x", y.size(0), e.alpha_x, e.alpha_x_step);
  alpha(alpha_w, "alpha_w", y.size(1), e.alpha_w, e.alpha_w_step);
  if (bias) {
    check_floats(*bias, "bias");
    check_tensor(*bias, "bias", y, ANY_DIMENSIONS);
    STD_TORCH_CHECK(bias->numel() == y.size(1), "bias must have N values");
    e.bias = bias->data_ptr(), e.bias_bfloat16 = bfloat16(*bias);
  }
  return e;
}

// f(from, to) for strips of W's rows, on as many threads as `work` multiplications a row are worth.
template <typename F>
void over_rows(int64_t n, int64_t work, const F& f) {
  if (n == 0 || work == 0) return;
  const int64_t strips = (n + STRIP - 1) / STRIP, grain = WORK / (STRIP * work) + 1;
  torch::stable::parallel_for(0, strips, grain, [&](int64_t from, int64_t to) { f(from * STRIP, to * STRIP < n ? to * STRIP : n); });
}

// y (M, N), in x's type, of x (M, K) and a packed W.
Tensor decode_mm(const Tensor& x, const Tensor& codes, const std::optional<Tensor>& scale, const std::optional<Tensor>& zero, const std::optional<Tensor>& alpha_x,
                 const std::optional<Tensor>& alpha_w, const std::optional<Tensor>& bias, int64_t kind, int64_t group) {
  const Weight w = weight(codes, scale, zero, kind, group);
  check_matrix(x, "x"), check_floats(x, "x");
  STD_TORCH_CHECK(x.size(1) == w.k, "x must be (M, K)");
  const int64_t m = x.size(0);
  Tensor y = make(x, {m, w.n}, x.scalar_type());
  const Epilogue e = epilogue(y, alpha_x, alpha_w, bias);
  const Kernels& run = chosen();
  alignas(64) static thread_local float few[FEW_VALUES];  // asking torch for memory takes as long as a small layer
  const std::optional<Tensor> many = m * w.k > FEW_VALUES ? std::optional(make(x, {m, w.k}, ScalarType::Float)) : std::nullopt;
  float* const values = many ? static_cast<float*>(many->data_ptr()) : few;
  run.arrange(x.data_ptr(), bfloat16(x), w.kind != INT8, m * w.k, values);
  over_rows(w.n, m * w.k, [&](int64_t from, int64_t to) { run.products(w, values, m, from, to, e); });
  return y;
}

// y (M, N), bfloat16 or else float32, of x (M, K) and W (N, K), both int8: their sums in int32.
Tensor integer_mm(const Tensor& x, const Tensor& codes, const std::optional<Tensor>& alpha_x, const std::optional<Tensor>& alpha_w, const std::optional<Tensor>& bias, bool to_bfloat16) {
  const Weight w = weight(codes, std::nullopt, std::nullopt, INT8, 0);
  check_matrix(x, "x");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Char && x.size(1) == w.k && w.k <= LONGEST, "x must be int8, (M, K), and K at most 65536");
  Tensor y = make(x, {x.size(0), w.n}, to_bfloat16 ? ScalarType::BFloat16 : ScalarType::Float);
  const Epilogue e = epilogue(y, alpha_x, alpha_w, bias);
  const Kernels& run = chosen();
  over_rows(w.n, (x.size(0) * w.k + 3) / 4, [&](int64_t from, int64_t to) { run.integer_products(w, static_cast<const int8_t*>(x.data_ptr()), x.size(0), from, to, e); });
  return y;
}

// What the GEMM multiplies of W, (N, K), bfloat16 (where the scales are, or W is INT8) or float32.
Tensor decode(const Tensor& codes, const std::optional<Tensor>& scale, const std::optional<Tensor>& zero, int64_t kind, int64_t group, bool to_bfloat16) {
  const Weight w = weight(codes, scale, zero, kind, group);
  STD_TORCH_CHECK(!to_bfloat16 || w.bfloat16 || w.kind == INT8, "float32 scales make float32 values");
  Tensor out = make(codes, {w.n, w.k}, to_bfloat16 ? ScalarType::BFloat16 : ScalarType::Float);
  const Kernels& run = chosen();
  over_rows(w.n, w.k, [&](int64_t from, int64_t to) { run.values(w, from, to, out.data_ptr(), to_bfloat16); });
  return out;
}

// x (M, K) as int8 with a scale a row: codes (M, K), scale (M, 1), zero (M, 1) or (0, 0), and the operand, (M, K) in x's type, or (0, 0).
std::tuple<Tensor, Tensor, Tensor, Tensor> encode_int8_rows(const Tensor& x, bool asymmetric, bool operand) {
  check_matrix(x, "x"), check_floats(x, "x");
  const int64_t m = x.size(0), k = x.size(1);
  STD_TORCH_CHECK(k > 0, "x must have values");
  Tensor codes = make(x, {m, k}, ScalarType::Char), scale = make(x, {m, 1}, ScalarType::Float);
  Tensor zero = make(x, {asymmetric ? m : 0, asymmetric ? 1 : 0}, ScalarType::Char), values = make(x, {operand ? m : 0, operand ? k : 0}, x.scalar_type());
  const Kernels& run = chosen();
  torch::stable::parallel_for(0, m, WORK / 4 / k + 1, [&](int64_t from, int64_t to) {
    run.encode_rows(x.data_ptr(), bfloat16(x), asymmetric, from, to, k, static_cast<int8_t*>(codes.data_ptr()), static_cast<float*>(scale.data_ptr()),
                    asymmetric ? static_cast<int8_t*>(zero.data_ptr()) : nullptr, operand ? values.data_ptr() : nullptr);
  });
  return {codes, scale, zero, values};
}

// x (N, K) as int4 in groups: codes (N, K / 2), scale and zero (N, K / group) in x's type.
std::tuple<Tensor, Tensor, Tensor> encode_int4(const Tensor& x, int64_t group) {
  check_matrix(x, "x"), check_floats(x, "x");
  const int64_t n = x.size(0), k = x.size(1);
  STD_TORCH_CHECK(k > 0 && group > 0 && group % 32 == 0 && k % group == 0, "groups must be multiples of 32 that divide K");
  Tensor codes = make(x, {n, k / 2}, ScalarType::Byte), scale = make(x, {n, k / group}, x.scalar_type()), zero = make(x, {n, k / group}, x.scalar_type());
  const Kernels& run = chosen();
  over_rows(n, k, [&](int64_t from, int64_t to) { run.encode_int4(x.data_ptr(), bfloat16(x), from, to, k, group, static_cast<uint8_t*>(codes.data_ptr()), scale.data_ptr(), zero.data_ptr()); });
  return {codes, scale, zero};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(aoquant_cpu, m) {
  m.def("level() -> int");
  m.def("decode_mm(Tensor x, Tensor codes, Tensor? scale, Tensor? zero, Tensor? alpha_x, Tensor? alpha_w, Tensor? bias, int kind, int group) -> Tensor");
  m.def("integer_mm(Tensor x, Tensor codes, Tensor? alpha_x, Tensor? alpha_w, Tensor? bias, bool to_bfloat16) -> Tensor");
  m.def("decode(Tensor codes, Tensor? scale, Tensor? zero, int kind, int group, bool to_bfloat16) -> Tensor");
  m.def("encode_int8_rows(Tensor x, bool asymmetric, bool operand) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("encode_int4(Tensor x, int group) -> (Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(aoquant_cpu, CompositeExplicitAutograd, m) {
  m.impl("level", TORCH_BOX(&level));
}
STABLE_TORCH_LIBRARY_IMPL(aoquant_cpu, CPU, m) {
  m.impl("decode_mm", TORCH_BOX(&decode_mm));
  m.impl("integer_mm", TORCH_BOX(&integer_mm));
  m.impl("decode", TORCH_BOX(&decode));
  m.impl("encode_int8_rows", TORCH_BOX(&encode_int8_rows));
  m.impl("encode_int4", TORCH_BOX(&encode_int4));
}

}  // namespace aoquant::cpu

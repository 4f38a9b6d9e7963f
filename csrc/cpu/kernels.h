// The kernels as the library calls them: one table of functions for each level of instructions. Arguments are checked
// by library.cpp. Shapes: x (m, k), w (n, k), y (m, n); g = k / group scales in a row.
#pragma once

#include <cstdint>

namespace aoquant::cpu {

enum Kind : int64_t { INT4 = 0, INTX4 = 1, INT8 = 2 };  // aoquant/ops/native_cpu.py names them too

// How codes become what the GEMM multiplies. bfloat16: of scales and of the values' rounding; else float32.
//   INT4   two's complement nibbles q: round(q s + z), rounded once
//   INTX4  nibbles q + 8: round((q - z) s), z int8 or missing
//   INT8   bytes q, no scale
struct Weight {
  Kind kind;
  bool bfloat16;
  const uint8_t* codes;
  const void *scale, *zero;
  int64_t n, k, group, groups;  // values that share a scale; groups in a row
};

// y = sums * alpha_x * alpha_w + bias, rounded once. alphas: one number where their step is 0.
struct Epilogue {
  void* y;
  bool bfloat16, bias_bfloat16;
  const float *alpha_x, *alpha_w;
  int64_t alpha_x_step, alpha_w_step;
  const void* bias;
};

struct Kernels {
  // x (m, k), bfloat16 or float32, as `products` reads it, float32
  void (*arrange)(const void* x, bool bfloat16, bool nibbles, int64_t values, float* arranged);
  // y of rows [from, to) of w
  void (*products)(const Weight& w, const float* arranged, int64_t m, int64_t from, int64_t to, const Epilogue& e);
  // the same of integers: sums in int32; w INT8
  void (*integer_products)(const Weight& w, const int8_t* x, int64_t m, int64_t from, int64_t to, const Epilogue& e);
  // values (n, k) of rows [from, to), float32 or bfloat16
  void (*values)(const Weight& w, int64_t from, int64_t to, void* out, bool bfloat16);
  // rows of x as int8 with a scale each: codes (m, k), scale (m), zero (m) if `asymmetric`; operand (m, k) in x's type, q - z, unless null
  void (*encode_rows)(const void* x, bool bfloat16, bool asymmetric, int64_t from, int64_t to, int64_t k, int8_t* codes, float* scale, int8_t* zero, void* operand);
  // rows of x as int4 in groups: codes (m, k / 2), scale and zero (m, g) in x's type
  void (*encode_int4)(const void* x, bool bfloat16, int64_t from, int64_t to, int64_t k, int64_t group, uint8_t* codes, void* scale, void* zero);
};

namespace avx512 {
extern const Kernels KERNELS;
}
namespace baseline {
extern const Kernels KERNELS;
}

}  // namespace aoquant::cpu

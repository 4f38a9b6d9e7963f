// NVFP4 with searched block scales on the device: one block of 16 values, as `formats/search.py` defines it, bit for
// bit.
//
// Thirteen scales are tried exactly, in the reference's order, at eight instructions for each value and scale. Codes
// times their scale are exact products, so a fused operation subtracts y from one. The quotient (1 / t) / s of each of
// the 119 scales is made once, in a table.
#pragma once

#include "check.cuh"
#include "grids.cuh"

namespace aoquant {

// A call: blocks of 16 values, one after the other. outer: t, or null.
struct SearchArgs {
  const void* x;
  const float* outer;
  uint8_t* codes;
  uint8_t* scale;
  void* values;
  int out;      // Out
  int operand;  // values without t
  int blocks;
};

struct __align__(8) SearchEntry {
  float inverse, s;  // (1 / t) / s, and s
};

// e4m3 bytes of 2^-6 and 448; the number of codes tried below and above the usual one
constexpr int LOWEST = 0x08, HIGHEST = 0x7E, DOWN = 4, UP = 8;

__device__ __forceinline__ SearchEntry make_search_entry(uint32_t code, float inverse) {
  float s = code == 0x7Fu ? NAN : e4m3_value(code);
  return {__fdiv_rn(inverse, s), s};
}

template <typename T>
__device__ __forceinline__ void search_block(const SearchArgs& p, float t, float inverse, const SearchEntry* table, const Packed<T>& in, int64_t block) {
  float x[16], y[16], a = in.amax(), ratio = __fmul_rn(a, 1.0f / 6.0f);
  in.unpack(x);
  if (p.outer) ratio = __fdiv_rn(ratio, t);
  bool finite = a < INFINITY && ratio == ratio;
  int usual = finite ? int(e4m3(fminf(fmaxf(ratio, 0x1p-6f), 448.0f))) : 0x7F, best = usual;
#pragma unroll
  for (int k = 0; k < 16; ++k) y[k] = fabsf(__fmul_rn(x[k], inverse));

  float least = INFINITY;
#pragma unroll 1
  for (int i = -1; finite && i <= DOWN + UP; ++i) {
    if (i == DOWN) continue;  // the usual one again, whose error is not less than its own
    int code = i < 0 ? usual : min(max(usual + i - DOWN, LOWEST), HIGHEST);
    SearchEntry entry = table[code];
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      float q = nearest_magnitude(fminf(fabsf(__fmul_rn(x[k], entry.inverse)), 6.0f)), d = __fmaf_rn(q, entry.s, -y[k]);
      total = __fadd_rn(total, __fmul_rn(d, d));
    }
    if (i < 0 || total < least) least = total, best = code;
  }

  DEVICE_ASSERT(block >= 0 && block < p.blocks && best >= LOWEST && best < 128);
  SearchEntry entry = table[best];
  uint2 packed = encode16<false, true>(x, entry.inverse, 1.0f, 0.0f);
  p.scale[block] = uint8_t(best);
  reinterpret_cast<uint2*>(p.codes)[block] = finite ? packed : make_uint2(0, 0);
  if (p.out == NO_VALUES) return;
  float s = p.operand || !p.outer ? entry.s : __fmul_rn(t, entry.s);
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    float z = __fmul_rn(x[k], entry.inverse);
    x[k] = __fmul_rn(copysignf(nearest_magnitude(fminf(fabsf(z), 6.0f)), z), s);
  }
  store_values(p.values, block * 16, x, p.out);
}

}  // namespace aoquant

// Four-over-six and GridFlip on the device: one block of 16 values, as `formats/contest.py` defines it, bit for bit.
//
// Everything here is the reference's float32 arithmetic in the reference's order, but for two replacements that are
// proven equal. Division by 6 and by 1536 is a product and a fused multiply-add (Brisebarre, Muller & Raina,
// "Accelerating correctly rounded floating-point division when the divisor is known in advance", 2004; for both
// divisors checked against all 2^23 significands). The inverses of the 127 scales are made once, in a table.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cfloat>
#include <cstdint>

namespace aoquant {

enum Effort { FOUR_OVER_SIX = 0, BASE = 1, SIDED = 2, SEARCH = 3 };
enum Metric { MSE = 0, MAE = 1, ABSMAX = 2 };

// A whole tensor's or a row's numbers, as `contest.Outer`: amax, up = 1536 / amax and down = 1 / up of x * power; t
// multiplies decoded values.
struct Outer {
  float amax, up, down, t, power;
};

// from this magnitude on a block saturates every scale; the divisions below want it finite
constexpr float LARGE = 0x1p100f;

// Numbers that the host makes: f6 = 6 + c and so on, with their rounded reciprocals. alternating: blocks of odd index
// along K take -c.
struct Shift {
  float c, f6, f4, p6, p4, r6, r4, q6, q4;
  int alternating;
};

inline Shift make_shift(double shift, bool alternating) {
  float c = float(shift);
  auto sum = [c](double v, double sign) { return float(v + sign * double(c)); };
  Shift h{c, sum(6, 1), sum(4, 1), sum(6, -1), sum(4, -1), 0, 0, 0, 0, alternating};
  h.r6 = 1.0f / h.f6, h.r4 = 1.0f / h.f4, h.q6 = 1.0f / h.p6, h.q4 = 1.0f / h.p4;
  return h;
}

__device__ __forceinline__ Outer make_outer(uint32_t amax_bits) {
  float amax = __uint_as_float(amax_bits);
  amax = amax == 0.0f ? 1536.0f : fmaxf(amax, 0x1p-133f);
  Outer o;
  o.t = __fdiv_rn(amax, 1536.0f);
  o.power = amax < 0x1p-60f ? 0x1p100f : amax > 0x1p60f ? 0x1p-100f : 1.0f;
  o.amax = amax * o.power;
  o.up = __fdiv_rn(1536.0f, o.amax);
  o.down = __frcp_rn(o.up);
  return o;
}

__device__ __forceinline__ float over_6(float a) { return __fmaf_rn(a, 1.0f / 6.0f, __fmul_rn(a, float(1.0 / 6.0 - double(1.0f / 6.0f)))); }
__device__ __forceinline__ float over_1536(float p) {
  return __fmaf_rn(p, 1.0f / 1536.0f, __fmul_rn(p, float(1.0 / 1536.0 - double(1.0f / 1536.0f))));
}

// a / v for any v, with r its rounded reciprocal: Markstein's two corrections. Quotients underflow only under scales of
// zero.
__device__ __forceinline__ float quotient(float a, float v, float r) {
  float q = __fmul_rn(a, r);
  q = __fmaf_rn(__fmaf_rn(-v, q, a), r, q);
  return __fmaf_rn(__fmaf_rn(-v, q, a), r, q);
}

__device__ __forceinline__ uint32_t e4m3(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

__device__ __forceinline__ float e4m3_value(uint32_t byte) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t(byte), __NV_E4M3)));
}

// The factor of x before it is rounded, for an unsigned scale.
__device__ __forceinline__ float inverse_of(float s, float down) { return fminf(__frcp_rn(__fmul_rn(s, down)), FLT_MAX); }

// 1.5 * 2^22: E * ROUND has half of E for a unit in the last place, whatever E = 2^e
constexpr float ROUND = 6291456.0f;

// Maximum that keeps a NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float most;
#ifdef __CUDACC__
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
#else
  most = a != a || b != b ? NAN : fmaxf(a, b);  // the tests run this file on a CPU
#endif
  return most;
}

// The power of two below |w|, 1 at least: twice the step of e2m1 there.
__device__ __forceinline__ float octave(float w) { return fmaxf(__uint_as_float(__float_as_uint(w) & 0x7F800000u), 1.0f); }

// Nearest e2m1 value, half to even, saturating.
__device__ __forceinline__ float nearest_e2m1(float w) {
  float v = fminf(fmaxf(w, -6.0f), 6.0f), e = octave(v);
  return __fmaf_rn(e, -ROUND, __fmaf_rn(e, ROUND, v));
}

// The error of a candidate over 16 values, added to `total`; most: the largest decoded magnitude, without t.
// s: signed scale, cs: c * min(s, 0).
template <typename Values>
__device__ __forceinline__ void exact_error(
    const Values& x, float inverse, float s, float cs, float c, bool flipped, float amax, int metric, float& total, float& most) {
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    float y = __fmul_rn(x[k], inverse);
    float q = nearest_e2m1(flipped ? __fsub_rn(-y, c) : y);
    float v = __fmaf_rn(q, s, cs);  // q * s is exact
    float d = fabsf(__fsub_rn(over_1536(__fmul_rn(v, amax)), x[k]));
    most = fmaxf(most, fabsf(v));
    total = metric == MSE ? __fadd_rn(total, __fmul_rn(d, d)) : metric == MAE ? __fadd_rn(total, d) : fmaxf(total, d);
  }
}

template <int EFFORT>
constexpr int COUNT = EFFORT == FOUR_OVER_SIX ? 2 : EFFORT == BASE ? 4 : EFFORT == SIDED ? 6 : 26;

template <int EFFORT>
__device__ __forceinline__ bool flips(int i) {
  return i >= (EFFORT == SEARCH ? 13 : 2);
}

// The e4m3 codes of a block's candidates, in order; for SEARCH one code, the middle. Unrolled loops keep them in
// registers.
struct Candidates {
  uint32_t codes[6];

  // Candidate i: its code, with 0x80 where the grid is flipped and the scale is not zero.
  template <int EFFORT>
  __device__ __forceinline__ uint32_t get(int i) const {
    uint32_t code = codes[0];
    if constexpr (EFFORT == SEARCH) {
      code = uint32_t(max(0, min(126, int(code) - 4 + (i < 13 ? i : i - 13))));
    } else {
#pragma unroll
      for (int j = 1; j < COUNT<EFFORT>; ++j) code = i == j ? codes[j] : code;
    }
    return code | (flips<EFFORT>(i) && code > 0 ? 0x80u : 0u);
  }
};

// a: largest magnitude; pos, neg: largest positive and negative one (SIDED), seen from the block's own shift.
template <int EFFORT>
__device__ __forceinline__ Candidates make_candidates(float a, float pos, float neg, const Outer& o, const Shift& h) {
  a = fminf(a, LARGE);
  float b = __fmul_rn(over_6(a), o.up);
  Candidates made{};
  made.codes[0] = e4m3(b);
  if constexpr (EFFORT != SEARCH) made.codes[1] = e4m3(__fmul_rn(b, 1.5f));
  if constexpr (EFFORT == BASE || EFFORT == SIDED) {
    made.codes[2] = e4m3(__fmul_rn(quotient(a, h.f6, h.r6), o.up));
    made.codes[3] = e4m3(__fmul_rn(quotient(a, h.f4, h.r4), o.up));
  }
  if constexpr (EFFORT == SIDED) {
    pos = fminf(pos, LARGE), neg = fminf(neg, LARGE);
    made.codes[4] = e4m3(fmaxf(__fmul_rn(quotient(pos, h.p6, h.q6), o.up), __fmul_rn(quotient(neg, h.f6, h.r6), o.up)));
    made.codes[5] = e4m3(fmaxf(__fmul_rn(quotient(pos, h.p4, h.q4), o.up), __fmul_rn(quotient(neg, h.f4, h.r4), o.up)));
  }
  return made;
}

template <typename T>
__device__ __forceinline__ void unpack2(uint32_t w, float& low, float& high);
template <>
__device__ __forceinline__ void unpack2<__nv_bfloat16>(uint32_t w, float& low, float& high) {
  low = __uint_as_float(w << 16);
  high = __uint_as_float(w & 0xFFFF0000u);
}
template <>
__device__ __forceinline__ void unpack2<__half>(uint32_t w, float& low, float& high) {
  float2 v = __half22float2(*reinterpret_cast<const __half2*>(&w));
  low = v.x, high = v.y;
}

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
  uint32_t picked;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(a), "r"(b), "r"(selector));
  return picked;
#else
  uint64_t both = uint64_t(b) << 32 | a;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t at = selector >> (4 * i), byte = uint32_t(both >> (8 * (at & 7))) & 0xFF;
    picked |= (at & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << (8 * i);
  }
  return picked;
#endif
}

// 0xFF in each byte whose value, of four, is negative: of four float32, or of two words that hold two values each.
__device__ __forceinline__ uint32_t negative(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return permute(permute(a, b, 0x00FB), permute(c, d, 0x00FB), 0x5410);
}
__device__ __forceinline__ uint32_t negative(uint32_t a, uint32_t b) { return permute(a, b, 0xFDB9); }

// 16 values as they lie in memory.
template <typename T>
struct Packed {
  static constexpr int VECTORS = 16 * sizeof(T) / 16;
  uint4 v[VECTORS];

  __device__ __forceinline__ void load(const T* p) {
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) v[j] = __ldg(reinterpret_cast<const uint4*>(p) + j);
  }
  // Largest magnitude, NaN if there is one. Two values are compared at once where a word holds two.
  __device__ __forceinline__ float amax() const {
    const uint32_t* w = reinterpret_cast<const uint32_t*>(v);
    float most = 0.0f;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int k = 0; k < 16; ++k) most = max_nan(most, fabsf(__uint_as_float(w[k])));
    } else {
      float low, high;
#ifdef __CUDACC__
      using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
      const Pair* pairs = reinterpret_cast<const Pair*>(v);
      Pair both = __habs2(pairs[0]);
#pragma unroll
      for (int k = 1; k < 8; ++k) both = __hmax2_nan(both, __habs2(pairs[k]));
      unpack2<T>(*reinterpret_cast<const uint32_t*>(&both), low, high);
      most = max_nan(low, high);
#else
      for (int k = 0; k < 8; ++k) unpack2<T>(w[k], low, high), most = max_nan(max_nan(most, fabsf(low)), fabsf(high));
#endif
    }
    return most;
  }
  // `negative` of four values from 4 i on.
  __device__ __forceinline__ uint32_t negative4(int i) const {
    const uint32_t* w = reinterpret_cast<const uint32_t*>(v);
    if constexpr (sizeof(T) == 4) return negative(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]);
    else return negative(w[2 * i], w[2 * i + 1]);
  }
  __device__ __forceinline__ void unpack(float (&x)[16]) const {
    const uint32_t* w = reinterpret_cast<const uint32_t*>(v);
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int k = 0; k < 16; ++k) x[k] = __uint_as_float(w[k]);
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) unpack2<T>(w[k], x[2 * k], x[2 * k + 1]);
    }
  }
};

__device__ __forceinline__ void store2(float* p, float a, float b) { *reinterpret_cast<float2*>(p) = make_float2(a, b); }
__device__ __forceinline__ uint32_t pack_values(float a, float b, __nv_bfloat16) {
  __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<uint32_t*>(&v);
}
__device__ __forceinline__ uint32_t pack_values(float a, float b, __half) {
  __half2 v = __floats2half2_rn(a, b);
  return *reinterpret_cast<uint32_t*>(&v);
}

// 16 values to memory, in the dtype that the caller wants.
enum Out { NO_VALUES = 0, AS_BF16 = 1, AS_F16 = 2, AS_F32 = 3 };

template <typename V>
__device__ __forceinline__ void store_half(void* p, int64_t at, const float (&v)[16]) {
  uint4 w[2];
  uint32_t* words = reinterpret_cast<uint32_t*>(w);
#pragma unroll
  for (int k = 0; k < 8; ++k) words[k] = pack_values(v[2 * k], v[2 * k + 1], V{});
  uint4* to = reinterpret_cast<uint4*>(static_cast<V*>(p) + at);
  to[0] = w[0], to[1] = w[1];
}

__device__ __forceinline__ void store_values(void* p, int64_t at, const float (&v)[16], int out) {
  if (out == AS_BF16) store_half<__nv_bfloat16>(p, at, v);
  else if (out == AS_F16) store_half<__half>(p, at, v);
  else {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(p) + at);
#pragma unroll
    for (int k = 0; k < 4; ++k) to[k] = make_float4(v[4 * k], v[4 * k + 1], v[4 * k + 2], v[4 * k + 3]);
  }
}

// The value that is rounded: y, or -y - c in a flipped block; sign and c: 1 and 0, or -1 and c.
template <bool FLIPS>
__device__ __forceinline__ float scaled(float x, float inverse, float sign, float c) {
  float y = __fmul_rn(x, inverse);
  return FLIPS ? __fmaf_rn(y, sign, -c) : y;  // the product is exact
}

// Nearest e2m1 magnitude to |z|, half to even; from 7 on it is not 6 but what follows, 8 and more.
//
// e is max(|z|, 1 + 2^-20). e * 2^22 is a whole multiple of e2m1's step at |z|, whatever |z|'s last bits are. So
// subtracting |z| from it rounds |z| to that step, and the power of two below |z| is not needed. Just above 2 and 4 it
// rounds to half the step, which gives the same value. The 2^-20 keeps 2^22 e - |z| above 2^22. A test compares this
// with `nearest_e2m1` at every float32.
__device__ __forceinline__ float nearest_magnitude(float z) {
  float magnitude = fabsf(z), e = fmaxf(magnitude, 0x1.00001p0f);
  return __fmaf_rn(e, 0x1p22f, -__fmaf_rn(e, 0x1p22f, -magnitude));
}

// Two e2m1 magnitudes in a word, as float16.
__device__ __forceinline__ uint32_t pair_up(float low, float high) { return pack_values(low, high, __half{}); }

// Codes of 8 values, low nibble = first. pairs: magnitudes k and k + 4; first, last: `negative` of the first and the
// last four.
//
// A magnitude times 2^-14, where float16's exponents end, has its index << 9 as its bits.
__device__ __forceinline__ uint32_t encode8(const uint32_t (&pairs)[4], uint32_t first, uint32_t last) {
  uint32_t index[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    __half2 tiny = __hmul2(*reinterpret_cast<const __half2*>(&pairs[k]), __half2half2(__ushort_as_half(0x0400)));
    index[k] = *reinterpret_cast<uint32_t*>(&tiny);
  }
  uint32_t codes = ((index[0] + index[1] * 16) >> 9) + ((index[2] + index[3] * 16) >> 1);
  return codes | (permute(first, last, 0x6420) & 0x08080808u) | (permute(first, last, 0x7531) & 0x80808080u);
}

// Codes of 16 values under the scale that won.
template <bool FLIPS, bool SATURATE>
__device__ __forceinline__ uint2 encode16(const float (&x)[16], float inverse, float sign, float c) {
  uint2 packed;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t z[8], pairs[4];
    float r[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      float w = scaled<FLIPS>(x[8 * h + k], inverse, sign, c);
      z[k] = __float_as_uint(w);
      r[k] = nearest_magnitude(SATURATE ? fminf(fabsf(w), 6.0f) : w);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) pairs[k] = pair_up(r[k], r[k + 4]);
    (h ? packed.y : packed.x) = encode8(pairs, negative(z[0], z[1], z[2], z[3]), negative(z[4], z[5], z[6], z[7]));
  }
  return packed;
}

}  // namespace aoquant

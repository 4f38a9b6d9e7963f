// csrc/contest.cuh on a CPU: the device's functions with the intrinsics that they use, for test_csrc_grids.py.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <vector_types.h>
#include <vector_functions.h>

template <typename To, typename From>
static inline To bits(From from) {
  To to;
  static_assert(sizeof(To) == sizeof(From), "same size");
  std::memcpy(&to, &from, sizeof to);
  return to;
}
static inline float __uint_as_float(uint32_t u) { return bits<float>(u); }
static inline uint32_t __float_as_uint(float f) { return bits<uint32_t>(f); }
static inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline int __ffs(uint32_t v) { return __builtin_ffs(int(v)); }
static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t both = uint64_t(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t((both >> (8 * ((selector >> (4 * i)) & 7))) & 0xFF) << (8 * i);
  return out;
}
template <typename T>
static inline T __ldg(const T* p) { return *p; }
template <typename T>
static inline void __stcs(T* p, T value) { *p = value; }
template <typename T>
static inline T min(T a, T b) { return b < a ? b : a; }
template <typename T>
static inline T max(T a, T b) { return a < b ? b : a; }
using std::isinf;

#include "contest.cuh"
#include "four_over_six_rows.cuh"
#include "search.cuh"

using namespace aoquant;

template <typename T>
static void encode(const Args& p, const Outer& o, const Entry* table) {
  if (p.tile > 1 || p.metric != MSE) {
    for (int64_t i = 0; i < (p.rows + p.tile - 1) / p.tile * p.groups; ++i) encode_tile<T>(p, o, table, i);
    return;
  }
  bool rough = can_be_rough(o, p.shift);
  for (int64_t i = 0; i < p.rows * p.groups; ++i) {
    Packed<T> packed;
    packed.load(static_cast<const T*>(p.x) + 16 * i);
    if (p.effort == FOUR_OVER_SIX) encode_block<FOUR_OVER_SIX>(p, o, rough, table, packed, i);
    else if (p.effort == BASE) encode_block<BASE>(p, o, rough, table, packed, i);
    else if (p.effort == SIDED) encode_block<SIDED>(p, o, rough, table, packed, i);
    else encode_block<SEARCH>(p, o, rough, table, packed, i);
  }
}

extern "C" void encode_grids(
    const void* x, int dtype, int64_t rows, int groups, float amax, int effort, int metric, int tile, double c, int alternating, int out,
    int operand, uint8_t* codes, uint8_t* scale, float* outer, void* values) {
  Outer o = make_outer(__float_as_uint(amax));
  *outer = o.t;
  Entry table[128];
  for (uint32_t code = 0; code < 128; ++code) table[code] = make_entry(code, o.down);
  Args p{nullptr, 0, 0, x, codes, scale, outer, values, out, operand, rows, groups, effort, metric, tile, make_shift(c, alternating)};
  if (dtype == AS_BF16) encode<__nv_bfloat16>(p, o, table);
  else if (dtype == AS_F16) encode<__half>(p, o, table);
  else encode<float>(p, o, table);
}

// A row, block by block, as encode_rows.cuh's kernel encodes it.
template <typename T>
static void encode_row(const T* x, int k, bool decoded, T* out, float* scale) {
  float v[16];
  uint32_t most = 0;
  for (int b = 0; b < k / 16; ++b) rows::load16(v, x + 16 * b), most = max(most, rows::finite_absmax_bits(v));
  Outer o = make_outer(most);
  for (int b = 0; b < k / 16; ++b) rows::load16(v, x + 16 * b), rows::store16(out + 16 * b, rows::four_over_six_block<T>(v, o, decoded));
  *scale = o.t;
}

extern "C" void encode_four_over_six_rows(const void* x, int dtype, int64_t rows, int k, int decoded, void* out, float* scale) {
  for (int64_t r = 0; r < rows; ++r) {
    if (dtype == AS_BF16) encode_row(static_cast<const __nv_bfloat16*>(x) + r * k, k, decoded, static_cast<__nv_bfloat16*>(out) + r * k, scale + r);
    else encode_row(static_cast<const __half*>(x) + r * k, k, decoded, static_cast<__half*>(out) + r * k, scale + r);
  }
}

template <typename T>
static void search(const SearchArgs& p) {
  float t = p.outer ? *p.outer : 1.0f, inverse = 1.0f / t;
  SearchEntry table[128];
  for (uint32_t code = 0; code < 128; ++code) table[code] = make_search_entry(code, inverse);
  for (int i = 0; i < p.blocks; ++i) {
    Packed<T> packed;
    packed.load(static_cast<const T*>(p.x) + 16 * i);
    search_block(p, t, inverse, table, packed, i);
  }
}

extern "C" void encode_search(
    const void* x, int dtype, int blocks, const float* outer, int out, int operand, uint8_t* codes, uint8_t* scale, void* values) {
  SearchArgs p{x, outer, codes, scale, values, out, operand, blocks};
  if (dtype == AS_BF16) search<__nv_bfloat16>(p);
  else if (dtype == AS_F16) search<__half>(p);
  else search<float>(p);
}

// A positive float32, by its bits, whose nearest magnitude is not that of e2m1, or -1; from 7 on it has to be more than 6.
extern "C" int64_t wrong_magnitude(int64_t first, int64_t last, int64_t step) {
  for (int64_t i = first; i < last; i += step) {
    float z = bits<float>(uint32_t(i)), r = nearest_magnitude(z), want = nearest_e2m1(z);
    if (std::fmin(r, 6.0f) != want || (z < 7.0f && r != want) || nearest_magnitude(-z) != r) return i;
  }
  return -1;
}

// Largest distance between the rough error of a candidate and the exact one, in units of the margin that decides between candidates.
// x: blocks of 16; codes: a scale for each, 0x80 with it for a flipped grid.
extern "C" float worst_margin(const float* x, const uint8_t* codes, int64_t blocks, float amax, double shift) {
  Outer o = make_outer(__float_as_uint(amax));
  float c = float(shift), worst = 0.0f;
  for (int64_t i = 0; i < blocks; ++i, x += 16) {
    bool flipped = codes[i] & 0x80u;
    Entry entry = make_entry(codes[i] & 0x7Fu, o.down);
    float values[16], exact = 0.0f, most = 0.0f, s = flipped ? -entry.s : entry.s;
    std::memcpy(values, x, sizeof values);
    exact_error(values, entry.inverse, s, flipped ? c * s : 0.0f, c, flipped, o.amax, MSE, exact, most);
    float rough = rough_error<true>(values, flipped ? -entry.inverse : entry.inverse, flipped ? c : 0.0f);
    double unit = double(entry.s) * o.amax / 1536.0;
    worst = std::fmax(worst, float(std::fabs(exact / (unit * unit) - rough) / (KAPPA * rough + FLOOR)));
  }
  return worst;
}

// The contest of a block's candidates: it chooses the block's scale and grid, and writes the codes.
//
// Comparing candidates exactly, as the format does, costs some 13 instructions for each value and candidate. A rougher
// error takes six, or seven with saturation: it is fused, and in units of the scale. It is within a margin of the exact
// error, proven below, so it nearly always decides. In about one block of a thousand two candidates are closer than the
// margin, and the exact errors decide. Either way the bytes are the format's.
#pragma once

#include "check.cuh"
#include "grids.cuh"

namespace aoquant {

// A call: where everything lies, and the options.
struct Args {
  const int32_t* partials;  // bits of float32 magnitudes, whose largest is amax
  int n_partials;
  uint32_t known;  // or one that the caller knows
  const void* x;
  uint8_t* codes;
  uint8_t* scale;
  float* outer;
  void* values;
  int out;       // Out
  int operand;   // values without t
  int64_t rows;
  int groups;    // blocks in a row
  int effort, metric, tile;
  Shift shift;
};

// A scale's numbers: its inverse, its value, the value squared, and the rough error's floor under it.
struct __align__(16) Entry {
  float inverse, square, s, floor;
};

// The margin. Write u = 2^-24, S = s * amax / 1536. In units of S the exact contest's x differs from the rough one's by
// at most 4u |x / S| (up, down, s * down and its inverse are rounded once each) + 7u (the rough z is rounded once, the
// exact one twice), its decoded value by 2u |v| + 2u, and |v|, |z| <= 10: below D = 100 u = 6e-6 together. A distance
// to the nearest code changes by no more than its argument, at a tie too. So the sums of squares differ by at most 8 D
// sqrt(e) + 16 D^2 <= 4 D (2 e + 1/2) + 16 D^2, and by 35 u e from summing: below KAPPA e + FLOOR, in units of S^2.
// amax in [2^-44, 2^60] keeps every square away from underflow.
constexpr float KAPPA = 5.2e-5f, FLOOR = 1.3e-5f;

__device__ __forceinline__ Entry make_entry(uint32_t code, float down) {
  if (code == 0x7Fu) return {NAN, NAN, NAN, NAN};
  float s = e4m3_value(code);
  return {inverse_of(s, down), s * s, s, FLOOR * (s * s)};
}

// Stands in for a table: an entry is made when it is asked for.
struct Entries {
  float down;
  __device__ __forceinline__ Entry operator[](uint32_t code) const { return make_entry(code, down); }
};

// Whether rough errors are within their margin, for a whole tensor.
__device__ __forceinline__ bool can_be_rough(const Outer& o, const Shift& h) {
  return o.amax >= 0x1p-44f && fabsf(h.c) <= 0.29f && o.t < 0x1p100f;
}

// Rough error of a candidate in units of its scale squared. m: +-inverse, shift: c of a flipped candidate, else 0.
template <bool SATURATE>
__device__ __forceinline__ float rough_error(const float (&x)[16], float m, float shift) {
  float total = 0.0f;
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    float z = __fmaf_rn(x[k], m, -shift), r = nearest_magnitude(z);
    if (SATURATE) r = fminf(r, 6.0f);
    float d = __fsub_rn(r, fabsf(z));
    total = __fmaf_rn(d, d, total);
  }
  return total;
}

// The same, of two values that are not flipped, added to `total`; their magnitudes.
__device__ __forceinline__ uint32_t rough_pair(float low, float high, float inverse, float& total) {
  float y = __fmul_rn(low, inverse), z = __fmul_rn(high, inverse), q = nearest_magnitude(y), r = nearest_magnitude(z);
  float d = __fsub_rn(q, fabsf(y)), e = __fsub_rn(r, fabsf(z));
  total = __fmaf_rn(e, e, __fmaf_rn(d, d, total));
  return pair_up(q, r);
}

// The value of x's code under the signed scale s. sign, shift: `scaled`'s sign and c; cs: as `exact_error`'s.
template <bool FLIPS>
__device__ __forceinline__ float value_of(float x, float inverse, float sign, float shift, float s, float cs, float t) {
  float z = scaled<FLIPS>(x, inverse, sign, shift);
  return __fmul_rn(__fmaf_rn(copysignf(nearest_e2m1(fabsf(z)), z), s, cs), t);
}

// Values of 16 codes under a scale code, 0x80 with it where the grid is flipped.
template <bool FLIPS>
__device__ __forceinline__ void write_values(
    const Args& p, const Outer& o, const Entry* table, const float (&x)[16], int64_t block, uint32_t code, bool finite, float c) {
  bool flipped = code & 0x80u;
  float inverse = table[code & 0x7Fu].inverse, sign = flipped ? -1.0f : 1.0f, shift = flipped ? c : 0.0f;
  float s = finite ? sign * table[code & 0x7Fu].s : NAN, t = p.operand ? 1.0f : o.t, v[16];
  // the signs of zeros are the format's
  float cs = p.effort == FOUR_OVER_SIX ? -0.0f : __fmul_rn(c, flipped ? s : 0.0f);
#pragma unroll
  for (int k = 0; k < 16; ++k) v[k] = value_of<FLIPS>(x[k], inverse, sign, shift, s, cs, t);
  store_values(p.values, block * 16, v, p.out);
}

// Codes of 16 values under any scale.
template <bool FLIPS>
__device__ __forceinline__ uint2 any_codes(const Entry* table, const float (&x)[16], uint32_t code, bool finite, float c) {
  bool flipped = code & 0x80u;
  uint2 packed = encode16<FLIPS, true>(x, table[code & 0x7Fu].inverse, flipped ? -1.0f : 1.0f, flipped ? c : 0.0f);
  return finite ? packed : make_uint2(0, 0);
}

// The exact contest among the candidates whose bits are set. table: of entries, by scale code.
template <int EFFORT, typename Table>
__device__ __forceinline__ uint32_t exact_contest(
    const Outer& o, Table table, const float (&x)[16], const Candidates& candidates, uint32_t pending, float c) {
  uint32_t code = 0;
  float least = 0.0f;
  bool first = true;
#pragma unroll 1
  while (pending) {
    int i = __ffs(pending) - 1;
    pending &= pending - 1;
    uint32_t mine = candidates.get<EFFORT>(i);
    Entry entry = table[mine & 0x7Fu];
    float s = mine & 0x80u ? -entry.s : entry.s, error = 0.0f, most = 0.0f;
    float cs = mine & 0x80u ? __fmul_rn(c, s) : 0.0f;
    exact_error(x, entry.inverse, s, cs, c, flips<EFFORT>(i), o.amax, MSE, error, most);
    if (first || (error < least && !isinf(most * o.t))) least = error, code = mine;
    first = false;
  }
  return code;
}

// One block: its scale, its codes and, where the caller asks for them, its values. rough: `can_be_rough`.
//
// If every candidate's scale is normal and not clipped, the rough error is valid, and the block is finite and not all
// zeros.
template <int EFFORT, typename T>
__device__ __forceinline__ void encode_block(
    const Args& p, const Outer& o, bool rough, const Entry* table, const Packed<T>& in, int64_t block) {
  constexpr int N = COUNT<EFFORT>;
  constexpr uint32_t ALL = (1u << N) - 1;
  constexpr bool FLIPS = EFFORT > FOUR_OVER_SIX;
  DEVICE_ASSERT(block >= 0 && block < p.rows * p.groups);
  float x[16], a = in.amax(), pos = 0.0f, neg = 0.0f, c = 0.0f;
  in.unpack(x);
  bool finite = a < INFINITY;
  if (o.power != 1.0f) {
#pragma unroll
    for (int k = 0; k < 16; ++k) x[k] = __fmul_rn(x[k], o.power);
    a *= o.power;
  }
  if constexpr (FLIPS) c = p.shift.alternating && (block % p.groups) % 2 ? -p.shift.c : p.shift.c;
  if constexpr (EFFORT == SIDED) {
#pragma unroll
    for (int k = 0; k < 16; ++k) pos = fmaxf(pos, x[k]), neg = fmaxf(neg, -x[k]);
    if (c < 0.0f) { float swap = pos; pos = neg, neg = swap; }
  }
  Candidates candidates = make_candidates<EFFORT>(a, pos, neg, o, p.shift);
  const uint32_t* codes = candidates.codes;
  uint32_t code = 0, pending = ALL;
  uint2 packed;

  // the rough contest
  if constexpr (EFFORT == SEARCH) {
    // best: error; lower, upper: its bounds; others: the lowest lower bound of any other candidate
    float best = INFINITY, lower = INFINITY, upper = INFINITY, others = INFINITY;
    uint32_t last = 0x7Fu, reach = 0;  // a bit for each candidate that could still win when it was tried
#pragma unroll 1
    for (int i = 0; i < N; ++i) {
      uint32_t mine = candidates.get<EFFORT>(i);
      Entry entry = table[mine & 0x7Fu];
      float error = rough_error<true>(x, i >= 13 ? -entry.inverse : entry.inverse, i >= 13 ? c : 0.0f) * entry.square;
      if (mine == last) continue;  // clamped: the same candidate again
      last = mine;
      float low = __fmaf_rn(error, 1.0f - KAPPA, -entry.floor), high = __fmaf_rn(error, 1.0f + KAPPA, entry.floor);
      if (low <= upper) reach |= 1u << i;
      others = fminf(others, error < best ? lower : low);
      if (error < best) best = error, lower = low, upper = high, code = mine;
    }
    if (rough && codes[0] >= 12 && codes[0] <= 0x7Du) pending = others > upper ? 0 : reach;
  } else {
    // the rough error does not model saturation: every scale has to be normal, and not clipped
    bool plain = rough && codes[EFFORT == FOUR_OVER_SIX ? 0 : 2] >= 8 && codes[1] <= 0x7Du && (EFFORT != SIDED || codes[5] <= 0x7Du);
    float best, second, largest = table[codes[1]].square;
    uint32_t six[8], four[8];
    if constexpr (EFFORT == FOUR_OVER_SIX) {
      float inverse6 = table[codes[0]].inverse, inverse4 = table[codes[1]].inverse, error6 = 0.0f, error4 = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        int k = i / 4 * 8 + i % 4;
        six[i] = rough_pair(x[k], x[k + 4], inverse6, error6);
        four[i] = rough_pair(x[k], x[k + 4], inverse4, error4);
      }
      error6 *= table[codes[0]].square, error4 *= largest;
      bool better = error4 < error6;
      best = fminf(error4, error6), second = fmaxf(error4, error6);
      code = better ? codes[1] : codes[0];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t pairs[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) pairs[k] = better ? four[4 * h + k] : six[4 * h + k];
        (h ? packed.y : packed.x) = encode8(pairs, in.negative4(2 * h), in.negative4(2 * h + 1));
      }
    } else {
      best = INFINITY, second = INFINITY;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const Entry& entry = table[codes[i]];
        float inverse = entry.inverse, square = entry.square;
        float error = rough_error<false>(x, flips<EFFORT>(i) ? -inverse : inverse, flips<EFFORT>(i) ? c : 0.0f) * square;
        if (EFFORT == SIDED && i >= 4) {  // often equal to an earlier candidate
          bool again = codes[i] == codes[2] || codes[i] == codes[3] || (i == 5 && codes[5] == codes[4]);
          error = again ? INFINITY : error;
        }
        second = fminf(second, fmaxf(best, error));
        code = error < best ? codes[i] | (flips<EFFORT>(i) ? 0x80u : 0u) : code;
        best = fminf(best, error);
        if (i == 5) largest = fmaxf(largest, square);  // only this candidate's scale can exceed that of candidate 1
      }
      packed = encode16<FLIPS, false>(x, table[code & 0x7Fu].inverse, code & 0x80u ? -1.0f : 1.0f, code & 0x80u ? c : 0.0f);
    }
    bool sure = __fmaf_rn(second, 1.0f - KAPPA, -2.0f * FLOOR * largest) > best * (1.0f + KAPPA);
    if (plain && sure) pending = 0;
  }

  // the exact one, where it is needed
  if (EFFORT == SEARCH || pending) {
    if (!finite) code = 0x7Fu;
    else if (a == 0.0f) code = 0;  // every candidate is exact, the first one stays
    else if (pending) code = exact_contest<EFFORT>(o, table, x, candidates, pending, c);
    packed = any_codes<FLIPS>(table, x, code, finite, c);
  }
  __stcs(p.scale + block, uint8_t(code));  // past the cache, which is for x
  __stcs(reinterpret_cast<uint2*>(p.codes) + block, packed);
  if (p.out != NO_VALUES) write_values<FLIPS>(p, o, table, x, block, code, finite, c);
}

template <int N>
using Constant = std::integral_constant<int, N>;

// One tile of up to 16 rows, or one block, with every option: the exact contest alone. A thread reads its tile again
// for each candidate.
template <typename T>
__device__ __forceinline__ void encode_tile(const Args& p, const Outer& o, const Entry* table, int64_t tile) {
  const T* from = static_cast<const T*>(p.x);
  int64_t row = tile / p.groups * p.tile, group = tile % p.groups;
  int height = int(min(int64_t(p.tile), p.rows - row));
  DEVICE_ASSERT(row < p.rows && height > 0);
  float x[16], a = 0.0f, pos = 0.0f, neg = 0.0f;
  bool finite = true;
  auto load = [&](int r) {
    Packed<T> packed;
    packed.load(from + ((row + r) * p.groups + group) * 16);
    packed.unpack(x);
  };
  for (int r = 0; r < height; ++r) {
    load(r);
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      finite = finite && fabsf(x[k]) < INFINITY;
      pos = fmaxf(pos, x[k] * o.power), neg = fmaxf(neg, -x[k] * o.power);
    }
  }
  a = fmaxf(pos, neg);
  float c = p.shift.alternating && group % 2 ? -p.shift.c : p.shift.c;
  if (c < 0.0f) { float swap = pos; pos = neg, neg = swap; }

  uint32_t code = 0x7Fu;
  float least = 0.0f;
  auto contest = [&](auto effort) {
    constexpr int EFFORT = decltype(effort)::value;
    Candidates candidates = make_candidates<EFFORT>(a, pos, neg, o, p.shift);
#pragma unroll 1
    for (int i = 0; i < COUNT<EFFORT>; ++i) {
      uint32_t mine = candidates.get<EFFORT>(i);
      Entry entry = table[mine & 0x7Fu];
      float s = mine & 0x80u ? -entry.s : entry.s, error = 0.0f, most = 0.0f;
      float cs = mine & 0x80u ? __fmul_rn(c, s) : 0.0f;
      for (int r = 0; r < height; ++r) {
        load(r);
#pragma unroll
        for (int k = 0; k < 16; ++k) x[k] = __fmul_rn(x[k], o.power);
        exact_error(x, entry.inverse, s, cs, c, flips<EFFORT>(i), o.amax, p.metric, error, most);
      }
      if (i == 0 || (error < least && !isinf(most * o.t))) least = error, code = mine;
    }
  };
  if (finite) {
    if (p.effort == FOUR_OVER_SIX) contest(Constant<FOUR_OVER_SIX>{});
    else if (p.effort == BASE) contest(Constant<BASE>{});
    else if (p.effort == SIDED) contest(Constant<SIDED>{});
    else contest(Constant<SEARCH>{});
  }
  p.scale[tile] = uint8_t(code);
  for (int r = 0; r < height; ++r) {
    load(r);
#pragma unroll
    for (int k = 0; k < 16; ++k) x[k] = __fmul_rn(x[k], o.power);
    int64_t block = (row + r) * p.groups + group;
    reinterpret_cast<uint2*>(p.codes)[block] = any_codes<true>(table, x, code, finite, c);
    if (p.out != NO_VALUES) write_values<true>(p, o, table, x, block, code, finite, c);
  }
}

}  // namespace aoquant

// What a group of codes stands for. Codes of 4 bits have 16 values a group: they are computed once and looked up, so a
// kernel spends a shuffle on a code and nothing on its scale.
#pragma once

#include "kernels.h"
#include "numbers.h"
#include "vectors.h"

namespace aoquant::cpu::AOQUANT_LEVEL {

// a + b rounded to odd: the exact sum, or the neighbour whose last bit is 1 (Boldo & Melquiond 2008). Rounding that to
// bfloat16 is rounding the exact sum.
inline float sum_to_odd(float a, float b) {
  const float total = a + b, shadow = total - a, error = (a - (total - shadow)) + (b - shadow);
  const uint32_t u = bits_of(total);
  if (u & 1 || error == 0 || error != error || error - error != 0) return total;
  return float_of((error > 0) == (u >> 31 == 0) ? u + 1 : u - 1);
}

// q of each nibble: two's complement, or q + 8
alignas(64) constexpr float COMPLEMENT[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
alignas(64) constexpr float SHIFTED[LANES] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

// Scales and zeros of a row's next 16 groups, in float32, and the 16 values of each group.
template <Kind KIND, typename T>
struct Groups {
  static constexpr bool NARROW = sizeof(T) < 4;
  alignas(64) float scale[LANES], zero[LANES];
  uint32_t rare = 0;  // groups whose values the short way could round wrongly

  void read(const Weight& w, int64_t row, int64_t group, int count) {
    const int64_t at = row * w.groups + group;
    const Vector s = load_some(static_cast<const T*>(w.scale) + at, count);
    s.store(scale);
    if (KIND == INT4) {
      const Vector z = load_some(static_cast<const T*>(w.zero) + at, count);
      z.store(zero);
      // q s + z is exact, so that rounding it to float32 is harmless, while its 8 + 3 + 1 + 12 bits fit into 24
      if (NARROW) rare = far_apart(s, z, 12) | not_finite(s) | not_finite(z);
    } else {
      for (int g = 0; g < count; ++g) zero[g] = w.zero ? -float(static_cast<const int8_t*>(w.zero)[at + g]) : 0.0f;
      if (NARROW) rare = not_finite(s);
    }
  }

  Vector values(int g) const {
    const Vector s = Vector::all(scale[g]), z = Vector::all(zero[g]);
    const Vector made = KIND == INT4 ? fma(Vector::load(COMPLEMENT), s, z) : (Vector::load(SHIFTED) + z) * s;
    if (!NARROW) return made;
    return __builtin_expect(rare >> g & 1, 0) ? carefully(g, made) : round_bfloat16(made);
  }

  __attribute__((noinline)) Vector carefully(int g, Vector made) const {
    float one[LANES];
    made.store(one);
    for (int code = 0; code < LANES; ++code) one[code] = Number<T>::round(KIND == INT4 ? sum_to_odd(COMPLEMENT[code] * scale[g], zero[g]) : one[code]);
    return Vector::load(one);
  }
};

}  // namespace aoquant::cpu::AOQUANT_LEVEL

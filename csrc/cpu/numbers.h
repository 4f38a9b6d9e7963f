// bfloat16 and float32 as the formats round to them: half to even, NaN stays NaN. `Number<T>::round` is what a PyTorch
// operation on T does with its float32 result.
#pragma once

#include <cstdint>
#include <cstring>

namespace aoquant::cpu::AOQUANT_LEVEL {

inline uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
inline float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

struct BFloat16 {
  uint16_t bits;
};

template <typename T>
struct Number;

template <>
struct Number<float> {
  static float wide(float x) { return x; }
  static float narrow(float x) { return x; }
  static float round(float x) { return x; }
};

template <>
struct Number<BFloat16> {
  static float wide(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }
  static BFloat16 narrow(float x) {
    const uint32_t u = bits_of(x), rounded = (u + 0x7FFF + (u >> 16 & 1)) >> 16;
    return {uint16_t((u & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded)};
  }
  static float round(float x) { return wide(narrow(x)); }
};

}  // namespace aoquant::cpu::AOQUANT_LEVEL

// vectors.h by loops that the compiler makes vectors of: a Vector is memory.
#pragma once

#include "numbers.h"

namespace aoquant::cpu::AOQUANT_LEVEL {

constexpr int LANES = 16, CHUNK = 2 * LANES;

struct Vector {
  float v[LANES];
  static Vector zero() { return all(0.0f); }
  static Vector all(float x) {
    Vector r;
    for (int l = 0; l < LANES; ++l) r.v[l] = x;
    return r;
  }
  static Vector load(const float* p) {
    Vector r;
    memcpy(r.v, p, sizeof r.v);
    return r;
  }
  static Vector from_int8(const void* p) {
    Vector r;
    for (int l = 0; l < LANES; ++l) r.v[l] = float(static_cast<const int8_t*>(p)[l]);
    return r;
  }
  void store(float* p) const { memcpy(p, v, sizeof v); }
};
inline Vector operator+(Vector a, Vector b) {
  for (int l = 0; l < LANES; ++l) a.v[l] += b.v[l];
  return a;
}
inline Vector operator*(Vector a, Vector b) {
  for (int l = 0; l < LANES; ++l) a.v[l] *= b.v[l];
  return a;
}
inline Vector fma(Vector a, Vector b, Vector c) {
  for (int l = 0; l < LANES; ++l) c.v[l] = __builtin_fmaf(a.v[l], b.v[l], c.v[l]);
  return c;
}
inline Vector round_bfloat16(Vector x) {
  for (int l = 0; l < LANES; ++l) {
    const uint32_t u = bits_of(x.v[l]);
    x.v[l] = float_of((u + (u >> 16 & 1) + 0x7FFF) & 0xFFFF0000);
  }
  return x;
}
template <typename T>
inline Vector load_some(const T* p, int count) {
  Vector r = Vector::zero();
  for (int l = 0; l < count; ++l) r.v[l] = Number<T>::wide(p[l]);
  return r;
}
template <typename T>
inline Vector load16(const T* p) {
  return load_some(p, LANES);
}
inline Vector operator-(Vector a, const Vector& b) {
  for (int l = 0; l < LANES; ++l) a.v[l] -= b.v[l];
  return a;
}
inline Vector operator/(Vector a, const Vector& b) {
  for (int l = 0; l < LANES; ++l) a.v[l] /= b.v[l];
  return a;
}
inline Vector smaller(Vector a, const Vector& b) {
  for (int l = 0; l < LANES; ++l) a.v[l] = b.v[l] < a.v[l] ? b.v[l] : a.v[l];
  return a;
}
inline Vector larger(Vector a, const Vector& b) {
  for (int l = 0; l < LANES; ++l) a.v[l] = b.v[l] > a.v[l] ? b.v[l] : a.v[l];
  return a;
}
inline uint32_t nans(const Vector& x) {
  uint32_t found = 0;
  for (int l = 0; l < LANES; ++l) found |= uint32_t(x.v[l] != x.v[l]) << l;
  return found;
}
inline void to_codes(const Vector& x, uint8_t* codes) {
  for (int l = 0; l < LANES; ++l) {
    float q = __builtin_rintf(x.v[l]);
    q = q < 0.0f ? 0.0f : q > 15.0f ? 15.0f : q;
    codes[l] = uint8_t(int(q != q ? 8.0f : q));
  }
}
inline uint32_t not_finite(const Vector& x) {
  uint32_t found = 0;
  for (int l = 0; l < LANES; ++l) found |= uint32_t(!(x.v[l] - x.v[l] == 0)) << l;
  return found;
}
inline uint32_t far_apart(const Vector& a, const Vector& b, int apart) {
  uint32_t found = 0;
  for (int l = 0; l < LANES; ++l) {
    const int by = int(bits_of(a.v[l]) >> 23 & 255) - int(bits_of(b.v[l]) >> 23 & 255);
    found |= uint32_t((by > apart || by < -apart) && b.v[l] != 0) << l;
  }
  return found;
}
inline float sum(Vector x) {
  for (int apart = LANES / 2; apart; apart /= 2)
    for (int l = 0; l < apart; ++l) x.v[l] += x.v[l + apart];
  return x.v[0];
}

inline void sums(const Vector* x, float* out) {
  for (int i = 0; i < 4; ++i) out[i] = sum(x[i]);
}

struct Pair {
  Vector first, second;
};

constexpr int k_of(int lane) { return lane % LANES * 2 + lane / LANES; }

template <bool NARROW>
struct Table {
  Vector values;
  static Table from(Vector values) { return {values}; }
  Pair of(const uint8_t* codes) const {
    Pair r;
    for (int l = 0; l < LANES; ++l) r.first.v[l] = values.v[codes[l] & 15], r.second.v[l] = values.v[codes[l] >> 4];
    return r;
  }
};

inline Vector folded(const Pair& p) { return p.first + p.second; }

inline void in_order(const Pair& p, float* out) {
  for (int l = 0; l < LANES; ++l) out[2 * l] = p.first.v[l], out[2 * l + 1] = p.second.v[l];
}

}  // namespace aoquant::cpu::AOQUANT_LEVEL

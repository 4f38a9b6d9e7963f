// The kernels at one level of instructions: compiled once for each, with AOQUANT_LEVEL naming it.
//
// A sum has one order at every level and for every number of rows: 32 lanes, of which lane 2 l + p adds the products at
// k = 32 c + 2 l + p (codes of 4 bits; 16 p + l for bytes) in c's order, each by a fused multiply-add; then lanes p = 0
// and 1 are added, then `sum`'s tree. Products of bfloat16 are exact in float32, so there each addition rounds once.
#include "weight.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#include "decoded_rows.h"
#endif

namespace aoquant::cpu::AOQUANT_LEVEL {

namespace {


void arrange(const void* x, bool bfloat16, bool nibbles, int64_t values, float* arranged) {
  const auto at = [&](int64_t i) { return bfloat16 ? Number<BFloat16>::wide(static_cast<const BFloat16*>(x)[i]) : static_cast<const float*>(x)[i]; };
  if (!nibbles) {
    for (int64_t i = 0; i < values; ++i) arranged[i] = at(i);
    return;
  }
  for (int64_t c = 0; c < values; c += CHUNK)
    for (int i = 0; i < CHUNK; ++i) arranged[c + i] = at(c + k_of(i));
}

Pair bytes_of(const uint8_t* codes) { return {Vector::from_int8(codes), Vector::from_int8(codes + LANES)}; }

float numbers_at(const void* p, bool bfloat16, int64_t i) {
  return bfloat16 ? Number<BFloat16>::wide(static_cast<const BFloat16*>(p)[i]) : static_cast<const float*>(p)[i];
}

// y of M rows and N columns, from row `row` and column `column` of n on.
template <int M, int N>
inline void finish(const Epilogue& e, int64_t row, int64_t n, int64_t column, const float (&totals)[M * N]) {
  alignas(64) float y[LANES] = {};
  static_assert(M * N <= LANES);
  for (int i = 0; i < M * N; ++i) y[i] = totals[i];
  if (e.alpha_x)
    for (int i = 0; i < M * N; ++i) y[i] *= e.alpha_x[(row + i / N) * e.alpha_x_step];
  if (e.alpha_w)
    for (int i = 0; i < M * N; ++i) y[i] *= e.alpha_w[(column + i % N) * e.alpha_w_step];
  if (e.bias)
    for (int i = 0; i < M * N; ++i) y[i] += numbers_at(e.bias, e.bias_bfloat16, column + i % N);
  const int64_t at = row * n + column;
  if (!e.bfloat16) {
    for (int i = 0; i < M * N; ++i) static_cast<float*>(e.y)[at + i / N * n + i % N] = y[i];
    return;
  }
  BFloat16* const out = static_cast<BFloat16*>(e.y) + at;
  const Vector whole = Vector::load(y);
  if (__builtin_expect(not_finite(whole), 0)) {
    for (int i = 0; i < M * N; ++i) out[i / N * n + i % N] = Number<BFloat16>::narrow(y[i]);
    return;
  }
  round_bfloat16(whole).store(y);
  for (int i = 0; i < M * N; ++i) out[i / N * n + i % N] = {uint16_t(bits_of(y[i]) >> 16)};
}

// A Pair's lanes as a Vector whose `sum` is theirs: lanes p = 0 plus lanes p = 1.
template <Kind KIND>
Vector joined(const Pair& p) {
  return KIND == INT8 ? p.first + p.second : folded(p);
}

// y of M rows of x, from `row` on, and N rows of w, from `column` on.
template <Kind KIND, typename T, int M, int N>
void tile(const Weight& w, const float* x, int64_t row, int64_t column, const Epilogue& e) {
  constexpr bool NIBBLES = KIND != INT8;
  const int64_t k = w.k, bytes = NIBBLES ? k / 2 : k, group = NIBBLES ? w.group : k;
  const uint8_t* codes = w.codes + column * bytes;
  Pair sums[M][N];
  using Look = Table<Groups<KIND, T>::NARROW>;
  Look tables[N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][n] = {Vector::zero(), Vector::zero()};

  const auto chunk = [&](int64_t at) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      if (M == 1) __builtin_prefetch(codes + (n + N) * bytes + (NIBBLES ? at / 2 : at));  // what the next tile reads
      const Pair values = NIBBLES ? tables[n].of(codes + n * bytes + at / 2) : bytes_of(codes + n * bytes + at);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        sums[m][n].first = fma(values.first, Vector::load(x + m * k + at), sums[m][n].first);
        sums[m][n].second = fma(values.second, Vector::load(x + m * k + at + LANES), sums[m][n].second);
      }
    }
  };
  if constexpr (!NIBBLES) {
    for (int64_t at = 0; at < k; at += CHUNK) chunk(at);
  } else {
    Groups<KIND, T> groups[N];
    for (int64_t g = 0, at = 0; at < k; g += LANES) {
      const int count = int(w.groups - g < LANES ? w.groups - g : LANES);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) groups[n].read(w, column + n, g, count);
      for (int i = 0; i < count; ++i) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) tables[n] = Look::from(groups[n].values(i));
        for (const int64_t end = at + group; at < end; at += CHUNK) chunk(at);
      }
    }
  }
  float totals[M * N];
  Vector both[M * N];
#pragma GCC unroll 8
  for (int i = 0; i < M * N; ++i) both[i] = joined<KIND>(sums[i / N][i % N]);
  if constexpr (M * N % 4 == 0) {
#pragma GCC unroll 8
    for (int i = 0; i < M * N; i += 4) AOQUANT_LEVEL::sums(both + i, totals + i);
  } else {
    for (int i = 0; i < M * N; ++i) totals[i] = sum(both[i]);
  }
  finish<M, N>(e, row, w.n, column, totals);
}

template <Kind KIND, typename T, int M, int N>
void strip(const Weight& w, const float* x, int64_t& row, int64_t m, int64_t from, int64_t to, const Epilogue& e) {
  for (; row + M <= m; row += M) {
    int64_t column = from;
    for (; column + N <= to; column += N) tile<KIND, T, M, N>(w, x + row * w.k, row, column, e);
    for (; column < to; ++column) tile<KIND, T, M, 1>(w, x + row * w.k, row, column, e);
  }
}

// f(at, Pair) for each chunk of a row of W
template <Kind KIND, typename T, typename F>
void decode_row(const Weight& w, int64_t row, const F& f) {
  if constexpr (KIND == INT8) {
    for (int64_t at = 0; at < w.k; at += CHUNK) f(at, bytes_of(w.codes + row * w.k + at));
  } else {
    Groups<KIND, T> groups;
    for (int64_t g = 0, at = 0; at < w.k; ++g) {
      if (g % LANES == 0) groups.read(w, row, g, int(w.groups - g < LANES ? w.groups - g : LANES));
      const auto table = Table<Groups<KIND, T>::NARROW>::from(groups.values(int(g % LANES)));
      for (const int64_t end = at + w.group; at < end; at += CHUNK) f(at, table.of(w.codes + (row * w.k + at) / 2));
    }
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// y of M rows of x, from `row` on, and N decoded rows of w, from `column` on.
template <Kind KIND, int M, int N>
void decoded_tile(const Weight& w, const float* x, const float* decoded, int64_t row, int64_t column, const Epilogue& e) {
  alignas(32) float lanes[M * N * CHUNK], totals[M * N];
  lanes_of<M, N>(x + row * w.k, decoded, w.k, lanes);
  for (int i = 0; i < M * N; ++i) totals[i] = sum(joined<KIND>({Vector::load(lanes + i * CHUNK), Vector::load(lanes + i * CHUNK + LANES)}));
  finish<M, N>(e, row, w.n, column, totals);
}

template <Kind KIND, typename T>
void decoded_rows(const Weight& w, const float* x, int64_t m, int64_t from, int64_t to, const Epilogue& e) {
  std::vector<float> decoded(COLUMNS * w.k);
  const auto columns = [&]<int N>(int64_t column) {
    for (int n = 0; n < N; ++n)
      decode_row<KIND, T>(w, column + n, [&](int64_t at, const Pair& values) { values.first.store(&decoded[n * w.k + at]), values.second.store(&decoded[n * w.k + at + LANES]); });
    int64_t row = 0;
    for (; row + 3 <= m; row += 3) decoded_tile<KIND, 3, N>(w, x, decoded.data(), row, column, e);
    for (; row + 2 <= m; row += 2) decoded_tile<KIND, 2, N>(w, x, decoded.data(), row, column, e);
    for (; row < m; ++row) decoded_tile<KIND, 1, N>(w, x, decoded.data(), row, column, e);
  };
  int64_t column = from;
  for (; column + COLUMNS <= to; column += COLUMNS) columns.template operator()<COLUMNS>(column);
  for (; column < to; ++column) columns.template operator()<1>(column);
}
#endif

template <Kind KIND, typename T>
void all_rows(const Weight& w, const float* x, int64_t m, int64_t from, int64_t to, const Epilogue& e) {
  int64_t row = 0;
#ifdef __AVX512F__
  strip<KIND, T, 8, 1>(w, x, row, m, from, to, e);
  strip<KIND, T, 4, 2>(w, x, row, m, from, to, e);
  strip<KIND, T, 2, 4>(w, x, row, m, from, to, e);
  strip<KIND, T, 1, 4>(w, x, row, m, from, to, e);
#elif defined(__AVX2__)
  if (m > 1) return decoded_rows<KIND, T>(w, x, m, from, to, e);
  strip<KIND, T, 1, 2>(w, x, row, m, from, to, e);
#else
  strip<KIND, T, 2, 1>(w, x, row, m, from, to, e);
  strip<KIND, T, 1, 2>(w, x, row, m, from, to, e);
#endif
}

// f of W's kind and of the type of its scales
template <typename F>
void with_kind(const Weight& w, const F& f) {
  if (w.kind == INT8) return f.template operator()<INT8, float>();
  if (w.kind == INT4) return w.bfloat16 ? f.template operator()<INT4, BFloat16>() : f.template operator()<INT4, float>();
  return w.bfloat16 ? f.template operator()<INTX4, BFloat16>() : f.template operator()<INTX4, float>();
}

void products(const Weight& w, const float* x, int64_t m, int64_t from, int64_t to, const Epilogue& e) {
  with_kind(w, [&]<Kind KIND, typename T>() { all_rows<KIND, T>(w, x, m, from, to, e); });
}

#ifdef __AVX512F__
constexpr int INTEGER_ROWS = 4;  // of x, as many as registers hold sums of
#else
constexpr int INTEGER_ROWS = 2;
#endif

// Sums of M rows of int8 x with N of w: exact, in any order.
template <int M, int N>
void integer_tile(const Weight& w, const int8_t* x, int64_t row, int64_t column, const Epilogue& e) {
  const int64_t k = w.k;
  const int8_t* codes = reinterpret_cast<const int8_t*>(w.codes) + column * k;
#ifdef __AVX512F__
  // the instruction multiplies unsigned by signed: x + 128, and 128 times the sum of w is taken off
  const __m512i flip = _mm512_set1_epi8(int8_t(0x80)), one = _mm512_set1_epi8(1);
  __m512i sums[M][N], of_w[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    of_w[n] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) sums[m][n] = _mm512_setzero_si512();
  }
  for (int64_t at = 0; at < k; at += 64) {
    const __mmask64 there = k - at >= 64 ? ~0ull : (1ull << (k - at)) - 1;
    __m512i values[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      if (M == 1) __builtin_prefetch(codes + (n + N) * k + at);
      values[n] = _mm512_maskz_loadu_epi8(there, codes + n * k + at);
      of_w[n] = _mm512_dpbusd_epi32(of_w[n], one, values[n]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512i shifted = _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, x + m * k + at), flip);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] = _mm512_dpbusd_epi32(sums[m][n], shifted, values[n]);
    }
  }
  float totals[M * N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    const int64_t correction = 128 * int64_t(_mm512_reduce_add_epi32(of_w[n]));
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) totals[m * N + n] = float(int32_t(int64_t(_mm512_reduce_add_epi32(sums[m][n])) - correction));
  }
#elif defined(__AVX2__)
  const auto wide = [](const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); };
  __m256i sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][n] = _mm256_setzero_si256();
  for (int64_t at = 0; at < k; at += 16) {
    __m256i values[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) values[n] = wide(codes + n * k + at);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m256i given = wide(x + m * k + at);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] = _mm256_add_epi32(sums[m][n], _mm256_madd_epi16(given, values[n]));
    }
  }
  float totals[M * N];
  for (int i = 0; i < M * N; ++i) {
    int32_t parts[8], total = 0;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts), sums[i / N][i % N]);
    for (int32_t part : parts) total += part;
    totals[i] = float(total);
  }
#else
  float totals[M * N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) {
      int32_t total = 0;
      for (int64_t at = 0; at < k; ++at) total += int32_t(x[m * k + at]) * int32_t(codes[n * k + at]);
      totals[m * N + n] = float(total);
    }
#endif
  finish<M, N>(e, row, w.n, column, totals);
}

template <int M, int N>
void integer_strip(const Weight& w, const int8_t* x, int64_t row, int64_t from, int64_t to, const Epilogue& e) {
  int64_t column = from;
  for (; column + N <= to; column += N) integer_tile<M, N>(w, x, row, column, e);
  for (; column < to; ++column) integer_tile<M, 1>(w, x, row, column, e);
}

void integer_products(const Weight& w, const int8_t* x, int64_t m, int64_t from, int64_t to, const Epilogue& e) {
  int64_t row = 0;
  for (; row + INTEGER_ROWS <= m; row += INTEGER_ROWS) integer_strip<INTEGER_ROWS, 4>(w, x + row * w.k, row, from, to, e);
  for (; row < m; ++row) integer_strip<1, 4>(w, x + row * w.k, row, from, to, e);
}

template <Kind KIND, typename T>
void all_values(const Weight& w, int64_t from, int64_t to, void* out, bool bfloat16) {
  for (int64_t row = from; row < to; ++row)
    decode_row<KIND, T>(w, row, [&](int64_t at, const Pair& values) {
      float f[CHUNK];
      if (KIND == INT8)
        values.first.store(f), values.second.store(f + LANES);
      else
        in_order(values, f);
      if (bfloat16)
        for (int l = 0; l < CHUNK; ++l) static_cast<BFloat16*>(out)[row * w.k + at + l] = {uint16_t(bits_of(f[l]) >> 16)};  // exact
      else
        memcpy(static_cast<float*>(out) + row * w.k + at, f, sizeof f);
    });
}

void values(const Weight& w, int64_t from, int64_t to, void* out, bool bfloat16) {
  with_kind(w, [&]<Kind KIND, typename T>() { all_values<KIND, T>(w, from, to, out, bfloat16); });
}

constexpr float EPS = 1.1920928955078125e-07f;  // float32's

// `Affine` of formats/integer.py, a step for a step: "int8-row" and "int8-row-asym".
template <typename T>
void encode_row(const T* x, bool asymmetric, int64_t k, int8_t* codes, float* scale_out, int8_t* zero_out, T* operand) {
  using N = Number<T>;
  float scale, zero = 0.0f;
  if (asymmetric) {
    float low = 0.0f, high = 0.0f;
    bool nan = false;
    for (int64_t i = 0; i < k; ++i) {
      const float v = N::wide(x[i]);
      low = v < low ? v : low, high = v > high ? v : high, nan |= v != v;
    }
    if (nan) low = high = float_of(0x7FC00000);
    scale = N::round(N::round(high - low) * float(1.0 / 255.0));
    scale = scale < EPS ? EPS : scale;
    zero = N::round(-128.0f - N::round(__builtin_rintf(N::round(low / scale))));
    zero = zero != zero ? 0.0f : zero < -128.0f ? -128.0f : zero > 127.0f ? 127.0f : zero;
    *zero_out = int8_t(zero);
  } else {
    uint32_t largest = 0;  // magnitudes are ordered as their bits are, NaN on top
    for (int64_t i = 0; i < k; ++i) {
      const uint32_t magnitude = bits_of(N::wide(x[i])) & 0x7FFFFFFF;
      largest = magnitude > largest ? magnitude : largest;
    }
    scale = N::round(float_of(largest) * float(1.0 / 127.5));
    scale = scale < EPS ? EPS : scale;
  }
  *scale_out = scale;
  const float inverse = 1.0f / scale;
  for (int64_t i = 0; i < k; ++i) {
    float q = __builtin_rintf(N::wide(x[i]) * inverse) + zero;
    q = q < -128.0f ? -128.0f : q > 127.0f ? 127.0f : q;
    q = q != q ? 0.0f : q;
    codes[i] = int8_t(q);
    if (operand) operand[i] = N::narrow(q - zero);
  }
}

void encode_rows(const void* x, bool bfloat16, bool asymmetric, int64_t from, int64_t to, int64_t k, int8_t* codes, float* scale, int8_t* zero, void* operand) {
  for (int64_t r = from; r < to; ++r) {
    int8_t* z = zero ? zero + r : nullptr;
    if (bfloat16)
      encode_row(static_cast<const BFloat16*>(x) + r * k, asymmetric, k, codes + r * k, scale + r, z, operand ? static_cast<BFloat16*>(operand) + r * k : nullptr);
    else
      encode_row(static_cast<const float*>(x) + r * k, asymmetric, k, codes + r * k, scale + r, z, operand ? static_cast<float*>(operand) + r * k : nullptr);
  }
}

float lowest(const Vector& x) {
  float v[LANES], found;
  x.store(v), found = v[0];
  for (int l = 1; l < LANES; ++l) found = v[l] < found ? v[l] : found;
  return found;
}

// `Int4` of formats/int4.py: scale and zero of a group's range, in float32, then both as they are stored.
template <typename T>
void encode_group(const T* x, int64_t group, uint8_t* codes, T* scale_out, T* zero_out) {
  Vector lows = load16(x), highs = lows;
  bool nan = false;
  for (int64_t i = 0; i < group; i += LANES) {
    const Vector v = load16(x + i);
    lows = smaller(lows, v), highs = larger(highs, v), nan |= nans(v) != 0;
  }
  float low = nan ? float_of(0x7FC00000) : lowest(lows), high = nan ? low : -lowest(Vector::zero() - highs);
  float scale = high - low;
  scale = (scale < 1e-6f ? 1e-6f : scale) * float(1.0 / 15.0);
  const Vector from = Vector::all(low), step = Vector::all(scale);
  for (int64_t i = 0; i < group; i += CHUNK) {
    uint8_t q[CHUNK];
    to_codes((load16(x + i) - from) / step, q), to_codes((load16(x + i + LANES) - from) / step, q + LANES);
    for (int l = 0; l < LANES; ++l) codes[i / 2 + l] = uint8_t((q[2 * l] | q[2 * l + 1] << 4) ^ 0x88);  // q - 8
  }
  *scale_out = Number<T>::narrow(scale), *zero_out = Number<T>::narrow(low + 8.0f * scale);
}

template <typename T>
void encode_groups(const T* x, int64_t from, int64_t to, int64_t k, int64_t group, uint8_t* codes, T* scale, T* zero) {
  const int64_t groups = k / group;
  for (int64_t g = from * groups; g < to * groups; ++g) encode_group(x + g * group, group, codes + g * group / 2, scale + g, zero + g);
}

void encode_int4(const void* x, bool bfloat16, int64_t from, int64_t to, int64_t k, int64_t group, uint8_t* codes, void* scale, void* zero) {
  if (bfloat16)
    encode_groups(static_cast<const BFloat16*>(x), from, to, k, group, codes, static_cast<BFloat16*>(scale), static_cast<BFloat16*>(zero));
  else
    encode_groups(static_cast<const float*>(x), from, to, k, group, codes, static_cast<float*>(scale), static_cast<float*>(zero));
}

}  // namespace

extern const Kernels KERNELS;
const Kernels KERNELS = {arrange, products, integer_products, values, encode_rows, encode_int4};

}  // namespace aoquant::cpu::AOQUANT_LEVEL

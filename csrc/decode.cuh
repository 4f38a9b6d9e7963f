// y = x W^T for few rows of x and a packed 4-bit W, which is read once, as it lies: codes (N, K/2), two to a byte, low
// nibble = even k.
//
// W is the left operand of mma.m16n8k16, and its 16 rows are rows of W. So up to 8 rows of x cost what one row does. A
// lane holds 16 contiguous bytes of two rows of W, 32 values each, and multiplies exactly these. It may, because a dot
// product may permute k freely as long as W and x are permuted alike. Four lanes cover 128 values, a "step".
//
// Nibbles are decoded in pairs (k, k + 4), because one mask then takes both halves of a word. x lies in memory in k's
// order and is paired in registers.
//
// Warps share out K: warp s % WARPS multiplies step s and sums its steps in order. The warps' sums are added in order
// too. So a row of y is a function of that row of x and of W alone, and the same on every run.
//
// Operands are the formats' own (aoquant/formats): int4 rn(q * s + z) by one fused multiply-add; e2m1 times its block
// scale, exact; GridFlip rn(q * s + c * min(s, 0)), s signed. A multiply is written as a fused one with -0: a * b + -0
// is a * b, sign of zero included.
#pragma once

#include <type_traits>

#include "decode_call.cuh"
#include "encode_here.cuh"
#include "several.cuh"
#include "word_pairs.cuh"

// The library may hold code for other architectures too; these kernels are empty there, and are never launched.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define AOQUANT_HOPPER
#endif

namespace aoquant {

namespace decode {

// The product of an e4m3 scale and E2M1_UNIT, divided by TIMES, is one exact factor. Using it saves a multiplication,
// and makes sums too small by TIMES, a power of two. GridFlip is left out: its shifted values are rounded, and would be
// subnormal in float16.
template <int F, typename T>
struct Folded {
  static constexpr bool YES = F == NVFP4 || (F == GRIDFLIP && std::is_same_v<T, __nv_bfloat16>);
  static constexpr float TIMES = YES ? 256.0f : 1.0f;
};

// Scales of 32 values of a row as they lie in memory, and as pairs for two blocks of 16.
struct RawScale {
  uint32_t s, z;  // int4: scale and zero; FP4: bytes of scales
};
template <typename T>
struct Scale {
  uint32_t s[2], z[2];
};

// For DEVICE_ASSERT: whether W holds `bytes` of codes at p, and whether scale i is one of W's. A scale index counts the
// scales of 32 values as one (int4: of a group).
__device__ __forceinline__ bool holds_codes(const DecodeArgs& a, const uint8_t* p, int bytes) {
  return p >= a.codes && p + bytes <= a.codes + int64_t(a.n) * (a.k / 2);
}
template <int F>
__device__ __forceinline__ bool holds_scale(const DecodeArgs& a, uint32_t i) {
  return i < ((uint32_t(a.n - 1) >> a.tile_log2) + 1) * (F == INT4 ? uint32_t(a.k) >> a.group_log2 : uint32_t(a.k) / 32);
}
__device__ __forceinline__ bool holds_x(const DecodeArgs& a, int token, int at, int values) {
  return token >= 0 && token < a.m && at >= 0 && at + values <= a.k;
}

// Loads 1 or 2 bytes, or gives 0. The load is predicated, because selecting 0 afterwards would wait for the load. It is
// volatile, so that it stays behind the wait for the kernel that wrote the bytes.
template <int BYTES>
__device__ __forceinline__ uint32_t load_if(const void* p, bool there) {
  uint32_t v;
  if constexpr (BYTES == 1)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.u8 %0, [%1];\n}" : "=r"(v) : "l"(p), "r"(int(there)));
  else
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.u16 %0, [%1];\n}" : "=r"(v) : "l"(p), "r"(int(there)));
  return v;
}

// row: the row's first scale. A lane outside K gets zeros as scales: its codes are another lane's, and its x is zero.
template <int F>
__device__ __forceinline__ RawScale load_scale(const DecodeArgs& a, uint32_t row, int at, bool inside) {
  RawScale r;
  const uint32_t i = row + (F == INT4 ? uint32_t(at) >> a.group_log2 : uint32_t(at) / 32);
  DEVICE_ASSERT(!inside || holds_scale<F>(a, i));
  r.s = load_if<F == MXFP4 ? 1 : 2>(static_cast<const uint8_t*>(a.scale) + uint64_t(i) * (F == MXFP4 ? 1 : 2), inside);
  r.z = F == INT4 ? load_if<2>(static_cast<const uint8_t*>(a.zero) + uint64_t(i) * 2, inside) : 0;
  return r;
}

template <int F, typename T>
__device__ __forceinline__ Scale<T> scale_pairs(const RawScale& r, const DecodeArgs& a) {
  Scale<T> p;
  if constexpr (F == INT4) {
    p.s[0] = p.s[1] = __byte_perm(r.s, 0, 0x1010);
    p.z[0] = p.z[1] = __byte_perm(r.z, 0, 0x1010);
  } else if constexpr (F == MXFP4) {
    uint32_t bits = (r.s << 7) | (r.s == 0 || r.s == 255 ? 0x40u : 0u);  // bf16; byte 0 is 2^-127, 255 NaN
    p.s[0] = p.s[1] = bits * 0x10001u;
  } else {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(r.s)));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float s = __half2float(__ushort_as_half(uint16_t(halves >> (16 * i))));
      p.s[i] = Pair<T>::both(Folded<F, T>::YES ? s * Pair<T>::FOLDED_UNIT : s);
      if constexpr (F == GRIDFLIP) p.z[i] = Pair<T>::rounded((i ? a.odd_shift : a.shift) * fminf(s, 0.0f) / Folded<F, T>::TIMES);
    }
  }
  return p;
}

// Pairs (k, k + 4), (k + 1, k + 5), ... of 8 nibbles: operands.
template <int F, typename T>
__device__ __forceinline__ void operands(uint32_t (&out)[4], uint32_t w, uint32_t s, uint32_t z) {
  using P = Pair<T>;
  if constexpr (F == INT4) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      uint32_t v;  // (w >> 4 p & 0x000F000F) ^ MAGIC, which the compiler would take two instructions for
      asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(v) : "r"(w >> (4 * p)), "r"(0x000F000Fu), "r"(P::MAGIC));
      out[p] = P::fma(P::fma(v, P::ONE, P::MINUS_OFFSET), s, z);
    }
  } else {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t v = w >> (8 * h);
      uint32_t low = P::e2m1_low(v), high = P::e2m1_high(v);
      if constexpr (!Folded<F, T>::YES) low = mul<T>(low, P::E2M1_UNIT), high = mul<T>(high, P::E2M1_UNIT);
      if constexpr (F == GRIDFLIP) {
        out[2 * h] = P::fma(low, s, z);
        out[2 * h + 1] = P::fma(high, s, z);
      } else {
        out[2 * h] = mul<T>(low, s);
        out[2 * h + 1] = mul<T>(high, s);
      }
    }
  }
}

__device__ __forceinline__ uint4 load_codes(const uint8_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// 16 bytes, or that many zeros
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));
}

// Sends a block's rows of a small W to the L2 cache while the kernel in front still ends: codes in one piece, scales by
// lines. All writes go through L2, so reads after the wait see what a refresh of the weight still writes. Measured at
// one row in a graph: int4 of 2048 x 2048 takes 2.5 us, and 2.8 without this; int4 of 4096 x 14336 takes 16.1 us, and
// 11.8 without, so W's above PREFETCHED are left out.
constexpr int64_t PREFETCHED = 1 << 22;  // values of W
template <int F>
__device__ __forceinline__ void prefetch_rows(const DecodeArgs& a, int first, int most_rows) {
  if (int64_t(a.n) * a.k > PREFETCHED) return;
  DEVICE_ASSERT(first < a.n);
  const int rows = min(most_rows, a.n - first), row = F == FP8 ? a.k : a.k / 2;
  const int width = F == INT4 ? (a.k >> a.group_log2) * 2 : a.k / (F == MXFP4 ? 32 : 16);
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(a.codes + int64_t(first) * row), "r"(rows * row) : "memory");
  if constexpr (F == FP8) return;  // its scales are factors of sums
  const int top = first >> a.tile_log2, bytes = (((first + rows - 1) >> a.tile_log2) - top + 1) * width;
  for (int at = int(threadIdx.x) * 128; at < bytes; at += int(blockDim.x) * 128) {
    const int64_t place = int64_t(top) * width + at;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const uint8_t*>(a.scale) + place));
    if constexpr (F == INT4) asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const uint8_t*>(a.zero) + place));
  }
}

// Sends the factors and summands of a block's outputs to the L2 cache. They are read after the last sum, and the whole
// kernel would wait for them if they came from memory.
template <typename T>
__device__ __forceinline__ void prefetch_columns(const DecodeArgs& a, int first, int most_rows) {
  const int row = threadIdx.x;
  if (row >= min(most_rows, a.n - first)) return;
  if (a.alpha_w && (row == 0 || a.alpha_w_stride)) asm volatile("prefetch.global.L2 [%0];" ::"l"(a.alpha_w + (first + row) * int64_t(a.alpha_w_stride)));
  const int width = a.bias_is_float ? 4 : int(sizeof(T));
  if (a.bias) asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const uint8_t*>(a.bias) + int64_t(first + row) * width));
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Into the shared memory of the first block of the cluster, at the place that it has in this one's.
__device__ __forceinline__ void send_to_first(const float* place, float v) {
  asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, 0;\nst.shared::cluster.f32 [r], %1;\n}" ::"r"(uint32_t(__cvta_generic_to_shared(place))), "f"(v)
               : "memory");
}

// The factors of outputs in row m and in column n, and the summand of column n. An absent factor is 1 and an absent
// summand is -0: both leave every value as it is.
__device__ __forceinline__ float alpha_x_of(const DecodeArgs& a, int m) { return a.alpha_x ? a.alpha_x[m * a.alpha_x_stride] : 1.0f; }
__device__ __forceinline__ float alpha_w_of(const DecodeArgs& a, int n) { return a.alpha_w ? a.alpha_w[n * a.alpha_w_stride] : 1.0f; }
template <typename T>
__device__ __forceinline__ float bias_of(const DecodeArgs& a, int n) {
  return !a.bias ? -0.0f : a.bias_is_float ? static_cast<const float*>(a.bias)[n] : float(static_cast<const T*>(a.bias)[n]);
}

// One output, scaled and biased, before its rounding.
template <typename T>
__device__ __forceinline__ float finished(const DecodeArgs& a, float v, float alpha_x, int n) {
  return v * a.times * alpha_x * alpha_w_of(a, n) + bias_of<T>(a, n);
}

template <typename T>
__device__ __forceinline__ void store(const DecodeArgs& a, float v, float alpha_x, int m, int n) {
  DEVICE_ASSERT(m >= 0 && m < a.m && n >= 0);
  if (n < a.n) static_cast<T*>(a.y)[int64_t(m) * a.n + n] = T(finished<T>(a, v, alpha_x, n));
}
template <typename T>
__device__ __forceinline__ void store(const DecodeArgs& a, float v, int m, int n) {
  store<T>(a, v, alpha_x_of(a, m), m, n);
}

#ifdef AOQUANT_HOPPER
// Computes a block's rows of y, from first_row of W on. TOKENS: rows of x, at most: 1, 2, 4 or a multiple of 8. RT:
// tiles of 16 rows of W in a block. WARPS: of a block, along K. D: steps in flight in a warp. ENCODES: the block
// encodes all of x. shared: of `shared_bytes`, or of `encoded_bytes` if that is more.
template <int F, typename T, int TOKENS, int RT, int WARPS, int D, bool ENCODES = false>
__device__ __forceinline__ void multiply(const DecodeArgs& a, const int first_row, uint8_t* shared) {
  constexpr int THREADS = 32 * WARPS, ROWS = 16 * RT, MT = (TOKENS + 7) / 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int steps = (a.k + 127) / 128, mine = steps > warp ? (steps - warp + WARPS - 1) / WARPS : 0;
  const int tokens = min(a.m, TOKENS);

  const uint8_t* rows[RT][2];
  uint32_t scales[RT][2];
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t row = min(first_row + 16 * r + 8 * h + g, a.n - 1);
      rows[r][h] = a.codes + int64_t(row) * (a.k / 2);
      scales[r][h] = (row >> a.tile_log2) * (F == INT4 ? uint32_t(a.k) >> a.group_log2 : uint32_t(a.k) / 32);
    }

  // x of this slice of K: a ring of D steps, 256 bytes a token. The warp that multiplies a slice fills its ring. If the
  // block encodes x, all steps lie here instead, without a ring.
  uint8_t* ring = shared + warp * D * TOKENS * 256;
  const int chunk = lane % 16, helped = lane / 16;
  const uint32_t to = uint32_t(__cvta_generic_to_shared(ring)) + helped * 256 + chunk_place(chunk, helped);
  const T* from = static_cast<const T*>(a.x) + (helped < tokens ? int64_t(helped) * a.k : 0) + chunk * 8;

  uint4 codes[D][RT][2];
  RawScale raw[D][RT][2];
  float acc[RT][MT][4];
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[r][m][i] = 0.0f;

  auto fetch = [&](int stage, int i) {  // stage is a constant
    if (i < mine) {
      const int start = (warp + i * WARPS) * 128, lane_start = start + 32 * t, at = min(lane_start, a.k - 32);
#pragma unroll
      for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          DEVICE_ASSERT(holds_codes(a, rows[r][h] + at / 2, 16));
          codes[stage][r][h] = load_codes(rows[r][h] + at / 2);
          raw[stage][r][h] = load_scale<F>(a, scales[r][h], at, lane_start < a.k);
        }
      const bool inside = start + chunk * 8 < a.k;
#pragma unroll
      for (int u = 0; u < (ENCODES ? 0 : (TOKENS + 1) / 2); ++u)
        if (TOKENS % 2 == 0 || helped + 2 * u < TOKENS) {
          const bool there = inside && helped + 2 * u < tokens;  // zero where there is none
          DEVICE_ASSERT(!there || holds_x(a, helped + 2 * u, start + chunk * 8, 8));
          copy_async(to + (stage * TOKENS + 2 * u) * 256, there ? from + int64_t(2 * u) * a.k + start : from, there);
        }
    }
    if constexpr (!ENCODES) asm volatile("cp.async.commit_group;");
  };
  // the kernel before this one may still run (programmatic launch): until it has ended, nothing is read
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  auto fetch_first = [&] {
#pragma unroll
    for (int d = 0; d < D - 1; ++d) fetch(d, d);
  };
  __shared__ float alpha_here[TOKENS];
  __shared__ uint32_t most_here[TOKENS];
  if constexpr (ENCODES) {
    EncodedHere<T, THREADS, NVFP4_ROW> x(a, tokens);
    fetch_first();
    encode_steps(x, shared, alpha_here, most_here);
  } else {
    fetch_first();
  }
  for (int base = 0; base < mine; base += D) {
#pragma unroll
    for (int d = 0; d < D; ++d) {
      const int i = base + d;
      if (i >= mine) break;
      if constexpr (!ENCODES) asm volatile("cp.async.wait_group %0;" ::"n"(D - 2) : "memory");
      // now every lane's copies of this step have arrived, and no lane still reads the stage that is filled next
      __syncwarp();
      fetch((d + D - 1) % D, i + D - 1);
      Scale<T> scale[RT][2];
#pragma unroll
      for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) scale[r][h] = scale_pairs<F, T>(raw[d][r][h], a);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t lower[RT][4], upper[RT][4];
#pragma unroll
        for (int r = 0; r < RT; ++r) {
          const uint32_t w0 = (&codes[d][r][0].x)[j], w1 = (&codes[d][r][1].x)[j];
          operands<F, T>(lower[r], w0, scale[r][0].s[j / 2], scale[r][0].z[j / 2]);
          operands<F, T>(upper[r], w1, scale[r][1].s[j / 2], scale[r][1].z[j / 2]);
        }
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          uint4 v = make_uint4(0, 0, 0, 0);
          if (ENCODES) {  // a lane without a token reads another lane's; its sums are not stored
            const int token = min(8 * m + g, tokens - 1);
            v = *reinterpret_cast<const uint4*>(shared + ((warp + i * WARPS) * tokens + token) * 256 + ((4 * j + t) ^ ((token & 1) * 4)) * 16);
          } else if (TOKENS >= 8 || g < TOKENS)
            v = *reinterpret_cast<const uint4*>(ring + (d * TOKENS + 8 * m + g) * 256 + ((4 * j + t) ^ ((g & 1) * 4)) * 16);
          const uint32_t x0 = __byte_perm(v.x, v.z, 0x5410), x1 = __byte_perm(v.x, v.z, 0x7632);
          const uint32_t x2 = __byte_perm(v.y, v.w, 0x5410), x3 = __byte_perm(v.y, v.w, 0x7632);
#pragma unroll
          for (int r = 0; r < RT; ++r) {
            const uint32_t first[4] = {lower[r][0], upper[r][0], lower[r][1], upper[r][1]};
            const uint32_t second[4] = {lower[r][2], upper[r][2], lower[r][3], upper[r][3]};
            Pair<T>::mma(acc[r][m], first, x0, x1);
            Pair<T>::mma(acc[r][m], second, x2, x3);
          }
        }
      }
    }
  }

  // slices are added in order
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  float* partial = reinterpret_cast<float*>(shared);  // (WARPS, TOKENS, ROWS + 4): a pad, for the banks
  constexpr int PITCH = ROWS + 4;
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 16 * r + g + 8 * (i / 2), token = 8 * m + 2 * t + i % 2;
        if (TOKENS >= 8 || token < TOKENS) partial[(warp * TOKENS + token) * PITCH + row] = acc[r][m][i];
      }
  __syncthreads();
  const int outputs = tokens * ROWS;
  for (int o = threadIdx.x; o < outputs; o += THREADS) {
    const int token = o / ROWS, row = o % ROWS;
    float v = partial[token * PITCH + row];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) v += partial[(w * TOKENS + token) * PITCH + row];
    store<T>(a, v, ENCODES ? alpha_here[token] : alpha_x_of(a, token), token, first_row + row);
  }
}
#endif

template <int TOKENS, int RT, int WARPS, int D>
constexpr int shared_bytes() {
  constexpr int ring = WARPS * D * TOKENS * 256, partial = WARPS * TOKENS * (16 * RT + 4) * 4;
  return ring > partial ? ring : partial;
}

// Shared memory for x of m rows that is encoded here.
inline int encoded_bytes(const DecodeArgs& a) { return (a.k + 127) / 128 * a.m * 256; }

template <int F, typename T, int TOKENS, int RT, int WARPS, int D, int COUNT, bool ENCODES>
__global__ void __launch_bounds__(32 * WARPS) kernel(const __grid_constant__ Several<COUNT> several) {
#ifdef AOQUANT_HOPPER
  const BlockPlace place = place_of(several);
  const DecodeArgs& a = several.of[place.which];
  extern __shared__ __align__(128) uint8_t shared[];
  prefetch_rows<F>(a, place.block * 16 * RT, 16 * RT);
  prefetch_columns<T>(a, place.block * 16 * RT, 16 * RT);
  multiply<F, T, TOKENS, RT, WARPS, D, ENCODES>(a, place.block * 16 * RT, shared);
#endif
}

template <int F, typename T, int TOKENS, int RT, int WARPS, int D, bool ENCODES>
cudaError_t launch_as(const DecodeArgs& a, cudaStream_t stream) {
  constexpr int ROWS = 16 * RT, least = shared_bytes<TOKENS, RT, WARPS, D>();
  static_assert(D >= 2);
  const int x = ENCODES ? encoded_bytes(a) : 0, bytes = x > least ? x : least;
  return launch_siblings(kernel<F, T, TOKENS, RT, WARPS, D, 1, ENCODES>, kernel<F, T, TOKENS, RT, WARPS, D, SIBLINGS, ENCODES>, a,
                         ROWS, 32 * WARPS, bytes, stream);
}

template <int F, typename T, int TOKENS, int RT, int WARPS, int D>
cudaError_t launch(const DecodeArgs& a, cudaStream_t stream) {
  if constexpr (F == NVFP4 && TOKENS == 1)
    if (a.encodes) return launch_as<F, T, TOKENS, RT, WARPS, D, true>(a, stream);
  return launch_as<F, T, TOKENS, RT, WARPS, D, false>(a, stream);
}

}  // namespace decode
}  // namespace aoquant

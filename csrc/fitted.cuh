// A fitted transform of blocks (transforms/wush.py) on the float64 tensor cores. While the result is on the chip it
// becomes values, its largest magnitude, or the codes of NVFP4 and MXFP4.
//
// The reference sums a block's products in float64 and rounds once to float32. So does this kernel, by mma.m16n8k16 of
// float64; Hopper's runs 128 multiply-adds a cycle on a multiprocessor. Products of values of 8 and 24 bits are exact
// there. Sums are exact too, unless magnitudes in a block are further apart than about 2^20. Then the order of
// additions, which is not defined, may show in one value of many millions.
//
// A warp multiplies 16 rows of x by the matrices of 64 columns (one matrix of 128, in turns). Inside a block k may be
// permuted freely, if both operands are permuted alike: a lane multiplies the G / 4 neighbouring values that it loads.
// The matrices lie in shared memory as float64, in the order in which lanes want them.
#pragma once

#include "block_scales.cuh"
#include "check.cuh"

namespace aoquant::fitted {

enum Result { VALUES = 0, AMAX = 1, AS_NVFP4 = 2, AS_MXFP4 = 3 };

// x (rows, k); matrix (k / G, G, G) float32. VALUES: y (rows, k) in a type of `Out`. AMAX: partials, one for each block
// of threads. Codes: codes, scale and, for NVFP4, its outer scale: found from n_partials partials, or `known`, or none
// if that is 0.
struct Call {
  const void* x;
  const float* matrix;
  void* y;
  int32_t* partials;
  uint8_t* codes;
  uint8_t* scale;
  float* outer;
  int64_t rows;
  int k, strips, back, out, n_partials;
  float known;
};

template <typename T, int G>
struct Layout {
  static constexpr int COLUMNS = G > 64 ? G : 64;
  // 128 float32 values of two rows take half of a thread's registers
  static constexpr int WARPS = G > 64 && sizeof(T) < 4 ? 16 : 8, THREADS = 32 * WARPS, RESIDENT = G > 64 ? 1 : 2;
  static constexpr int BLOCKS = COLUMNS / G, KT = G / 16, NT = G / 8;  // matrices; mma's along k and along n of one
  static constexpr int TURN = G < 32 || COLUMNS * sizeof(T) > 128 ? 16 : 32;  // outputs of a matrix that are summed at once
  static constexpr int STAGE = 16 * 72 * 4, MATRIX = COLUMNS * G * 8;  // bytes: of results of a warp, of all matrices
  static constexpr int bytes(int result) { return MATRIX + (result >= AS_NVFP4 ? WARPS * STAGE : 0); }
};

// d += a b: 16 rows by 8 columns by 16 of k. a[2 v + h]: row lane / 4 + 8 h, b[v]: column lane / 4, both at k = lane %
// 4 + 4 v; d[2 h + e]: row lane / 4 + 8 h, column 2 (lane % 4) + e.
__device__ __forceinline__ void multiply(double (&d)[4], const double (&a)[8], const double (&b)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7,%8,%9,%10,%11}, {%12,%13,%14,%15}, {%0,%1,%2,%3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
#endif
}

// The G / 4 neighbouring values of two rows that a lane multiplies, as they lie in memory, for all matrices.
template <typename T, int G>
struct Rows {
  static constexpr int BYTES = G / 4 * int(sizeof(T)), WORDS = BYTES / 4;
  uint32_t words[2][Layout<T, G>::BLOCKS][WORDS];

  __device__ __forceinline__ void load(const Call& p, int64_t row, int column) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int b = 0; b < Layout<T, G>::BLOCKS; ++b) {
        const bool there = row + 8 * h < p.rows && column + b * G < p.k;
        const T* from = static_cast<const T*>(p.x) + (row + 8 * h) * p.k + column + b * G;
        if constexpr (BYTES == 8) {
          const uint2 v = there ? __ldg(reinterpret_cast<const uint2*>(from)) : make_uint2(0, 0);
          words[h][b][0] = v.x, words[h][b][1] = v.y;
        } else {
#pragma unroll
          for (int i = 0; i < WORDS; i += 4) {
            const uint4 v = there ? __ldg(reinterpret_cast<const uint4*>(from) + i / 4) : make_uint4(0, 0, 0, 0);
            words[h][b][i] = v.x, words[h][b][i + 1] = v.y, words[h][b][i + 2] = v.z, words[h][b][i + 3] = v.w;
          }
        }
      }
  }
  // a of `multiply`, for the j-th 16 of k.
  __device__ __forceinline__ void operand(double (&a)[8], int b, int j) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int v = 0; v < 4; ++v) a[2 * v + h] = double(__uint_as_float(words[h][b][4 * j + v]));
      } else {
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          float low, high;
          unpack2<T>(words[h][b][2 * j + v], low, high);
          a[4 * v + h] = double(low), a[4 * v + 2 + h] = double(high);
        }
      }
    }
  }
};

// The place of the fragment of b for 8 outputs and 16 of k: two vectors of two numbers a lane, lanes side by side.
template <typename T, int G>
__device__ __forceinline__ int fragment(int b, int n, int j) {
  return ((b * Layout<T, G>::NT + n) * Layout<T, G>::KT + j) * 128;
}

template <typename T, int G>
__device__ __forceinline__ void fill(double* matrices, const Call& p, int strip) {
  using L = Layout<T, G>;
  for (int i = threadIdx.x; i < L::COLUMNS * G; i += L::THREADS) {
    const int inside = i % 128, half = inside / 64, lane = inside / 2 % 32, v = 2 * half + inside % 2, f = i / 128;
    const int j = f % L::KT, n = f / L::KT % L::NT, b = f / L::KT / L::NT, output = 8 * n + lane / 4, input = G / 4 * (lane % 4) + 4 * j + v;
    const int64_t block = int64_t(strip) * L::BLOCKS + b;
    const float* from = p.matrix + (block * G + (p.back ? input : output)) * G + (p.back ? output : input);
    matrices[i] = block * G < p.k ? double(*from) : 0.0;
  }
}

// Results of 16 rows and 64 columns. A row takes 72 words, and halves of 8 words are exchanged in every other 4 rows.
// So neither writing pairs nor reading 16 bytes meets a bank twice.
__device__ __forceinline__ int staged(int row, int column) { return row * 72 + (column ^ (row & 4)); }

template <typename V>
__device__ __forceinline__ void store_pair(void* y, int64_t at, float a, float b) {
  if constexpr (std::is_same_v<V, float>) *reinterpret_cast<float2*>(static_cast<float*>(y) + at) = make_float2(a, b);
  else *reinterpret_cast<uint32_t*>(static_cast<V*>(y) + at) = pack_values(a, b, V{});
}

// A lane's two blocks of 16 of the 64 columns from `column` on: rows `lane % 8` and 8 more.
template <int RESULT>
__device__ __forceinline__ void encode(const Call& p, const float* stage, int64_t first_row, int column, float outer, float inverse_outer) {
  const int lane = threadIdx.x % 32, at = lane / 8 * 16;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane % 8 + 8 * h;
    float v[16];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float4 four = *reinterpret_cast<const float4*>(stage + staged(row, at + 4 * q));
      v[4 * q] = four.x, v[4 * q + 1] = four.y, v[4 * q + 2] = four.z, v[4 * q + 3] = four.w;
    }
    uint32_t most = absmax_bits(v);
    if constexpr (RESULT == AS_MXFP4) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 8));
    const BlockScale scale = RESULT == AS_MXFP4 ? mxfp4_scale(most) : nvfp4_scale(most, outer, inverse_outer);
    const uint2 codes = fp4_codes(v, scale);
    if (first_row + row >= p.rows || column + at >= p.k) continue;
    const int64_t value = (first_row + row) * p.k + column + at;
    DEVICE_ASSERT(value >= 0 && value + 16 <= p.rows * p.k);
    *reinterpret_cast<uint2*>(p.codes + value / 2) = codes;
    if constexpr (RESULT == AS_NVFP4) p.scale[value / 16] = uint8_t(scale.byte);
    else if (at % 32 == 0) p.scale[value / 32] = uint8_t(scale.byte);
  }
}

// The outer scale, by all threads; `most` is theirs to use.
template <int THREADS>
__device__ __forceinline__ float find_outer(const Call& p, uint32_t* warps) {
  if (!p.n_partials) return p.known > 0.0f ? p.known : 1.0f;
  uint32_t most = 0;
  for (int i = threadIdx.x; i < p.n_partials; i += THREADS) most = max(most, uint32_t(p.partials[i]));
  most = __reduce_max_sync(0xFFFFFFFFu, most);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < THREADS / 32; ++w) most = max(most, warps[w]);
  return nvfp4_outer(most);
}

// A block of threads has a strip of 64 (128) columns, and each of its warps every gridDim.x / strips-th 16 rows. It
// makes codes from the last rows on, because the rows that the amax was found in last are still in the cache.
template <typename T, int G, int RESULT>
__global__ void __launch_bounds__(Layout<T, G>::THREADS, Layout<T, G>::RESIDENT) kernel(const Call p) {
  using L = Layout<T, G>;
  extern __shared__ __align__(16) double matrices[];
  __shared__ uint32_t warps[L::WARPS];
  let_next_begin();
  wait_for_inputs();
  const int strip = blockIdx.x % p.strips, lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  fill<T, G>(matrices, p, strip);
  float outer = 1.0f, inverse_outer = 1.0f;
  if constexpr (RESULT == AS_NVFP4) {
    outer = find_outer<L::THREADS>(p, warps);
    inverse_outer = __fdiv_rn(1.0f, outer);
    if (p.outer && blockIdx.x == 0 && threadIdx.x == 0) *p.outer = outer;
  }
  __syncthreads();
  float* stage = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(matrices) + L::MATRIX + warp * L::STAGE);
  const int64_t tiles = (p.rows + 15) / 16;
  const int stride = int(gridDim.x) / p.strips * L::WARPS, column = strip * L::COLUMNS;
  auto first_of = [&](int64_t i) { return (RESULT == AMAX ? i : tiles - 1 - i) * 16; };
  int64_t i = int(blockIdx.x) / p.strips * L::WARPS + warp;
  Rows<T, G> x;
  if (i < tiles) x.load(p, first_of(i) + g, column + G / 4 * t);
  uint32_t most = 0;
  for (; i < tiles; i += stride) {
    const int64_t row = first_of(i);
#pragma unroll
    for (int b = 0; b < L::BLOCKS; ++b)
#pragma unroll 1
      for (int first = 0; first < G; first += L::TURN) {  // which turns x into float64 again: kept, it would not fit
        double sums[L::TURN / 8][4] = {};
#pragma unroll
        for (int j = 0; j < L::KT; ++j) {
          double a[8];
          x.operand(a, b, j);
#pragma unroll
          for (int n = 0; n < L::TURN / 8; ++n) {
            const double* from = matrices + fragment<T, G>(b, first / 8 + n, j) + 2 * lane;
            const double2 low = *reinterpret_cast<const double2*>(from), high = *reinterpret_cast<const double2*>(from + 64);
            const double w[4] = {low.x, low.y, high.x, high.y};
            multiply(sums[n], a, w);
          }
        }
#pragma unroll
        for (int n = 0; n < L::TURN / 8; ++n)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float low = __double2float_rn(sums[n][2 * h]), high = __double2float_rn(sums[n][2 * h + 1]);
            const int at = b * G + first + 8 * n + 2 * t;
            if constexpr (RESULT == AMAX) {
              most = max(most, max(__float_as_uint(low) & 0x7FFFFFFFu, __float_as_uint(high) & 0x7FFFFFFFu));
            } else if constexpr (RESULT == VALUES) {
              if (row + g + 8 * h < p.rows && column + at < p.k) {
                const int64_t to = (row + g + 8 * h) * p.k + column + at;
                DEVICE_ASSERT(to + 2 <= p.rows * p.k);
                if (p.out == AS_F32) store_pair<float>(p.y, to, low, high);
                else if (p.out == AS_BF16) store_pair<__nv_bfloat16>(p.y, to, low, high);
                else store_pair<__half>(p.y, to, low, high);
              }
            } else {
              *reinterpret_cast<float2*>(stage + staged(g + 8 * h, at % 64)) = make_float2(low, high);
            }
          }
        const bool complete = (b * G + first + L::TURN) % 64 == 0;
        if (complete && b * G + first + L::TURN == L::COLUMNS && i + stride < tiles)  // x is used up
          x.load(p, first_of(i + stride) + g, column + G / 4 * t);
        if constexpr (RESULT >= AS_NVFP4)
          if (complete) {
            __syncwarp();
            encode<RESULT>(p, stage, row, column + (b * G + first) / 64 * 64, outer, inverse_outer);
            __syncwarp();
          }
      }
  }
  if constexpr (RESULT == AMAX) {
    most = __reduce_max_sync(0xFFFFFFFFu, most);
    if (lane == 0) warps[warp] = most;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
      for (int w = 1; w < L::WARPS; ++w) most = max(most, warps[w]);
      p.partials[blockIdx.x] = int32_t(most);
    }
  }
}

}  // namespace aoquant::fitted

// x of a product, encoded by the product itself, for the kernels of few rows (decode.cuh, decode_fp8.cu).
//
// A launch that encodes a row takes as long as a small product's weight takes to arrive. So here each block of threads
// encodes all of x for itself, while its first bytes of W are on their way. The operand and its scales are
// encode_rows.cuh's, because a largest magnitude does not depend on the order in which it is found.
#pragma once

#include "decode_call.cuh"
#include "row_blocks.cuh"

namespace aoquant::decode {

// The place of the 8 values of chunk c of a step of 128 among the 256 bytes of a token. Lane t wants the chunks 4 t +
// j. They are stored at 4 j + t, so that what a warp reads at once is contiguous.
__device__ __forceinline__ int chunk_place(int c, int token) { return (((c % 4) * 4 + c / 4) ^ ((token & 1) * 4)) * 16; }

// Encodes x in FORMAT, one of RowFormat, as encode_rows.cuh's kernel does. All threads of a block do it, into its
// shared memory.
template <typename T, int THREADS, int FORMAT>
struct EncodedHere {
  const T* x;
  int k, tokens, blocks, total;  // blocks of 16: of a row, of all rows
  uint4 first[2];                // this thread's first block

  // Asks for the first block before anything else is asked for, so that waiting for it waits for nothing else.
  __device__ __forceinline__ EncodedHere(const DecodeArgs& a, int tokens_)
      : x(static_cast<const T*>(a.x)), k(a.k), tokens(tokens_), blocks(a.k / 16), total(tokens_ * (a.k / 16)) {
    if (int(threadIdx.x) < total) load(first, threadIdx.x);
  }
  __device__ __forceinline__ void load(uint4 (&to)[2], int i) const {  // rows follow one another
    DEVICE_ASSERT(i < total);
#pragma unroll
    for (int h = 0; h < 2; ++h)  // volatile: behind the wait for the kernel that wrote x
      asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(to[h].x), "=r"(to[h].y), "=r"(to[h].z), "=r"(to[h].w) : "l"(x + int64_t(i) * 16 + 8 * h));
  }
  static __device__ __forceinline__ void unpack(float (&v)[16], const uint4 (&w)[2]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 f = rows::floats((&w[i / 4].x)[i % 4], T());
      v[2 * i] = f.x, v[2 * i + 1] = f.y;
    }
  }
  static __device__ __forceinline__ float scale_of(uint32_t most) {
    return FORMAT == NVFP4_ROW ? nvfp4_outer(most) : rows::through(__fmul_rn(__uint_as_float(most), OF_448), T());
  }
  // place(token, b, h): the address for half h of the b-th 16 values of a row. alpha: gets the rows' scales. most:
  // shared, for the largest magnitudes of `tokens` rows. The block has to be synchronised before any of these is read.
  template <typename Place>
  __device__ __forceinline__ void encode(Place place, float* alpha, uint32_t* most) {
    const int thread = threadIdx.x;
    if (thread < tokens) most[thread] = 0;
    __syncthreads();
    uint4 words[2] = {first[0], first[1]};
    float v[16];
    const bool whole_warps = blocks % 32 == 0;  // then a warp has blocks of one row
    for (int i = thread; i < total; i += THREADS) {
      if (i != thread) load(words, i);
      unpack(v, words);
      uint32_t mine = absmax_bits(v);
      if (whole_warps) mine = __reduce_max_sync(0xFFFFFFFFu, mine);
      if (!whole_warps || thread % 32 == 0) atomicMax(most + i / blocks, mine);
    }
    __syncthreads();
    if (thread < tokens) alpha[thread] = scale_of(most[thread]);
    words[0] = first[0], words[1] = first[1];
    for (int i = thread; i < total; i += THREADS) {
      if (i != thread) load(words, i);
      unpack(v, words);
      const int token = i / blocks, b = i - token * blocks;
      const float scale = scale_of(most[token]);
      rows::Sixteen y;
      if constexpr (FORMAT == NVFP4_ROW) y = rows::nvfp4_block<T>(v, scale, __fdiv_rn(1.0f, scale), false);
      else y = rows::fp8_block<T>(v, scale, false);
#pragma unroll
      for (int h = 0; h < 2; ++h) *reinterpret_cast<uint4*>(place(token, b, h)) = y.half[h];
    }
  }
};

// Encodes into steps of 128 values, (steps, tokens, 256) bytes, with zeros behind K. Afterwards all threads of the
// block may read them.
template <typename T, int THREADS>
__device__ __forceinline__ void encode_steps(EncodedHere<T, THREADS, NVFP4_ROW>& x, uint8_t* to, float* alpha, uint32_t* most) {
  x.encode([&](int token, int b, int h) { return to + (b / 8 * x.tokens + token) * 256 + chunk_place(b % 8 * 2 + h, token); }, alpha, most);
  const int there = x.k % 128 / 8, missing = there ? 16 - there : 0;  // chunks of the last step
  for (int i = threadIdx.x; i < x.tokens * missing; i += THREADS) {
    const int token = i / missing;
    *reinterpret_cast<uint4*>(to + (x.k / 128 * x.tokens + token) * 256 + chunk_place(there + i % missing, token)) = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
}

}  // namespace aoquant::decode

// y = x W^T for one row of x and a packed 4-bit W that is not large: all of a block's W is asked for at once.
//
// decode.cuh keeps 16 KB of W in flight on a multiprocessor where N is 2048, and where blocks outnumber what runs at once,
// each new one begins by waiting for memory. Both cost more than the bytes: 17.8 MB took 10.5 us in a compiled Llama, at
// 4.3 TB/s they would take 4.2. Here a launch has a block for each multiprocessor at most, of up to three W's that read the
// same x. A block asks the copy engine for all of its rows at its beginning, and multiplies them as they arrive, one barrier
// a part (whole_plan.cuh). Scales and x come meanwhile, through registers and asynchronous copies, and x is paired once.
//
// K is cut among 8 or 16 slices as decode.cuh cuts it among its warps for this N (`decode_warps`); where there are 8, the
// 16 warps are two groups that take units in turns. A slice sums its steps in order, slices are added in order, by the same
// products: the bits are decode.cuh's.
#pragma once

#include "copy_engine.cuh"
#include "decode.cuh"
#include "decode_rows.cuh"
#include "whole_plan.cuh"

namespace aoquant {

namespace decode {

// Bytes of a row's scales in shared memory.
template <int F>
__host__ __device__ inline int row_scales(const DecodeArgs& a) {
  return (F == INT4 ? 2 : 1) * scale_pitch<F>(a);
}

#ifdef AOQUANT_HOPPER
__device__ __forceinline__ uint4 paired_in_step(const uint4& v) {
  return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
}

// Volatile: behind the wait for the kernel that wrote it, and before what is asked for next.
template <typename T>
__device__ __forceinline__ uint4 load_x(const T* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// What an output's sum is multiplied by and added to, in registers from the kernel's beginning on: bytes of W's own, which
// lie alone in memory, and would be waited for at its end.
struct Column {
  uint32_t alpha, bias;
};
__device__ __forceinline__ uint32_t load_word_or(const void* p, bool there, uint32_t otherwise) {
  uint32_t v;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, %3;\n@p ld.global.u32 %0, [%1];\n}" : "=r"(v) : "l"(p), "r"(int(there)), "r"(otherwise));
  return v;
}
__device__ __forceinline__ Column load_column(const DecodeArgs& a, int n) {
  Column c = {load_word_or(a.alpha_w + int64_t(n) * a.alpha_w_stride, a.alpha_w != nullptr, 0x3F800000u), 0};
  if (a.bias_is_float) c.bias = load_word_or(static_cast<const float*>(a.bias) + n, true, 0);
  else c.bias = load_if<2>(static_cast<const uint8_t*>(a.bias) + 2 * int64_t(n), a.bias != nullptr);
  return c;
}
template <typename T>
__device__ __forceinline__ float bias_of_column(const DecodeArgs& a, const Column& c) {
  if (!a.bias) return -0.0f;
  if (a.bias_is_float) return __uint_as_float(c.bias);
  const unsigned short bits = static_cast<unsigned short>(c.bias);
  return float(*reinterpret_cast<const T*>(&bits));
}
#endif

template <int F, typename T, bool ENCODES>
__global__ void __launch_bounds__(32 * WHOLE_WARPS, 1)
    whole_kernel(const __grid_constant__ Several<SIBLINGS> several, const int units, const bool padded) {
#ifdef AOQUANT_HOPPER
  constexpr int THREADS = 32 * WHOLE_WARPS;
  extern __shared__ __align__(128) uint8_t shared[];
  const BlockPlace place = place_of(several);
  const DecodeArgs& a = several.of[place.which];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int first_row = place.block * units * UNIT_ROWS, left = a.n - first_row, rows = min(left, units * UNIT_ROWS);
  const int here = (rows + UNIT_ROWS - 1) / UNIT_ROWS, pitch = scale_pitch<F>(a), zeros = units * UNIT_ROWS * pitch;  // zeros: behind scales
  const WholeLayout l = whole_layout(a.k, units, row_scales<F>(a), padded);
  const uint32_t base = uint32_t(__cvta_generic_to_shared(shared)), barriers = base + l.barriers_at;
  DEVICE_ASSERT(left > 0 && a.m == 1 && a.k % 128 == 0 && a.tile_log2 == 0);
  if (threadIdx.x == 0) {
    for (int q = 0; q < here * l.parts; ++q) init_barrier(barriers + 8 * q, 1);
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
  }
  prefetch_rows<F>(a, first_row, rows);
  __syncthreads();
  // the kernel before this one may still run (programmatic launch): until it has ended, nothing is read
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");

  uint8_t *const x_here = shared + l.x_at, *const scales = shared + l.scales_at;
  // Scales and x are asked for first: every warp waits for all of them, and behind W's codes they would come last.
  Column column;
  auto ask = [&] {
    ScaleRows s = {static_cast<const uint8_t*>(a.scale), F == INT4 ? (a.k >> a.group_log2) * 2 : a.k / (F == MXFP4 ? 32 : 16), scale_width<F>(a), pitch,
                   first_row, a.n - 1, 0};
    stage(s, scales, rows, THREADS);
    if constexpr (F == INT4) {
      s.from = static_cast<const uint8_t*>(a.zero);
      stage(s, scales + zeros, rows, THREADS);
    }
    column = load_column(a, first_row + min(int(threadIdx.x), rows - 1));
    const uint8_t* const codes = a.codes + int64_t(first_row) * (a.k / 2);
#pragma unroll 1
    for (int q = warp; q < here * l.parts; q += WHOLE_WARPS) {
      const PartCopy copy = part_copy(l, a.k, left, q, lane);
      if (lane == 0) expect(barriers + 8 * q, copy.all);
      __syncwarp();
      DEVICE_ASSERT(copy.bytes == 0 || (holds_codes(a, codes + copy.from, copy.bytes) && copy.to + copy.bytes <= l.x_at));
      if (copy.bytes) copy_bytes(codes + copy.from, base + copy.to, copy.bytes, barriers + 8 * q);
    }
    __syncwarp();
  };
  __shared__ float alpha_here[1];
  __shared__ uint32_t most_here[1];
  if constexpr (ENCODES) {
    EncodedHere<T, THREADS, NVFP4_ROW> x(a, 1);
    ask();
    encode_steps(x, x_here, alpha_here, most_here);
    uint4* const chunks = reinterpret_cast<uint4*>(x_here);
    for (int c = threadIdx.x; c < a.k / 8; c += THREADS) chunks[c] = paired_in_step(chunks[c]);
  } else {
    const T* const x = static_cast<const T*>(a.x);
    uint4 next = load_x(x + 8 * min(int(threadIdx.x), a.k / 8 - 1));
    ask();
    for (int c = threadIdx.x; c < a.k / 8; c += THREADS) {
      *reinterpret_cast<uint4*>(x_here + c / 16 * 256 + chunk_place(c % 16, 0)) = paired_in_step(next);
      if (c + THREADS < a.k / 8) next = load_x(x + 8 * (c + THREADS));
    }
  }
  const float alpha_x = ENCODES ? 1.0f : alpha_x_of(a, 0);
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();  // x and scales are there

  const int slices = decode_warps(a.n), slice = warp % slices, groups = WHOLE_WARPS / slices, steps = a.k / 128;
  float* const sums = reinterpret_cast<float*>(shared + l.sums_at);  // (slices, l.units * UNIT_ROWS)
#pragma unroll 1
  for (int u = warp / slices; u < here; u += groups) {
    float acc[4] = {};
    const uint8_t *const lower_scales = scales + (u * UNIT_ROWS + g) * pitch, *const upper_scales = lower_scales + 8 * pitch;
#pragma unroll 1
    for (int part = 0; part < l.parts; ++part) {
      const int first_step = part * PART_STEPS, end = min(PART_STEPS, steps - first_step);
      const uint8_t *const lower_codes = shared + codes_at(l, u, g, first_step, t), *const upper_codes = lower_codes + 8 * l.pitch;
      wait(barriers + 8 * (u * l.parts + part), 0);
#pragma unroll 2
      for (int s = slice; s < end; s += slices) {
        const int at = scale_at<F>(a, (first_step + s) * 128 + 32 * t);
        const uint4 w[2] = {*reinterpret_cast<const uint4*>(lower_codes + s * 64), *reinterpret_cast<const uint4*>(upper_codes + s * 64)};
        auto raw = [&](const uint8_t* p) {
          RawScale r = {};
          if constexpr (F == MXFP4) r.s = *p;
          else r.s = *reinterpret_cast<const uint16_t*>(p);
          if constexpr (F == INT4) r.z = *reinterpret_cast<const uint16_t*>(p + zeros);
          return r;
        };
        const RawScale lower_raw = raw(lower_scales + at), upper_raw = raw(upper_scales + at);
        uint4 x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = *reinterpret_cast<const uint4*>(x_here + (first_step + s) * 256 + (4 * j + t) * 16);
        const Scale<T> scale[2] = {scale_pairs<F, T>(lower_raw, a), scale_pairs<F, T>(upper_raw, a)};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t lower[4], upper[4];
          operands<F, T>(lower, (&w[0].x)[j], scale[0].s[j / 2], scale[0].z[j / 2]);
          operands<F, T>(upper, (&w[1].x)[j], scale[1].s[j / 2], scale[1].z[j / 2]);
          const uint32_t first[4] = {lower[0], upper[0], lower[1], upper[1]}, second[4] = {lower[2], upper[2], lower[3], upper[3]};
          Pair<T>::mma(acc, first, x[j].x, x[j].y);
          Pair<T>::mma(acc, second, x[j].z, x[j].w);
        }
      }
    }
    if (t == 0) {  // of the eight columns of a product, which are alike
      float* const to = sums + (slice * l.units + u) * UNIT_ROWS + g;
      to[0] = acc[0], to[8] = acc[2];
    }
  }
  __syncthreads();
  if (int(threadIdx.x) < rows) {
    float v = sums[threadIdx.x];
    for (int s = 1; s < slices; ++s) v += sums[s * l.units * UNIT_ROWS + threadIdx.x];
    const float alpha = ENCODES ? alpha_here[0] : alpha_x;
    v = v * a.times * alpha * __uint_as_float(column.alpha) + bias_of_column<T>(a, column);
    static_cast<T*>(a.y)[first_row + threadIdx.x] = T(v);
  }
#endif
}

template <int F, typename T>
cudaError_t launch_whole(const DecodeArgs& a, cudaStream_t stream) {
  const bool padded = !(few_forms() & FORM_CHUNKS);
  const Several<SIBLINGS> several = several_of<SIBLINGS>(a, a.whole * UNIT_ROWS);
  const int bytes = whole_layout(a.k, a.whole, row_scales<F>(a), padded).bytes, blocks = several.ends[SIBLINGS - 1];
  if constexpr (F == NVFP4)
    if (a.encodes) return launch_kernel<1>(whole_kernel<F, T, true>, blocks, 32 * WHOLE_WARPS, bytes, stream, several, a.whole, padded);
  return launch_kernel<1>(whole_kernel<F, T, false>, blocks, 32 * WHOLE_WARPS, bytes, stream, several, a.whole, padded);
}

}  // namespace decode
}  // namespace aoquant

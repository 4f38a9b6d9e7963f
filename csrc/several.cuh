// Launches the kernels of few rows: for one W, or for several that read the same x, such as q, k and v. A block of
// threads finds by its number which W it has.
#pragma once

#include "decode_call.cuh"

namespace aoquant {

namespace decode {

// Weights multiplied in one launch; they have the same K and the same split. ends[i]: number of blocks of weights 0 to
// i.
template <int COUNT>
struct Several {
  DecodeArgs of[COUNT];
  int ends[COUNT];
};

// Which W a block of threads has, and which of that W's blocks it is.
struct BlockPlace {
  int which, block;
};
template <int COUNT>
__device__ __forceinline__ BlockPlace place_of(const Several<COUNT>& several) {
  BlockPlace place = {0, int(blockIdx.x)};
#pragma unroll
  for (int i = 1; i < COUNT; ++i)
    if (int(blockIdx.x) >= several.ends[i - 1]) place = {i, int(blockIdx.x) - several.ends[i - 1]};
  return place;
}

// a and its siblings, with blocks of `rows` rows of W.
template <int COUNT>
Several<COUNT> several_of(const DecodeArgs& a, int rows) {
  Several<COUNT> several = {};
  const DecodeArgs* w = &a;
  int end = 0;
  for (int i = 0; i < COUNT; ++i) {
    if (w) {
      several.of[i] = *w, several.of[i].times = a.times;
      end += (w->n + rows - 1) / rows;
      w = w->sibling;
    }
    several.ends[i] = end;
  }
  return several;
}

// Launches the blocks of a kernel, in clusters of CK; they may start before the kernel in front has ended.
template <int CK, typename K, typename... A>
cudaError_t launch_kernel(K* kernel, dim3 blocks, int threads, int bytes, cudaStream_t stream, const A&... a) {
  if (bytes > WITHOUT_ASKING) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {CK, 1, 1};
  config.attrs = attributes;
  config.numAttrs = CK > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, a...);
}

// The kernel of one W, or that of several. rows: of W, of a block.
template <typename One, typename Many>
cudaError_t launch_siblings(One* one, Many* many, const DecodeArgs& a, int rows, int threads, int bytes, cudaStream_t stream) {
  if (!a.sibling) return launch_kernel<1>(one, (a.n + rows - 1) / rows, threads, bytes, stream, several_of<1>(a, rows));
  const Several<SIBLINGS> several = several_of<SIBLINGS>(a, rows);
  return launch_kernel<1>(many, several.ends[SIBLINGS - 1], threads, bytes, stream, several);
}

}  // namespace decode
}  // namespace aoquant

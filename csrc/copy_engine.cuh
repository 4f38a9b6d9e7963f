// Hopper's copy engine brings bytes, or boxes of a matrix, into shared memory while the threads compute. Barriers say
// when they have arrived.
//
// The places of a ring are filled and emptied in turns. A barrier counts arrivals and bytes. When both are complete its
// parity flips, so a waiting thread names the parity of the turn that it waits for.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace aoquant {

// A place in a ring and the parity of its turn.
template <int D>
struct Turn {
  int at = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++at == D) at = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(barrier), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

// An arrival, and bytes that are still to come.
__device__ __forceinline__ void expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_box(const CUtensorMap& map, uint32_t to, int column, int row, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map),
               "r"(column), "r"(row), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void copy_bytes(const uint8_t* from, uint32_t to, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// How the copy engine reads a tensor in boxes: sizes and a box, the innermost dimension first, and strides in bytes of the
// other dimensions. The part of a box beyond the tensor's edges is zero. swizzle: how a box's pieces of 16 bytes are
// permuted in shared memory.
inline cudaError_t map_boxes(CUtensorMap* map, CUtensorMapDataType type, int rank, const void* from, const cuuint64_t* sizes, const cuuint64_t* strides,
                             const cuuint32_t* box, CUtensorMapSwizzle swizzle) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                              const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {  // through the runtime, so that nothing is linked with the driver's library
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
  }();
  if (!encode) return cudaErrorNotSupported;
  constexpr cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result = encode(map, type, cuuint32_t(rank), const_cast<void*>(from), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A contiguous matrix of bytes.
inline cudaError_t map_bytes(CUtensorMap* map, const uint8_t* from, int rows, int columns, int box_rows, int box_columns,
                             CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE) {
  const cuuint64_t sizes[2] = {cuuint64_t(columns), cuuint64_t(rows)}, pitches[1] = {cuuint64_t(columns)};
  const cuuint32_t box[2] = {cuuint32_t(box_columns), cuuint32_t(box_rows)};
  return map_boxes(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, from, sizes, pitches, box, swizzle);
}

}  // namespace aoquant

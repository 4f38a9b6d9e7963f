// The kernels of decode_plan.cuh for one format.
#include "decode_plan.cuh"

namespace aoquant {

template cudaError_t run<NVFP4, __nv_bfloat16>(const DecodeCall&);
template cudaError_t run<NVFP4, __half>(const DecodeCall&);

}  // namespace aoquant

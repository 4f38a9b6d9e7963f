// The kernels of decode_plan.cuh for one format.
#include "decode_plan.cuh"

namespace aoquant {

template cudaError_t run<MXFP4, __nv_bfloat16>(const DecodeCall&);

}  // namespace aoquant

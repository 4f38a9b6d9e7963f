// The fp8 GEMM of scaled_mm.cuh: cuBLASLt is described the product as torch describes it (scales as outer vectors, C in
// the type of the bias, 32 MB of workspace at most), so its heuristic gives the algorithm that it gives torch. It is asked
// once for a shape: asking costs ten times the launch. Whether the bits are torch's is seen where they are used, at a
// shape's first product (aoquant/ops/gemm/one_call.py).
#include <map>
#include <mutex>
#include <tuple>

#include "scaled_mm.cuh"

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#endif

namespace aoquant {

#if defined(CUBLAS_VERSION) && CUBLAS_VERSION >= 120900

namespace {

constexpr size_t WORKSPACE = 32 << 20;  // torch's on Hopper

struct Choice {
  cublasLtMatmulAlgo_t algo;
  size_t workspace;
  bool found;
};

// One product: descriptors without an allocation.
struct Product {
  cublasLtMatmulDescOpaque_t desc;
  cublasLtMatrixLayoutOpaque_t a, b, c, d;
  bool valid = true;

  template <typename T>
  void set(cublasLtMatmulDescAttributes_t name, T value) {
    valid &= cublasLtMatmulDescSetAttribute(&desc, name, &value, sizeof(value)) == CUBLAS_STATUS_SUCCESS;
  }
};

cublasLtHandle_t handle_of(int device) {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = handles.find(device);
  if (found == handles.end()) {
    cublasLtHandle_t handle = nullptr;
    cublasLtCreate(&handle);
    found = handles.emplace(device, handle).first;
  }
  return found->second;
}

cudaDataType_t data_type(ScalarType type) {
  return type == ScalarType::BFloat16 ? CUDA_R_16BF : type == ScalarType::Half ? CUDA_R_16F : CUDA_R_32F;
}

}  // namespace

bool scaled_mm_into(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& scale_x, const Tensor& scale_w, const std::optional<Tensor>& bias,
                    ScalarType type, bool fast) {
  const int64_t m = x.size(0), k = x.size(1), n = w.size(1);
  const int device = x.get_device_index();
  const cublasLtHandle_t handle = handle_of(device);
  const ScalarType bias_type = bias ? bias->scalar_type() : type;
  if (!handle) return false;
  Product p;
  // y is row-major and cuBLAS column-major: y^T = w^T x^T
  p.valid &= cublasLtMatmulDescInit(&p.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS;
  p.valid &= cublasLtMatrixLayoutInit(&p.a, CUDA_R_8F_E4M3, k, n, k) == CUBLAS_STATUS_SUCCESS;
  p.valid &= cublasLtMatrixLayoutInit(&p.b, CUDA_R_8F_E4M3, k, m, k) == CUBLAS_STATUS_SUCCESS;
  p.valid &= cublasLtMatrixLayoutInit(&p.c, data_type(bias_type), n, m, n) == CUBLAS_STATUS_SUCCESS;
  p.valid &= cublasLtMatrixLayoutInit(&p.d, data_type(type), n, m, n) == CUBLAS_STATUS_SUCCESS;
  p.set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  p.set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  p.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(scale_w.data_ptr()));
  p.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(scale_x.data_ptr()));
  p.set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t(fast));
  if (bias) {
    p.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(bias->data_ptr()));
    p.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    p.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(bias_type));
  }
  p.set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
  p.set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
  if (!p.valid) return false;

  static std::mutex mutex;
  static std::map<std::tuple<int, int64_t, int64_t, int64_t, ScalarType, int, bool>, Choice> choices;
  const auto key = std::make_tuple(device, m, n, k, type, bias ? int(bias_type) : -1, fast);
  Choice choice;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = choices.find(key);
    if (found == choices.end()) {
      cublasLtMatmulPreferenceOpaque_t preference;
      cublasLtMatmulHeuristicResult_t result = {};
      int results = 0;
      const bool asked = cublasLtMatmulPreferenceInit(&preference) == CUBLAS_STATUS_SUCCESS &&
                         cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE, sizeof(WORKSPACE)) ==
                             CUBLAS_STATUS_SUCCESS &&
                         cublasLtMatmulAlgoGetHeuristic(handle, &p.desc, &p.a, &p.b, &p.c, &p.d, &preference, 1, &result, &results) == CUBLAS_STATUS_SUCCESS;
      found = choices.emplace(key, Choice{result.algo, result.workspaceSize, asked && results > 0}).first;
    }
    choice = found->second;
  }
  if (!choice.found) return false;
  std::optional<Tensor> workspace;
  if (choice.workspace) {
    const int64_t size[] = {int64_t(choice.workspace)};
    workspace = torch::stable::new_empty(x, {size, 1}, ScalarType::Byte);
  }
  const float one = 1.0f, none = 0.0f;
  return cublasLtMatmul(handle, &p.desc, &one, w.data_ptr(), &p.a, x.data_ptr(), &p.b, &none, y.data_ptr(), &p.c, y.data_ptr(), &p.d, &choice.algo,
                        workspace ? workspace->data_ptr() : nullptr, choice.workspace, current_stream(x)) == CUBLAS_STATUS_SUCCESS;
}

#else

bool scaled_mm_into(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, ScalarType, bool) {
  return false;
}

#endif

}  // namespace aoquant

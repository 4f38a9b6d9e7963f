// The checks of every operator's tensors, here and in cpu/, and what makes its results: a wrong argument becomes an error
// in Python, and no kernel computes an address from it. Operators are public, and what a checkpoint says of its shapes
// reaches them.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>
#include <torch/headeronly/util/shim_utils.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <limits>

namespace aoquant {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t ANY_DIMENSIONS = -1;
constexpr size_t MOST_DIMENSIONS = 64;  // as many as torch's own loops over elements take

// An empty tensor on the device of `like`. torch::stable::new_empty finds its operator by name in each call, which takes
// three times as long.
inline Tensor make(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType type) {
  STD_TORCH_CHECK(sizes.size() <= MOST_DIMENSIONS, "results have at most ", MOST_DIMENSIONS, " dimensions");
  std::array<int64_t, MOST_DIMENSIONS> strides;
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i] > 1 ? sizes[i] : 1) strides[i] = stride;
  int32_t device_type, device_index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(), dtype, device_type, device_index, &made));
  return Tensor(made);
}

// Raises unless t is contiguous, on the device of `beside`, of `dims` dimensions, held by its storage, and aligned. Kernels
// count rows and columns in 32 bits.
inline void check_tensor(const Tensor& t, const char* name, const Tensor& beside, int64_t dims, int64_t align = 1) {
  STD_TORCH_CHECK(t.device() == beside.device(), name, " must be on the device of the other tensors");
  STD_TORCH_CHECK(dims == ANY_DIMENSIONS || t.dim() == dims, name, " must have ", dims, " dimensions, got ", t.dim());
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
  for (int64_t size : t.sizes()) STD_TORCH_CHECK(size <= std::numeric_limits<int32_t>::max(), name, " must have fewer than 2^31 rows and columns");
  if (t.numel() == 0) return;
  int64_t bytes = 0;  // FSDP empties the storage of parameters that are sharded
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(t.get(), &bytes));
  STD_TORCH_CHECK((t.storage_offset() + t.numel()) * int64_t(t.element_size()) <= bytes, name, " has no storage, or a smaller one than its shape needs");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.data_ptr()) % align == 0, name, " must be aligned to ", align, " bytes");
}

inline void check_type(const Tensor& t, const char* name, std::initializer_list<ScalarType> types) {
  for (ScalarType type : types)
    if (t.scalar_type() == type) return;
  STD_TORCH_CHECK(false, name, " has a dtype that this operator does not read");
}

// Codes and scales of one byte come as uint8, int8 or a float8.
inline void check_bytes(const Tensor& t, const char* name) { STD_TORCH_CHECK(t.element_size() == 1, name, " must have elements of one byte"); }

// One factor for all sums, or one a row.
inline void check_alpha(const Tensor& t, const char* name, const Tensor& beside, int64_t rows) {
  check_tensor(t, name, beside, ANY_DIMENSIONS, sizeof(float));
  check_type(t, name, {ScalarType::Float});
  STD_TORCH_CHECK(t.numel() == 1 || t.numel() == rows, name, " must be one number, or one a row");
}

}  // namespace aoquant

// A linear layer of few rows in one call: x (*lead, K) as the model has it, times a packed W, plus bias. If the recipe
// encodes x, this call encodes it. An eager model waits for the host in every layer. So the work around the launches is
// here and not in Python: the shape of y, the operand and its scales, and the choice of the kernels.
//
// The launches, and so the bits, are those of encode_rows.cuh and of decode.cu. If it pays, the product encodes x
// itself (encode_here.cuh), or the launch that reorders x for it does (decode_tiles.cuh), and there is one launch less.
#include <array>
#include <vector>

#include "decode_op.cuh"
#include "encode_rows.cuh"

namespace aoquant {

namespace {

Tensor aligned(const Tensor& x) {
  Tensor t = x.is_contiguous() ? x : torch::stable::contiguous(x);
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 ? torch::stable::clone(t) : t;
}

// y (*lead, n) of a layer, and its W.
struct Layer {
  DecodeWeight w;
  LinearPlan plan;
};

// The outputs of layers for one x (*lead, k). All layers encode x alike, so it is encoded once.
std::vector<Tensor> multiplied(const Tensor& given, const Layer* layers, int64_t count) {
  const auto lead = given.sizes();
  const int64_t dims = int64_t(lead.size());
  STD_TORCH_CHECK(given.is_cuda() && dims > 0 && dims <= int64_t(MOST_DIMENSIONS), "x must be on a CUDA device, of at most 64 dimensions");
  const auto type = given.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Half, "x must be bfloat16 or float16");
  const int64_t k = lead[dims - 1], m = k ? given.numel() / k : 0;
  STD_TORCH_CHECK(m <= std::numeric_limits<int32_t>::max(), "x must have fewer than 2^31 rows");
  const int encodes = layers[0].plan.encodes, values = encodes == MXFP4_ROW ? 32 : 16;  // of a block
  STD_TORCH_CHECK(encodes >= 0 && encodes <= FOUR_OVER_SIX_ROW, "the plan must name a RowFormat");
  STD_TORCH_CHECK(m > 0 && k % values == 0, "x must have rows of a multiple of ", values, " values");
  DeviceGuard guard(given.get_device_index());
  const Tensor x = aligned(given);
  check_tensor(x, "x", x, ANY_DIMENSIONS, 16);
  std::array<int64_t, MOST_DIMENSIONS> size;
  for (int64_t i = 0; i < dims - 1; ++i) size[i] = lead[i];
  std::vector<Tensor> ys;
  std::vector<DecodeProduct> products;
  ys.reserve(count), products.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(layers[i].plan.encodes == encodes, "siblings encode x alike");
    const DecodePlan packing = layers[i].plan.packing();
    check_weight(layers[i].w, type, k, packing, x);
    size[dims - 1] = layers[i].w.codes.size(0);
    ys.push_back(make(x, {size.data(), size_t(dims)}, type));
    products.push_back({ys.back(), layers[i].w, packing});
  }
  bool encoded_there = true;
  for (int64_t i = 0; i < count; ++i) {
    const int format = layers[i].plan.format, own = format == NVFP4 ? NVFP4_ROW : format == FP8 ? FP8_ROW : 0;
    const bool once = count == 1 || decode_is_few(format, m);  // many rows are encoded once for siblings
    encoded_there = encoded_there && once && encodes == own && decode_encodes(format, m, layers[i].w.codes.size(0), k);
  }
  if (encoded_there) {
    decode_into(products.data(), count, x, x.data_ptr(), m, k, {nullptr, false}, true);
    return ys;
  }
  if (!encodes) {
    decode_into(products.data(), count, x, x.data_ptr(), m, k, {nullptr, false});
    return ys;
  }
  // operand and scales in one allocation: a row of the operand, 2 k bytes, is a multiple of 4
  const Tensor operand = make(x, {m * (2 * k + 4)}, ScalarType::Byte);
  float* scales = reinterpret_cast<float*>(static_cast<uint8_t*>(operand.data_ptr()) + 2 * m * k);
  launch_encode_rows(x.data_ptr(), type, m, k, encodes, false, operand.data_ptr(), scales, current_stream(x));
  const Alpha alpha = encodes == MXFP4_ROW ? Alpha{nullptr, false} : Alpha{scales, m > 1};
  decode_into(products.data(), count, x, operand.data_ptr(), m, k, alpha);
  return ys;
}

// x (*lead, k) -> y (*lead, n); codes, scale, zero and alpha_w as decode_mm's.
Tensor linear(const Tensor& x, const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& zero, const std::optional<Tensor>& alpha_w,
              const std::optional<Tensor>& bias, int64_t plan) {
  const Layer layer = {{codes, scale, zero, alpha_w, bias}, LinearPlan(plan)};
  return multiplied(x, &layer, 1)[0];
}

// `linear` of several layers over one x.
std::vector<Tensor> siblings(const Tensor& x, const std::vector<Tensor>& codes, const std::vector<Tensor>& scale,
                             const std::vector<std::optional<Tensor>>& zero, const std::vector<std::optional<Tensor>>& alpha_w,
                             const std::vector<std::optional<Tensor>>& bias, const std::vector<int64_t>& plans) {
  const size_t count = codes.size();
  STD_TORCH_CHECK(count > 0 && scale.size() == count && zero.size() == count && alpha_w.size() == count && bias.size() == count && plans.size() == count,
                  "siblings must have as many of each tensor");
  std::vector<Layer> layers;
  layers.reserve(count);
  for (size_t i = 0; i < count; ++i) layers.push_back({{codes[i], scale[i], zero[i], alpha_w[i], bias[i]}, LinearPlan(plans[i])});
  return multiplied(x, layers.data(), int64_t(count));
}

// x (m, k) -> what launch_encode_rows makes of it, (m, k) in x's type, and the rows' scales, (m, 1) float32.
std::tuple<Tensor, Tensor> encode_rows(const Tensor& x, int64_t format, bool decoded) {
  const auto type = x.scalar_type();
  check_input(x, 2, {ScalarType::BFloat16, ScalarType::Half});
  STD_TORCH_CHECK(x.size(0) > 0 && x.size(1) > 0 && x.size(1) % 16 == 0, "x must be (m, k) with k a multiple of 16");
  STD_TORCH_CHECK(format >= NVFP4_ROW && format <= FOUR_OVER_SIX_ROW, "format must be one of RowFormat");
  STD_TORCH_CHECK(format != MXFP4_ROW || x.size(1) % 32 == 0, "x must be (m, k) with k a multiple of 32");
  DeviceGuard guard(x.get_device_index());
  Tensor out = make(x, x.sizes(), type), scale = make(x, {x.size(0), 1}, ScalarType::Float);
  launch_encode_rows(x.data_ptr(), type, x.size(0), x.size(1), int(format), decoded, out.data_ptr(), static_cast<float*>(scale.data_ptr()), current_stream(x));
  return {out, scale};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(aoquant_native, m) {
  m.def("linear(Tensor x, Tensor codes, Tensor scale, Tensor? zero, Tensor? alpha_w, Tensor? bias, int plan) -> Tensor");
  m.def("siblings(Tensor x, Tensor[] codes, Tensor[] scale, Tensor?[] zero, Tensor?[] alpha_w, Tensor?[] bias, int[] plans) -> Tensor[]");
  m.def("encode_rows(Tensor x, int format, bool decoded) -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(aoquant_native, CUDA, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("siblings", TORCH_BOX(&siblings));
  m.impl("encode_rows", TORCH_BOX(&encode_rows));
}

}  // namespace aoquant

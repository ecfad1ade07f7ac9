#include "ops/linear.h"

#include <algorithm>
#include <iterator>

#include "common/check.h"
#include "common/layout.h"

namespace mlxcel {
namespace {

WeightFormat dense_format(FloatType type) {
  switch (type) {
    case FloatType::f32:
      return WeightFormat::f32;
    case FloatType::f16:
      return WeightFormat::f16;
    case FloatType::bf16:
      return WeightFormat::bf16;
  }
  return {};
}

bool equal(const LinearParams& a, const LinearParams& b) {
  return a.rows == b.rows && a.n == b.n && a.k == b.k && a.format == b.format &&
         a.group_size == b.group_size && a.dtype == b.dtype && a.scales == b.scales &&
         a.bias == b.bias && a.has_bias == b.has_bias && a.packed == b.packed;
}

void check_group_size(const char* op, int group_size) {
  if (group_size != 32 && group_size != 64 && group_size != 128) {
    fail(op, "group_size must be 32, 64 or 128, got ", group_size, ".");
  }
}

void check_dense(const char* op, const mx::array& weight, LinearParams& params) {
  check_ndim(op, "weight", weight, 2, "[n, k]");
  params.format = dense_format(float_type(op, "weight", weight));
  params.n = weight.shape(0);
  params.k = weight.shape(1);
}

void check_quantized(const char* op, const mx::array& weight, const mx::array& scales,
                     const mx::array& biases, int group_size, int bits, LinearParams& params) {
  if (bits != 4 && bits != 8) fail(op, "bits must be 4 or 8, got ", bits, ".");
  check_group_size(op, group_size);
  check_ndim(op, "weight", weight, 2, "[n, k * bits / 32]");
  check_dtype(op, "weight", weight, mx::uint32);
  params.format = bits == 4 ? WeightFormat::q4 : WeightFormat::q8;
  params.group_size = group_size;
  params.n = weight.shape(0);
  params.k = weight.shape(1) * (32 / bits);
  if (params.k % group_size != 0) {
    fail(op, "weight must hold a multiple of group_size ", group_size, " elements a row, got ",
         params.k, ".");
  }
  params.scales = float_type(op, "scales", scales);
  check_shape(op, "scales", scales, {params.n, params.k / group_size});
  check_dtype(op, "biases", biases, scales.dtype());
  check_shape(op, "biases", biases, scales.shape());
}

/// Shapes of a packed weight and of its scales.
mx::Shape packed_shape(int n, int columns) {
  return {(n + kPackedRows - 1) / kPackedRows, columns, kPackedRows};
}

int row_words(const LinearParams& params) {
  const int per_word = values_per_word(params.format);
  return (params.k + per_word - 1) / per_word;
}

/// The parameters of a packed weight, checked against its arrays.
LinearParams packed_params(const char* op, const Arrays& packed, const PackedLinear& layout) {
  LinearParams params{};
  params.n = layout.out_features;
  params.k = layout.in_features;
  params.packed = 1;
  const std::pair<const char*, WeightFormat> formats[] = {{"float32", WeightFormat::f32},
                                                          {"float16", WeightFormat::f16},
                                                          {"bfloat16", WeightFormat::bf16},
                                                          {"q4", WeightFormat::q4},
                                                          {"q8", WeightFormat::q8}};
  const auto* found = std::find_if(std::begin(formats), std::end(formats),
                                   [&](const auto& f) { return layout.format == f.first; });
  if (found == std::end(formats)) {
    fail(op, "format must be float32, float16, bfloat16, q4 or q8, got '", layout.format, "'.");
  }
  params.format = found->second;
  const bool quantized = params.format == WeightFormat::q4 || params.format == WeightFormat::q8;
  if (packed.size() != (quantized ? 3 : 1)) {
    fail(op, "packed must hold ", quantized ? 3 : 1, " arrays for format ", layout.format, ", got ",
         packed.size(), ".");
  }
  if (params.n < 0 || params.k <= 0) {
    fail(op, "out_features and in_features must be above 0, got ", params.n, " and ", params.k,
         ".");
  }
  check_dtype(op, "packed[0]", packed[0], mx::uint32);
  check_shape(op, "packed[0]", packed[0], packed_shape(params.n, row_words(params)));
  if (quantized) {
    check_group_size(op, layout.group_size);
    if (params.k % layout.group_size != 0) {
      fail(op, "in_features must be a multiple of group_size ", layout.group_size, ", got ",
           params.k, ".");
    }
    params.group_size = layout.group_size;
    params.scales = float_type(op, "packed[1]", packed[1]);
    check_shape(op, "packed[1]", packed[1], packed_shape(params.n, params.k / layout.group_size));
    check_dtype(op, "packed[2]", packed[2], packed[1].dtype());
    check_shape(op, "packed[2]", packed[2], packed[1].shape());
  }
  return params;
}

/// What all ops check: x against k and the bias against n. Fills rows and types.
void check_operands(const char* op, const mx::array& x, const std::optional<mx::array>& bias,
                    LinearParams& params) {
  if (x.ndim() == 0) fail(op, "x must have at least one dimension, got a scalar.");
  params.dtype = float_type(op, "x", x);
  if (x.shape(-1) != params.k) {
    fail(op, "x must have a last dimension of ", params.k, " as weight has, got shape ", x.shape(),
         ".");
  }
  if (params.k == 0) fail(op, "x must have a last dimension above 0, got shape ", x.shape(), ".");
  params.rows = static_cast<int64_t>(x.size()) / params.k;
  params.out_stride = params.n;
  params.has_bias = bias.has_value();
  if (bias) {
    params.bias = float_type(op, "bias", *bias);
    check_shape(op, "bias", *bias, {params.n});
  }
}

/// The layer out of MLX's own ops.
mx::array by_mlx(const LinearParams& params, const Arrays& inputs,
                 const std::optional<mx::array>& bias, mx::Stream s) {
  const auto cast = [&](const mx::array& a) { return mx::astype(a, inputs[0].dtype(), s); };
  const mx::array out =
      params.group_size == 0
          ? mx::matmul(inputs[0], mx::transpose(cast(inputs[1]), s), s)
          : mx::quantized_matmul(inputs[0], inputs[1], cast(inputs[2]), cast(inputs[3]), true,
                                 params.group_size, params.format == WeightFormat::q4 ? 4 : 8,
                                 "affine", s);
  return bias ? mx::add(out, cast(*bias), s) : out;
}

mx::array make(const char* op, const LinearParams& params, Arrays inputs,
               const std::optional<mx::array>& bias, mx::Stream s) {
  if (s.device == mx::Device::gpu && !params.packed) {
    const GpuBackend* backend = gpu_backend();
    if (backend == nullptr || backend->linear == nullptr || !gpu_linear(params)) {
      return by_mlx(params, inputs, bias, s);
    }
  }
  if (bias) inputs.push_back(*bias);
  mx::Shape shape = inputs[0].shape();
  shape.back() = params.n;
  const mx::Dtype dtype = inputs[0].dtype();
  for (mx::array& a : inputs) a = row_contiguous(a, s);
  return mx::array(shape, dtype, std::make_shared<Linear>(s, op, params), std::move(inputs));
}

}  // namespace

mx::array linear(const mx::array& x, const mx::array& weight, const std::optional<mx::array>& bias,
                 mx::StreamOrDevice s) {
  constexpr const char* op = "linear";
  LinearParams params{};
  check_dense(op, weight, params);
  check_operands(op, x, bias, params);
  return make(op, params, {x, weight}, bias, mx::to_stream(s));
}

mx::array quantized_linear(const mx::array& x, const mx::array& weight, const mx::array& scales,
                           const mx::array& biases, const std::optional<mx::array>& bias,
                           int group_size, int bits, mx::StreamOrDevice s) {
  constexpr const char* op = "quantized_linear";
  LinearParams params{};
  check_quantized(op, weight, scales, biases, group_size, bits, params);
  check_operands(op, x, bias, params);
  return make(op, params, {x, weight, scales, biases}, bias, mx::to_stream(s));
}

Arrays pack_linear(const mx::array& weight, const std::optional<mx::array>& scales,
                   const std::optional<mx::array>& biases, int group_size, int bits,
                   mx::StreamOrDevice s_) {
  constexpr const char* op = "pack_linear";
  LinearParams params{};
  if (scales.has_value() != biases.has_value()) {
    fail(op, "scales and biases must be given together.");
  }
  Arrays inputs{weight};
  if (scales) {
    check_quantized(op, weight, *scales, *biases, group_size, bits, params);
    inputs.insert(inputs.end(), {*scales, *biases});
  } else {
    check_dense(op, weight, params);
  }
  if (params.k == 0)
    fail(op, "weight must have rows longer than 0, got shape ", weight.shape(), ".");
  const mx::Stream s = mx::to_stream(s_);
  for (mx::array& a : inputs) a = row_contiguous(a, s);
  std::vector<mx::Shape> shapes{packed_shape(params.n, row_words(params))};
  std::vector<mx::Dtype> dtypes{mx::uint32};
  for (size_t i = 1; i < inputs.size(); ++i) {
    shapes.push_back(packed_shape(params.n, params.k / group_size));
    dtypes.push_back(scales->dtype());
  }
  return mx::array::make_arrays(shapes, dtypes, std::make_shared<PackLinear>(s, params), inputs);
}

LinearParams stored_linear_params(const char* op, const mx::array& x, const Arrays& stored,
                                  const PackedLinear& layout,
                                  const std::optional<mx::array>& bias) {
  LinearParams params{};
  if (layout.group_size == 0) {
    check_dense(op, stored.at(0), params);
  } else {
    if (stored.size() != 3)
      fail(op, "a quantized layer must have 3 arrays, got ", stored.size(), ".");
    check_quantized(op, stored[0], stored[1], stored[2], layout.group_size,
                    layout.format == "q4" ? 4 : 8, params);
  }
  check_operands(op, x, bias, params);
  return params;
}

LinearParams packed_linear_params(const char* op, const mx::array& x, const Arrays& packed,
                                  const PackedLinear& layout,
                                  const std::optional<mx::array>& bias) {
  LinearParams params = packed_params(op, packed, layout);
  check_operands(op, x, bias, params);
  return params;
}

mx::array packed_linear(const mx::array& x, const Arrays& packed, const PackedLinear& layout,
                        const std::optional<mx::array>& bias, mx::StreamOrDevice s) {
  constexpr const char* op = "packed_linear";
  const LinearParams params = packed_linear_params(op, x, packed, layout, bias);
  Arrays inputs{x};
  inputs.insert(inputs.end(), packed.begin(), packed.end());
  return make(op, params, std::move(inputs), bias, mx::to_stream(s));
}

mx::array packed_rows(const mx::array& ids, const Arrays& packed, const PackedLinear& layout,
                      mx::Dtype dtype, mx::StreamOrDevice s_) {
  constexpr const char* op = "packed_rows";
  LinearParams params = packed_params(op, packed, layout);
  check_dtype(op, "ids", ids, mx::int32);
  params.dtype = float_type(op, "dtype", mx::array(0.0f, dtype));
  params.rows = static_cast<int64_t>(ids.size());
  const mx::Stream s = mx::to_stream(s_);
  Arrays inputs{ids};
  inputs.insert(inputs.end(), packed.begin(), packed.end());
  for (mx::array& a : inputs) a = row_contiguous(a, s);
  mx::Shape shape = ids.shape();
  shape.push_back(params.k);
  return mx::array(shape, dtype, std::make_shared<PackedRows>(s, params), std::move(inputs));
}

namespace {

[[noreturn]] void refuse_gpu(const char* op) {
  throw std::runtime_error(std::string("[") + op +
                           "] runs on CPU streams only: on a GPU use linear or quantized_linear.");
}

}  // namespace

void Linear::eval_gpu(const Arrays& inputs, Arrays& outputs) {
  if (params_.packed) refuse_gpu(op_);
  gpu_launcher(op_, &GpuBackend::linear)(params_, inputs, outputs, stream());
}
void PackLinear::eval_gpu(const Arrays&, Arrays&) {
  refuse_gpu(op_);
}
void PackedRows::eval_gpu(const Arrays&, Arrays&) {
  refuse_gpu(op_);
}

bool Linear::is_equivalent(const mx::Primitive& other) const {
  return equal(params_, static_cast<const Linear&>(other).params_);
}

bool PackLinear::is_equivalent(const mx::Primitive& other) const {
  return equal(params_, static_cast<const PackLinear&>(other).params_);
}

bool PackedRows::is_equivalent(const mx::Primitive& other) const {
  return equal(params_, static_cast<const PackedRows&>(other).params_);
}

}  // namespace mlxcel

#include "ops/linear.h"

#include "common/check.h"

namespace mlxcel {
namespace {

/// A graph node less per weight and call: MLX's contiguous() adds one even where nothing is copied.
mx::array row_contiguous(const mx::array& a, mx::Stream s) {
  const bool known = a.status() == mx::array::Status::available;
  return known && a.flags().row_contiguous ? a : mx::contiguous(a, false, s);
}

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

/// What both ops check: x against k and the bias against n. Fills rows and types.
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
  params.has_bias = bias.has_value();
  if (bias) {
    params.bias = float_type(op, "bias", *bias);
    check_shape(op, "bias", *bias, {params.n});
  }
}

mx::array make(const char* op, const LinearParams& params, Arrays inputs,
               const std::optional<mx::array>& bias, mx::Stream s) {
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
  check_ndim(op, "weight", weight, 2, "[n, k]");
  params.format = dense_format(float_type(op, "weight", weight));
  params.n = weight.shape(0);
  params.k = weight.shape(1);
  check_operands(op, x, bias, params);
  return make(op, params, {x, weight}, bias, mx::to_stream(s));
}

mx::array quantized_linear(const mx::array& x, const mx::array& weight, const mx::array& scales,
                           const mx::array& biases, const std::optional<mx::array>& bias,
                           int group_size, int bits, mx::StreamOrDevice s) {
  constexpr const char* op = "quantized_linear";
  if (bits != 4 && bits != 8) fail(op, "bits must be 4 or 8, got ", bits, ".");
  if (group_size != 32 && group_size != 64 && group_size != 128) {
    fail(op, "group_size must be 32, 64 or 128, got ", group_size, ".");
  }
  LinearParams params{};
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
  check_operands(op, x, bias, params);
  return make(op, params, {x, weight, scales, biases}, bias, mx::to_stream(s));
}

void Linear::eval_gpu(const Arrays&, Arrays&) {
  throw std::runtime_error(std::string("[") + op_ +
                           "] has no GPU kernel: use mx.matmul or mx.quantized_matmul there, as "
                           "mlxcel_ext." +
                           op_ + " does.");
}

bool Linear::is_equivalent(const mx::Primitive& other) const {
  const LinearParams& o = static_cast<const Linear&>(other).params_;
  return params_.rows == o.rows && params_.n == o.n && params_.k == o.k &&
         params_.format == o.format && params_.group_size == o.group_size &&
         params_.dtype == o.dtype && params_.scales == o.scales && params_.bias == o.bias &&
         params_.has_bias == o.has_bias;
}

}  // namespace mlxcel

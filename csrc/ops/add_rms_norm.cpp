#include "ops/add_rms_norm.h"

#include "common/check.h"
#include "common/layout.h"

namespace mlxcel {

std::pair<mx::array, mx::array> add_rms_norm(const mx::array& x, const mx::array& residual,
                                             const mx::array& weight, float eps, float weight_bias,
                                             mx::StreamOrDevice s_) {
  constexpr const char* op = "add_rms_norm";
  if (x.ndim() == 0) fail(op, "x must have at least one dimension, got a scalar.");
  const FloatType dtype = float_type(op, "x", x);
  const int hidden = x.shape(-1);
  if (hidden == 0) fail(op, "x must have a last dimension above 0, got shape ", x.shape(), ".");
  check_shape(op, "residual", residual, x.shape());
  check_dtype(op, "residual", residual, x.dtype());
  check_shape(op, "weight", weight, {hidden});
  check_dtype(op, "weight", weight, x.dtype());
  if (!(eps >= 0.0f)) fail(op, "eps must be at least 0, got ", eps, ".");

  const mx::Stream s = mx::to_stream(s_);
  const AddRmsNormParams params{static_cast<int64_t>(x.size()) / hidden, hidden, dtype, eps,
                                weight_bias};
  const Arrays out = mx::array::make_arrays(
      {x.shape(), x.shape()}, {x.dtype(), x.dtype()}, std::make_shared<AddRmsNorm>(s, params),
      {row_contiguous(x, s), row_contiguous(residual, s), row_contiguous(weight, s)});
  return {out[0], out[1]};
}

bool AddRmsNorm::is_equivalent(const mx::Primitive& other) const {
  const AddRmsNormParams& o = static_cast<const AddRmsNorm&>(other).params_;
  return params_.rows == o.rows && params_.hidden == o.hidden && params_.dtype == o.dtype &&
         params_.eps == o.eps && params_.weight_bias == o.weight_bias;
}

}  // namespace mlxcel

#include "ops/swiglu.h"

#include "common/check.h"
#include "common/layout.h"

namespace mlxcel {

mx::array swiglu(const mx::array& gate, const std::optional<mx::array>& up, mx::StreamOrDevice s_) {
  constexpr const char* op = "swiglu";
  if (gate.ndim() == 0) fail(op, "gate must have at least one dimension, got a scalar.");
  SwigluParams params{};
  params.dtype = float_type(op, "gate", gate);
  params.merged = !up.has_value();
  const int last = gate.shape(-1);
  if (params.merged && last % 2 != 0) {
    fail(op, "gate must have an even last dimension where up is not given, got shape ",
         gate.shape(), ".");
  }
  params.features = params.merged ? last / 2 : last;
  params.rows = last == 0 ? 0 : static_cast<int64_t>(gate.size()) / last;

  const mx::Stream s = mx::to_stream(s_);
  Arrays inputs{row_contiguous(gate, s)};
  if (up) {
    check_shape(op, "up", *up, gate.shape());
    check_dtype(op, "up", *up, gate.dtype());
    inputs.push_back(row_contiguous(*up, s));
  }
  mx::Shape shape = gate.shape();
  shape.back() = params.features;
  return mx::array(shape, gate.dtype(), std::make_shared<Swiglu>(s, params), std::move(inputs));
}

void Swiglu::eval_gpu(const Arrays&, Arrays&) {
  throw std::runtime_error(
      "[swiglu] has no GPU kernel: use mx.sigmoid(gate) * gate * up there, as mlxcel_ext.swiglu "
      "does.");
}

bool Swiglu::is_equivalent(const mx::Primitive& other) const {
  const SwigluParams& o = static_cast<const Swiglu&>(other).params_;
  return params_.rows == o.rows && params_.features == o.features && params_.merged == o.merged &&
         params_.dtype == o.dtype;
}

}  // namespace mlxcel

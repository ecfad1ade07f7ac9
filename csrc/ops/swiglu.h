#pragma once

#include <optional>

#include "backend.h"
#include "common/primitive.h"
#include "mlx/ops.h"
#include "mlx/utils.h"
#include "params/swiglu.h"

namespace mlxcel {

/// silu(gate) * up in one pass, on CPU streams only.
///
/// gate (..., features)  f32|f16|bf16, any strides
/// up   like gate; without it, gate is (..., 2 * features) and holds both: gate first, then up
/// Returns (..., features). Arithmetic is f32.
/// Throws std::invalid_argument on a shape or dtype mismatch.
mx::array swiglu(const mx::array& gate, const std::optional<mx::array>& up = std::nullopt,
                 mx::StreamOrDevice s = {});

class Swiglu : public InferencePrimitive {
 public:
  Swiglu(mx::Stream stream, const SwigluParams& params)
      : InferencePrimitive(stream, "swiglu"), params_(params) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override;
  bool is_equivalent(const mx::Primitive& other) const override;

 private:
  SwigluParams params_;
};

}  // namespace mlxcel

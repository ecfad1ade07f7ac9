#pragma once

#include "backend.h"
#include "common/primitive.h"
#include "mlx/ops.h"
#include "mlx/utils.h"
#include "params/add_rms_norm.h"

namespace mlxcel {

/// Residual addition and RMS normalisation in one pass:
///   new_residual = x + residual,  normed = rms_norm(new_residual) * (weight + weight_bias).
///
/// x, residual (..., hidden)  f32|f16|bf16, same shape and dtype, any strides
/// weight      (hidden)       dtype of x
/// eps         > 0, added to the mean square
/// weight_bias 0, or 1 for Gemma's weights
/// Returns (normed, new_residual), both like x. The sum is rounded to the dtype before it is
/// squared, so that the result equals mx.fast.rms_norm(x + residual, weight, eps); accumulation is
/// in f32. Throws std::invalid_argument on a shape or dtype mismatch.
std::pair<mx::array, mx::array> add_rms_norm(const mx::array& x, const mx::array& residual,
                                             const mx::array& weight, float eps,
                                             float weight_bias = 0.0f, mx::StreamOrDevice s = {});

class AddRmsNorm : public InferencePrimitive {
 public:
  AddRmsNorm(mx::Stream stream, const AddRmsNormParams& params)
      : InferencePrimitive(stream, "add_rms_norm"), params_(params) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    gpu_launcher(op_, &GpuBackend::add_rms_norm)(params_, inputs, outputs, stream());
  }
  bool is_equivalent(const mx::Primitive& other) const override;

 private:
  AddRmsNormParams params_;
};

}  // namespace mlxcel

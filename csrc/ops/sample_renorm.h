#pragma once

#include "backend.h"
#include "common/primitive.h"
#include "mlx/utils.h"
#include "params/sample_renorm.h"

namespace mlxcel {

/// Filtered distributions. Tokens are ranked by value, the lower index first at ties.
///   top_k_probs: exactly the first k, divided by their sum; k <= 0 or >= vocab keeps all
///   top_p_probs: the smallest set of first tokens whose sum reaches p of the row's sum; p >= 1
///                keeps all, p <= 0 one
///   min_p_probs: the tokens of at least p times the row's maximum
///   top_k_mask:  logits; the first k as they are, the rest -inf
///
/// x      (batch, vocab)  f32|f16|bf16, any strides; probabilities need not sum to 1, and values
///                        that are negative or NaN count as 0
/// values (batch)         i32 for top-k, f32 else
/// Returns (batch, vocab) of x's dtype; a row of zeros stays zero. Throws std::invalid_argument on
/// a shape or dtype mismatch.
mx::array renorm(RenormKind kind, const mx::array& x, const mx::array& values,
                 mx::StreamOrDevice s = {});

const char* renorm_name(RenormKind kind);

class Renorm : public InferencePrimitive {
 public:
  Renorm(mx::Stream stream, const RenormParams& params)
      : InferencePrimitive(stream, renorm_name(params.kind)), params_(params) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    gpu_launcher(op_, &GpuBackend::renorm)(params_, inputs, outputs, stream());
  }
  bool is_equivalent(const mx::Primitive& other) const override;

 private:
  RenormParams params_;
};

}  // namespace mlxcel

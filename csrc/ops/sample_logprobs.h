#pragma once

#include "backend.h"
#include "common/primitive.h"
#include "mlx/utils.h"
#include "params/sample_logprobs.h"

namespace mlxcel {

/// Log-probabilities (natural) of given tokens and of the largest ones, by log-softmax of the row.
///
/// logits (batch, vocab)  f32|f16|bf16, any strides
/// ids    (batch)         i32; out of range gives -inf
/// num_top 0..64, at most vocab
/// Returns logprobs f32 (batch), ranks i32 (batch): tokens at least as likely, itself included,
/// top_ids i32 and top_logprobs f32 (batch, num_top), best first, the lower index first at ties.
/// Throws std::invalid_argument on a shape or dtype mismatch. Sums in f64 (CPU) or f32 (GPU).
Arrays token_logprobs(const mx::array& logits, const mx::array& ids, int num_top,
                      mx::StreamOrDevice s = {});

class TokenLogprobs : public InferencePrimitive {
 public:
  TokenLogprobs(mx::Stream stream, const TokenLogprobsParams& params)
      : InferencePrimitive(stream, "token_logprobs"), params_(params) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    gpu_launcher(op_, &GpuBackend::token_logprobs)(params_, inputs, outputs, stream());
  }
  bool is_equivalent(const mx::Primitive& other) const override;

 private:
  TokenLogprobsParams params_;
};

}  // namespace mlxcel

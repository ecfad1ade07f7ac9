#pragma once

#include "backend.h"
#include "common/primitive.h"
#include "mlx/utils.h"
#include "params/sample_edit.h"

namespace mlxcel {

/// Logits as the sampler is to see them: mask, then bias, then penalties, as vLLM orders them.
///   masked:   -inf where bit i % 32 of word i / 32 of the row's mask is 0
///   biased:   x[id] += value
///   repetition, for tokens of prompt or output: x > 0 ? x / repetition : x * repetition
///   x -= frequency * (times in the output) + presence * (whether in the output)
///
/// logits      (batch, vocab)  f32|f16|bf16, any strides
/// rows        (batch, 8)      u32, one EditRow each
/// bias_ids    (nnz) i32, bias_values (nnz) f32; the ids of one row are all different
/// counts      (S, vocab)      u32, as count_tokens keeps them; S may be 0
/// masks       (M, words)      u32; M may be 0. Tokens beyond a mask's words are forbidden
/// Returns (batch, vocab) f32. Throws std::invalid_argument on a shape or dtype mismatch.
mx::array edit_logits(const mx::array& logits, const mx::array& rows, const mx::array& bias_ids,
                      const mx::array& bias_values, const mx::array& counts, const mx::array& masks,
                      mx::StreamOrDevice s = {});

/// Counts tokens for the penalties, in place: ++counts[rows[i], ids[i]]. With `reset`, the
/// first token's row is cleared first and the tokens are marked as a prompt's.
///
/// counts (S, vocab) u32, row-contiguous; rows, ids (n) i32. A row of -1 and an id out of range are
/// left out.
/// Returns the counts on the same buffer: use this handle from here on.
mx::array count_tokens(const mx::array& counts, const mx::array& rows, const mx::array& ids,
                       bool reset, mx::StreamOrDevice s = {});

class EditLogits : public InferencePrimitive {
 public:
  EditLogits(mx::Stream stream, const EditLogitsParams& params)
      : InferencePrimitive(stream, "edit_logits"), params_(params) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    gpu_launcher(op_, &GpuBackend::edit_logits)(params_, inputs, outputs, stream());
  }
  bool is_equivalent(const mx::Primitive& other) const override;

 private:
  EditLogitsParams params_;
};

class CountTokens : public InferencePrimitive {
 public:
  CountTokens(mx::Stream stream, const CountTokensParams& params)
      : InferencePrimitive(stream, "count_tokens"), params_(params) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override;
  // Never equal: merging two counts would drop one.
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  CountTokensParams params_;
};

}  // namespace mlxcel

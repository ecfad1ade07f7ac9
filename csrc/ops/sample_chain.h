#pragma once

#include "backend.h"
#include "common/primitive.h"
#include "mlx/utils.h"
#include "params/sample_chain.h"

namespace mlxcel {

/// Speculative sampling along a chain of drafted tokens [Leviathan 2023, Chen 2023]: draft i is
/// accepted where u_i * draft_probs[i, id] < target_probs[i, id]; at the first that is not, a token
/// is drawn from relu(target - draft), and after the last one from the target. The tokens are
/// distributed as the target's own.
///
/// draft_ids    (batch, n)            i32; an id out of range is turned down
/// draft_probs  (batch, n, vocab)     f32
/// target_probs (batch, n + 1, vocab) f32
/// rows         (batch, 4)            u32, one ChainRow each
/// Returns ids (batch, n + 1) i32, -1 after the drawn token, and num_accepted (batch) i32. Where
/// relu(target - draft) is zero everywhere the target is drawn from; where that is zero too, its
/// argmax. Throws std::invalid_argument on a shape or dtype mismatch.
Arrays chain_speculative_sample(const mx::array& draft_ids, const mx::array& draft_probs,
                                const mx::array& target_probs, const mx::array& rows,
                                mx::StreamOrDevice s = {});

class ChainSpeculativeSample : public InferencePrimitive {
 public:
  ChainSpeculativeSample(mx::Stream stream, const ChainParams& params)
      : InferencePrimitive(stream, "chain_speculative_sample"), params_(params) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    gpu_launcher(op_, &GpuBackend::chain_speculative_sample)(params_, inputs, outputs, stream());
  }
  bool is_equivalent(const mx::Primitive& other) const override;

 private:
  ChainParams params_;
};

}  // namespace mlxcel

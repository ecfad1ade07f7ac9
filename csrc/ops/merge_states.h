#pragma once

#include "backend.h"
#include "common/primitive.h"
#include "mlx/ops.h"
#include "mlx/utils.h"
#include "params/merge_states.h"

namespace mlxcel {

/// Merges groups of softmax-attention states: row m of the result is the attention over the union
/// of the tokens behind rows o_indptr[m] to o_indptr[m + 1] of the input,
///   lse = log2(sum_i 2^lse_i),  v = sum_i 2^(lse_i - lse) v_i.
///
/// v_in     (N, H, D)  f32|f16|bf16, normalised values, D <= 1024
/// lse_in   (N, H)     f32, log2
/// o_indptr (M + 1)    i32, non-decreasing; offsets are clamped to 0..N, not checked
/// Returns v (M, H, D) like v_in and lse (M, H). A group of one is copied bit for bit; an empty
/// group is 0 and -inf; a state with lse -inf is not read. Associative across regroupings, up to
/// rounding. Throws std::invalid_argument on a shape or dtype mismatch.
std::pair<mx::array, mx::array> merge_states(const mx::array& v_in, const mx::array& lse_in,
                                             const mx::array& o_indptr, mx::StreamOrDevice s = {});

class MergeStates : public InferencePrimitive {
 public:
  MergeStates(mx::Stream stream, const MergeStatesParams& params)
      : InferencePrimitive(stream, "merge_states"), params_(params) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    gpu_launcher(op_, &GpuBackend::merge_states)(params_, inputs, outputs, stream());
  }
  bool is_equivalent(const mx::Primitive& other) const override;

 private:
  MergeStatesParams params_;
};

}  // namespace mlxcel

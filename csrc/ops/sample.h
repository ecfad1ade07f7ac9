#pragma once

#include "backend.h"
#include "common/primitive.h"
#include "mlx/utils.h"
#include "params/sample.h"

namespace mlxcel {

/// Draws one token a row:
///   ids[b] = argmax over kept i of logits[b, i] / temperature + gumbel(seed, draw, i).
///
/// logits (batch, vocab)  f32|f16|bf16, any strides, vocab 1..262144
/// rows   (batch, 8)      u32, one SampleRow each
/// work   the most that any row asks for; "filters" is always right
/// joint  top_p is a share of the whole row's mass, not of what min_p and top_k left
/// temperature_last  the filters see the distribution at temperature 1
/// Returns ids i32, valid bool and rounds i32, (batch) each. A row with a NaN, or of -inf alone,
/// gets an id in range and valid false. rounds: how often top-p turned a draw down.
/// Throws std::invalid_argument on a shape or dtype mismatch. No synchronisation.
Arrays sample(const mx::array& logits, const mx::array& rows, SampleWork work, bool joint,
              bool temperature_last, mx::StreamOrDevice s = {});

class Sample : public InferencePrimitive {
 public:
  Sample(mx::Stream stream, const SampleParams& params)
      : InferencePrimitive(stream, "sample"), params_(params) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    gpu_launcher(op_, &GpuBackend::sample)(params_, inputs, outputs, stream());
  }
  bool is_equivalent(const mx::Primitive& other) const override;

 private:
  SampleParams params_;
};

}  // namespace mlxcel

// In the emulated build every op that has a Metal launcher evaluates by it, on MLX's CPU stream.
// This file takes the place of those of csrc/cpu/ that have the same names as files of metal/.
#include "ops/add_rms_norm.h"
#include "ops/merge_states.h"
#include "ops/paged_attention.h"
#include "ops/rope_append.h"
#include "ops/sample.h"
#include "ops/sample_chain.h"
#include "ops/sample_edit.h"
#include "ops/sample_logprobs.h"
#include "ops/sample_renorm.h"

namespace mlxcel {

void AddRmsNorm::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  eval_gpu(inputs, outputs);
}

void MergeStates::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  eval_gpu(inputs, outputs);
}

void PagedAttention::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  eval_gpu(inputs, outputs);
}

void RopeAppend::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  eval_gpu(inputs, outputs);
}

void Sample::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  eval_gpu(inputs, outputs);
}

void EditLogits::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  eval_gpu(inputs, outputs);
}

void CountTokens::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  eval_gpu(inputs, outputs);
}

void TokenLogprobs::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  eval_gpu(inputs, outputs);
}

void Renorm::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  eval_gpu(inputs, outputs);
}

void ChainSpeculativeSample::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  eval_gpu(inputs, outputs);
}

}  // namespace mlxcel

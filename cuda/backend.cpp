#include "backend.h"

#include "encoder.h"
#include "glue.h"

extern "C" __attribute__((visibility("default"))) const mlxcel::GpuBackend* mlxcel_gpu_backend() {
  static const mlxcel::GpuBackend table{
      .name = "cuda",
      .upload = mlxcel::cuda::upload,
      .download = mlxcel::cuda::download,
      .add_rms_norm = mlxcel::cuda::add_rms_norm,
      .paged_attention = mlxcel::cuda::paged_attention,
      .paged_attention_partial = mlxcel::cuda::paged_attention_partial,
      .merge_states = mlxcel::cuda::merge_states,
      .rope_append = mlxcel::cuda::rope_append,
      .linear = mlxcel::cuda::linear,
      .decoder_stack = mlxcel::cuda::decoder_stack,
      .sample = mlxcel::cuda::sample,
      .edit_logits = mlxcel::cuda::edit_logits,
      .count_tokens = mlxcel::cuda::count_tokens,
      .token_logprobs = mlxcel::cuda::token_logprobs,
      .renorm = mlxcel::cuda::renorm,
      .chain_speculative_sample = mlxcel::cuda::chain_speculative_sample,
  };
  return &table;
}

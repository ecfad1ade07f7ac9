#include "launchers.h"

namespace mlxcel {
namespace {

const GpuBackend kMetalBackend{
    .name = "metal",
    .add_rms_norm = &metal::add_rms_norm,
    .paged_attention = &metal::paged_attention,
    .paged_attention_partial = &metal::paged_attention_partial,
    .merge_states = &metal::merge_states,
    .rope_append = &metal::rope_append,
    .sample = &metal::sample,
    .edit_logits = &metal::edit_logits,
    .count_tokens = &metal::count_tokens,
    .token_logprobs = &metal::token_logprobs,
    .renorm = &metal::renorm,
    .chain_speculative_sample = &metal::chain_speculative_sample,
};

// Metal is linked in rather than loaded: its table is in use from the start.
const bool kRegistered = (use_gpu_backend(&kMetalBackend), true);

}  // namespace
}  // namespace mlxcel

#pragma once

#include <type_traits>

#include "backend.h"

namespace mlxcel {

template <class Params>
using LaunchFunction = std::remove_pointer_t<Launcher<Params>>;

}  // namespace mlxcel

/// Declares the launchers of a backend in a namespace of its own: one for each entry of GpuBackend,
/// which says what its inputs and outputs are. A backend defines those that its table names.
#define MLXCEL_DECLARE_LAUNCHERS(backend)                       \
  namespace mlxcel::backend {                                   \
  LaunchFunction<AddRmsNormParams> add_rms_norm;                \
  LaunchFunction<PagedAttentionParams> paged_attention;         \
  LaunchFunction<PagedAttentionParams> paged_attention_partial; \
  LaunchFunction<MergeStatesParams> merge_states;               \
  LaunchFunction<RopeAppendParams> rope_append;                 \
  LaunchFunction<LinearParams> linear;                          \
  LaunchFunction<DecoderStackParams> decoder_stack;             \
  LaunchFunction<SampleParams> sample;                          \
  LaunchFunction<EditLogitsParams> edit_logits;                 \
  LaunchFunction<CountTokensParams> count_tokens;               \
  LaunchFunction<TokenLogprobsParams> token_logprobs;           \
  LaunchFunction<RenormParams> renorm;                          \
  LaunchFunction<ChainParams> chain_speculative_sample;         \
  }  // namespace mlxcel::backend

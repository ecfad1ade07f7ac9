#pragma once

#include "attention_arrays.h"
#include "launch.h"
#include "params/add_rms_norm.h"
#include "params/linear.h"
#include "params/merge_states.h"
#include "params/rope_append.h"
#include "params/sample.h"
#include "params/sample_chain.h"
#include "params/sample_edit.h"
#include "params/sample_logprobs.h"
#include "params/sample_renorm.h"

namespace mlxcel::cuda {

// The launchers: device pointers and params in, kernels into `launch`. They know no MLX. Shapes are
// those of csrc/backend.h. Nothing is enqueued for empty shapes.

/// Without a residual (null) it is the norm of x, and new_residual a copy of x.
void launch_add_rms_norm(const AddRmsNormParams& params, const void* x, const void* residual,
                         const void* weight, void* normed, void* new_residual, Launch& launch);

void launch_merge_states(const MergeStatesParams& params, const void* v_in, const float* lse_in,
                         const int32_t* o_indptr, void* v_out, float* lse_out, Launch& launch);

/// Tiles with partial < 0 write out and lse, the others the partial buffers; with counters, the
/// last block of a merge group merges the group into out and lse.
void launch_paged_attention(const PagedAttentionParams& params, const AttentionArrays& arrays,
                            Launch& launch);

/// Operands of rope_append. Tokens of q, and those of k and v, are that many elements apart.
struct RopeAppendArrays {
  const void* q;
  const void* k;
  const void* v;
  int64_t q_stride;
  int64_t kv_stride;
  const int32_t* slots;
  const int32_t* positions;
  const float* inv_freq;
  void* q_rot;
  void* k_pages;
  void* v_pages;
};

/// Writes into k_pages and v_pages in place.
void launch_rope_append(const RopeAppendParams& params, const RopeAppendArrays& arrays,
                        Launch& launch);

/// Operands of a linear layer; scales and offsets are null where dense, bias where there is none.
struct LinearArrays {
  const void* x;
  const void* weight;
  const void* scales;
  const void* offsets;
  const void* bias;
  void* out;
};

/// For layers that gpu_linear takes.
/// gated: the weight holds gate, then up, and the output is silu(gate) * up, of half as many
/// features.
void launch_linear(const LinearParams& params, const LinearArrays& arrays, bool gated,
                   Launch& launch);

/// `cluster` is the number of blocks that share a row: 2, 4, 8 or 16; 0 chooses.
void launch_sample(const SampleParams& params, const void* logits, const SampleRow* rows,
                   int32_t* ids, bool* valid, int32_t* rounds, Launch& launch, int cluster = 0);

/// The probabilities start at multiples of 16 bytes.
void launch_chain_speculative_sample(const ChainParams& params, const int32_t* draft_ids,
                                     const float* draft_probs, const float* target_probs,
                                     const ChainRow* rows, int32_t* ids, int32_t* num_accepted,
                                     Launch& launch, int cluster = 0);

void launch_edit_logits(const EditLogitsParams& params, const void* logits, const EditRow* rows,
                        const int32_t* bias_ids, const float* bias_values, const uint32_t* counts,
                        const uint32_t* masks, float* out, Launch& launch);

/// Counts in place.
void launch_count_tokens(const CountTokensParams& params, const int32_t* rows, const int32_t* ids,
                         uint32_t* counts, Launch& launch);

void launch_token_logprobs(const TokenLogprobsParams& params, const void* logits,
                           const int32_t* ids, float* logprobs, int32_t* ranks, int32_t* top_ids,
                           float* top_logprobs, Launch& launch);

void launch_renorm(const RenormParams& params, const void* x, const RenormValue* values, void* out,
                   Launch& launch);

}  // namespace mlxcel::cuda

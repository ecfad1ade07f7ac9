#pragma once

#include <optional>
#include <string>

#include "backend.h"
#include "common/primitive.h"
#include "mlx/ops.h"
#include "mlx/utils.h"
#include "params/paged_attention.h"

namespace mlxcel {

/// The page table, the plan and the query pointers of a launch, all int32. The Python PageTable and
/// AttentionPlan hold and check them; the ops check shapes alone.
struct AttentionTable {
  mx::array kv_indptr;                 // (batch + 1) pages
  mx::array kv_indices;                // (kv_indptr[-1] or more) page ids
  mx::array kv_last_page_len;          // (batch) tokens
  std::optional<mx::array> qo_indptr;  // (batch + 1) query tokens; none: one a request
  std::optional<mx::array>
      first_page_offset;  // (batch) tokens at the front that are not the request's
};

struct AttentionTiles {
  mx::array tiles;                       // (num_tiles, 8)
  mx::array merge_indptr;                // (num_q + 1) partial rows of each query token
  std::optional<mx::array> token_order;  // query tokens of shared tiles; none: no tile is shared
  int num_partials;
  bool batch_invariant;  // of plan_attention
  int max_q_len;
  int chunks_each;  // of the plan
  int num_large;    // of the plan
};

struct AttentionOptions {
  bool causal = true;             // query i of qo_len sees kv_len - qo_len + i + 1 tokens
  float sm_scale = 1.0f;          // multiplies q k^T
  int window_left = -1;           // tokens to the left of a query's own that it sees; -1: all
  float logits_soft_cap = 0.0f;   // cap * tanh(logit / cap); 0: off
  std::string kv_layout = "NHD";  // or "HND"
};

/// Attention of ragged query tokens over the paged KV cache of their requests.
///
/// q                (nnz, num_qo_heads, head_dim)  f32|f16|bf16, any strides; head_dim 64, 80, 96,
///                  112, 128, 192 or 256; num_qo_heads = 1 to 32 times num_kv_heads
/// k_pages, v_pages (num_pages, page_size, num_kv_heads, head_dim) or HND, row-contiguous: a pool
///                  is never copied. dtype of q; on CPU also f16 or bf16 beside q in f32
/// sinks            (num_qo_heads) f32, natural-log logits that join the softmax's denominator
/// Returns out like q and lse (nnz, num_qo_heads) f32, log2, sinks included. A row that sees no
/// token is 0 and -inf (with a sink: 0 and sink * log2(e)). Accumulates in f32. Throws
/// std::invalid_argument on a shape or dtype mismatch.
std::pair<mx::array, mx::array> paged_attention(
    const mx::array& q, const mx::array& k_pages, const mx::array& v_pages,
    const AttentionTable& table, const AttentionTiles& tiles, const std::optional<mx::array>& sinks,
    const AttentionOptions& options, mx::StreamOrDevice s = {});

/// The states that paged_attention merges: v (num_partials, num_qo_heads, head_dim) f32 normalised
/// and lse (num_partials, num_qo_heads) f32 log2, without sinks. Every tile must have a partial
/// row; merge_states(v, lse, tiles.merge_indptr) is paged_attention's result.
std::pair<mx::array, mx::array> paged_attention_partial(
    const mx::array& q, const mx::array& k_pages, const mx::array& v_pages,
    const AttentionTable& table, const AttentionTiles& tiles, const AttentionOptions& options,
    mx::StreamOrDevice s = {});

/// What a launch is made of, for primitives that attend among other things: its parameters, checked
/// (of q only shape and dtype are read), and its inputs in backend.h's order.
PagedAttentionParams attention_params(const char* op, const mx::array& q, const mx::array& k_pages,
                                      const mx::array& v_pages, const AttentionTable& table,
                                      const AttentionTiles& tiles,
                                      const std::optional<mx::array>& sinks,
                                      const AttentionOptions& options, mx::Device device);
Arrays attention_inputs(const mx::array& q, const mx::array& k_pages, const mx::array& v_pages,
                        const AttentionTable& table, const AttentionTiles& tiles,
                        const std::optional<mx::array>& sinks, mx::Stream s);

/// Both ops: they read the same inputs and differ in what they write.
class PagedAttention : public InferencePrimitive {
 public:
  PagedAttention(mx::Stream stream, const PagedAttentionParams& params, bool partial)
      : InferencePrimitive(stream, partial ? "paged_attention_partial" : "paged_attention"),
        params_(params),
        partial_(partial) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override;
  bool is_equivalent(const mx::Primitive& other) const override;

 private:
  PagedAttentionParams params_;
  bool partial_;
};

}  // namespace mlxcel

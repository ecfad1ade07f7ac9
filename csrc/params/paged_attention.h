#pragma once

#include <cstdint>

#include "params/dtype.h"

namespace mlxcel {

/// One tile of an attention launch: query tokens against a span of a request's pages, for all heads
/// (the grid covers KV heads). Spans are in pages, so that a plan stays valid while page counts do
/// not change; kernels clip them by the kv_len and the first_page_offset that they read from the
/// table.
///
/// A private tile (shared 0) holds a run of one request's query tokens, and masks: causal, window.
/// A shared tile (shared 1) holds query tokens of several requests whose page rows are equal up to
/// page_end. All of them see the whole span, whatever the request's length: nothing is masked.
struct AttentionTile {
  int32_t request;  // row of the page table; of a shared tile any of those that share the span
  int32_t q_begin;  // its query token i is q_begin + i, of a shared tile token_order[q_begin + i]
  int32_t q_len;    // query tokens in this tile; 1 in decode
  int32_t page_begin;  // span [page_begin, page_end) of the request's page row
  int32_t page_end;
  int32_t chunk;   // query token t writes row merge_indptr[t] + chunk of the partial buffers; -1:
                   // this tile writes the output itself
  int32_t shared;  // 0 or 1
  int32_t group;   // of private tiles with the same query tokens, the index of that set among all
                   // sets (for merges inside the launch); -1: writes the output itself, or shared
};
static_assert(sizeof(AttentionTile) == 32);

/// Query rows, at most, of a decode tile in a launch that runs large and decode tiles side by side.
MLXCEL_CONSTANT int32_t kDecodeRows = 8;

/// KV tokens that the kernel of large tiles in a mixed launch takes at once.
MLXCEL_CONSTANT int32_t kLargeKeys = 128;

/// Strides are in elements; the last dimension is contiguous. K and V pools have equal strides.
struct PagedAttentionParams {
  int32_t num_q;         // packed query tokens, nnz
  int32_t num_requests;  // batch
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t page_size;  // tokens, a power of two
  int64_t stride_page;
  int64_t stride_token;
  int64_t stride_head;
  int32_t num_tiles;
  int32_t num_partials;  // rows of the partial buffers; 0 where every tile writes the output itself
  int32_t batch_invariant;  // 1: the bits of a row depend on its own request and position alone
  int32_t max_q_len;        // the largest tile.q_len
  int32_t chunks_each;    // all query tokens have so many tiles, which are neighbours in the list,
                          // in the order of chunks, and all run at once; 0: not so
  int32_t window_left;    // tokens to the left of a query's own that it sees, -1: all
  int32_t causal;         // 0 or 1; query i of qo_len sees kv_len - qo_len + i + 1 tokens
  float sm_scale_log2;    // sm_scale * log2(e)
  float logits_soft_cap;  // cap * tanh(logit / cap), 0: off
  FloatType dtype;        // of q and output
  FloatType kv_dtype;     // of pools: dtype, or on CPU 16 bits beside f32
  int32_t has_qo_indptr;  // 0: one query token a request
  int32_t has_sinks;
  int32_t has_first_page_offset;
  int32_t has_token_order;  // some tiles are shared
  int32_t num_large_tiles;  // above 0: a mixed launch, whose first so many tiles are large
};
static_assert(sizeof(PagedAttentionParams) == 112);

}  // namespace mlxcel

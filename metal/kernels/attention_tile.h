#pragma once

#include "params/paged_attention.h"
#include "softmax_states.h"

namespace mlxcel {

constant bool has_qo_indptr [[function_constant(0)]];
constant bool has_first_page_offset [[function_constant(1)]];
constant bool has_sinks [[function_constant(2)]];
constant bool has_soft_cap [[function_constant(3)]];
constant bool has_token_order [[function_constant(4)]];

// Tiles with at least this many query rows go to the matrix kernel, the others to the vector
// kernel; all of a batch-invariant plan go to that one.
constant constexpr int kMatrixRows = 16;

// A tile for one KV head. Its rows are (query token, query head of the KV head's group),
// token-major: row r is token r / group_size and head r % group_size.
struct TileView {
  const device int* pages;  // of the request
  int begin, end;           // KV tokens of the tile's span
  int own;                  // the KV token that the tile's first query token is
  int rows;
  int group_size;
  int window_left;
  bool causal;
  const device int* order;  // of a shared tile: its query tokens
  int q_begin;              // of a private tile: its first query token
  bool shared;

  int token(int r) const thread {
    return shared ? order[r / group_size] : q_begin + r / group_size;
  }
  // KV tokens [lowest, highest) that row r sees within the span.
  int lowest(int r) const thread {
    return window_left < 0 ? begin : max(begin, own + r / group_size - window_left);
  }
  int highest(int r) const thread { return causal ? min(end, own + r / group_size + 1) : end; }
};

METAL_FUNC TileView view_tile(constant PagedAttentionParams& params,
                              const device AttentionTile& tile, const device int* kv_indptr,
                              const device int* kv_indices, const device int* kv_last_page_len,
                              const device int* qo_indptr, const device int* first_page_offset,
                              const device int* token_order) {
  const int request = tile.request;
  const int first_page = kv_indptr[request];
  const int num_pages = kv_indptr[request + 1] - first_page;
  const int kv_begin = has_first_page_offset && num_pages > 0 ? first_page_offset[request] : 0;
  const int kv_end =
      num_pages > 0 ? (num_pages - 1) * params.page_size + kv_last_page_len[request] : 0;
  const int qo_begin = has_qo_indptr ? qo_indptr[request] : request;
  const int qo_len = has_qo_indptr ? qo_indptr[request + 1] - qo_begin : 1;

  TileView view;
  view.pages = kv_indices + first_page;
  view.begin = max(tile.page_begin * params.page_size, kv_begin);
  view.end = min(tile.page_end * params.page_size, kv_end);
  view.own = kv_end - qo_len + tile.q_begin - qo_begin;
  view.group_size = params.num_qo_heads / params.num_kv_heads;
  view.rows = tile.q_len * view.group_size;
  view.shared = has_token_order && tile.shared != 0;
  view.order = token_order + (view.shared ? tile.q_begin : 0);
  view.q_begin = tile.q_begin;
  // All query tokens of a shared tile see the whole span.
  view.window_left = view.shared ? -1 : params.window_left;
  view.causal = !view.shared && params.causal != 0;
  return view;
}

// Where token t of the request lies in a pool, in elements: 64-bit before the multiply, since pools
// pass 2^32.
METAL_FUNC long token_offset(constant PagedAttentionParams& params, const thread TileView& view,
                             int t, int kv_head) {
  const int shift = int(ctz(uint(params.page_size)));
  return long(view.pages[t >> shift]) * params.stride_page +
         long(t & (params.page_size - 1)) * params.stride_token +
         long(kv_head) * params.stride_head;
}

// Element (row r of the tile, 0) of q and out [num_q, Hq, D].
METAL_FUNC size_t query_offset(constant PagedAttentionParams& params, const thread TileView& view,
                               int r, int kv_head) {
  const size_t head = size_t(kv_head * view.group_size + r % view.group_size);
  return (size_t(view.token(r)) * size_t(params.num_qo_heads) + head) * size_t(params.head_dim);
}

// cap * tanh(x / cap) where x and the result are logits times log2(e).
METAL_FUNC float soft_cap(float x, float cap) {
  const float unit = cap * kLog2e;
  return unit * precise::tanh(x / unit);
}

// Writes element d of row r's state: to the partial buffers, or finished to the output.
template <typename T>
METAL_FUNC void write_state(constant PagedAttentionParams& params, const device AttentionTile& tile,
                            const thread TileView& view, int r, int kv_head, int d,
                            MergedElement state, const device float* sinks,
                            const device int* merge_indptr, device float* partial_v,
                            device float* partial_lse, device T* out, device float* lse) {
  const int head = kv_head * view.group_size + r % view.group_size;
  if (tile.chunk >= 0) {
    const size_t row = size_t(merge_indptr[view.token(r)] + tile.chunk);
    const size_t at = row * size_t(params.num_qo_heads) + size_t(head);
    partial_v[at * size_t(params.head_dim) + size_t(d)] = state.value;
    if (d == 0) partial_lse[at] = state.lse;
    return;
  }
  if (has_sinks) state = add_sink(state, sinks[head]);
  const size_t at = query_offset(params, view, r, kv_head);
  out[at + size_t(d)] = T(state.value);
  if (d == 0) lse[at / size_t(params.head_dim)] = state.lse;
}

}  // namespace mlxcel

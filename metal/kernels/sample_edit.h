#pragma once

#include "common.h"
#include "params/sample_edit.h"

namespace mlxcel {

constant constexpr int kEditThreads = 256;
constant constexpr int kEditTile = 4 * kEditThreads;  // tokens of a threadgroup

// Grid: (tiles of a row, rows) threadgroups of kEditThreads. A row's bias entries are few: every
// tile looks for its own among them.
template <typename T>
[[kernel]] void edit_logits(const device T* logits [[buffer(0)]],           // [B, V]
                            const device EditRow* rows [[buffer(1)]],       // [B]
                            const device int* bias_ids [[buffer(2)]],       // [nnz]
                            const device float* bias_values [[buffer(3)]],  // [nnz]
                            const device uint* counts [[buffer(4)]],        // [S, V]
                            const device uint* masks [[buffer(5)]],         // [M, mask_words]
                            device float* out [[buffer(6)]],                // [B, V]
                            constant EditLogitsParams& params [[buffer(7)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float bias[kEditTile];
  const EditRow row = rows[group.y];
  const int begin = int(group.x) * kEditTile;
  const size_t at = size_t(group.y) * size_t(params.vocab);
  const int bias_begin = max(row.bias_begin, 0);
  const int bias_end = min(row.bias_end, params.num_bias);
  const bool biased = bias_begin < bias_end;
  if (biased) {
    for (int i = int(thread_index); i < kEditTile; i += kEditThreads) bias[i] = 0.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = bias_begin + int(thread_index); i < bias_end; i += kEditThreads) {
      const int id = bias_ids[i];
      if (id >= begin && id < begin + kEditTile) bias[id - begin] = bias_values[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int i = int(thread_index); i < kEditTile; i += kEditThreads) {
    const int token = begin + i;
    if (token >= params.vocab) return;
    float x = float(logits[at + size_t(token)]);
    if (row.mask_row >= 0 && row.mask_row < params.num_masks) {
      const int word = token / 32;
      uint allowed = 0;
      if (word < params.mask_words)
        allowed = masks[size_t(row.mask_row) * size_t(params.mask_words) + size_t(word)];
      if ((allowed >> (token % 32) & 1) == 0) x = -INFINITY;
    }
    if (biased) x += bias[i];
    if (row.counts_row >= 0 && row.counts_row < params.num_counts) {
      const uint count = counts[size_t(row.counts_row) * size_t(params.vocab) + size_t(token)];
      if (count != 0) {
        const uint in_output = count & ~kInPrompt;
        x = x > 0.0f ? x / row.repetition : x * row.repetition;
        if (in_output > 0) x -= row.frequency * float(in_output) + row.presence;
      }
    }
    out[at + size_t(token)] = x;
  }
}

}  // namespace mlxcel

// Clears the row of the first token. Grid: (vocab), one thread a count.
[[kernel]] void clear_counts(const device int* rows [[buffer(0)]],  // [n]
                             device uint* counts [[buffer(1)]],     // [num_rows, V]
                             constant mlxcel::CountTokensParams& params [[buffer(2)]],
                             uint token [[thread_position_in_grid]]) {
  const int row = rows[0];
  if (row < 0 || row >= params.num_rows) return;
  counts[size_t(row) * size_t(params.vocab) + token] = 0;
}

// Grid: (num_tokens), one thread each; several may have the same row and id.
[[kernel]] void count_tokens(const device int* rows [[buffer(0)]],      // [n]
                             const device int* ids [[buffer(1)]],       // [n]
                             device atomic_uint* counts [[buffer(2)]],  // [num_rows, V]
                             constant mlxcel::CountTokensParams& params [[buffer(3)]],
                             uint i [[thread_position_in_grid]]) {
  const int row = rows[i];
  const int id = ids[i];
  if (row < 0 || row >= params.num_rows || id < 0 || id >= params.vocab) return;
  device atomic_uint* count = counts + size_t(row) * size_t(params.vocab) + size_t(id);
  if (params.reset != 0)
    atomic_fetch_or_explicit(count, mlxcel::kInPrompt, memory_order_relaxed);
  else
    atomic_fetch_add_explicit(count, 1u, memory_order_relaxed);
}

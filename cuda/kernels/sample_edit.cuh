#pragma once

#include "kernels/types.cuh"
#include "params/sample_edit.h"

namespace mlxcel::cuda {

constexpr int kEditThreads = 256;
constexpr int kEditTile = 4 * kEditThreads;  // tokens of a block

/// A block for each row (x) and tile (y). The row's bias entries are few: every block looks for
/// those that fall into its tile.
template <class T>
__global__ void __launch_bounds__(kEditThreads)
    edit_logits_kernel(EditLogitsParams params, const T* __restrict__ logits,
                       const EditRow* __restrict__ rows, const int32_t* __restrict__ bias_ids,
                       const float* __restrict__ bias_values, const uint32_t* __restrict__ counts,
                       const uint32_t* __restrict__ masks, float* __restrict__ out) {
  __shared__ float bias[kEditTile];
  const EditRow row = rows[blockIdx.x];
  const int begin = blockIdx.y * kEditTile;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * params.vocab;
  const int bias_begin = max(row.bias_begin, 0), bias_end = min(row.bias_end, params.num_bias);
  const bool biased = bias_begin < bias_end;
  if (biased) {
    for (int i = threadIdx.x; i < kEditTile; i += kEditThreads) bias[i] = 0.0f;
    __syncthreads();
    for (int i = bias_begin + threadIdx.x; i < bias_end; i += kEditThreads) {
      const int id = bias_ids[i];
      if (id >= begin && id < begin + kEditTile) bias[id - begin] = bias_values[i];
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < kEditTile; i += kEditThreads) {
    const int token = begin + i;
    if (token >= params.vocab) return;
    float x = to_float(logits[at + token]);
    if (row.mask_row >= 0 && row.mask_row < params.num_masks) {
      const int word = token / 32;
      const uint32_t bits =
          word < params.mask_words
              ? masks[static_cast<int64_t>(row.mask_row) * params.mask_words + word]
              : 0;
      if ((bits >> token % 32 & 1) == 0) x = -INFINITY;
    }
    if (biased) x += bias[i];
    if (row.counts_row >= 0 && row.counts_row < params.num_counts) {
      const uint32_t count = counts[static_cast<int64_t>(row.counts_row) * params.vocab + token];
      if (count != 0) {
        const uint32_t in_output = count & ~kInPrompt;
        x = x > 0.0f ? x / row.repetition : x * row.repetition;
        if (in_output > 0) x -= row.frequency * static_cast<float>(in_output) + row.presence;
      }
    }
    out[at + token] = x;
  }
}

/// Clears the row of the first token.
__global__ void clear_counts_kernel(CountTokensParams params, const int32_t* __restrict__ rows,
                                    uint32_t* counts) {
  const int row = rows[0];
  if (row < 0 || row >= params.num_rows) return;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < params.vocab) counts[static_cast<int64_t>(row) * params.vocab + i] = 0;
}

__global__ void count_tokens_kernel(CountTokensParams params, const int32_t* __restrict__ rows,
                                    const int32_t* __restrict__ ids, uint32_t* counts) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= params.num_tokens) return;
  const int row = rows[i], id = ids[i];
  if (row < 0 || row >= params.num_rows || id < 0 || id >= params.vocab) return;
  uint32_t* count = counts + static_cast<int64_t>(row) * params.vocab + id;
  if (params.reset)
    atomicOr(count, kInPrompt);
  else
    atomicAdd(count, 1u);
}

}  // namespace mlxcel::cuda

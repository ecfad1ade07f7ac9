#pragma once

#include <span>
#include <vector>

#include "cpu/kernels/linear.h"
#include "cpu/kernels/paged_attention.h"
#include "params/add_rms_norm.h"
#include "params/rope_append.h"

namespace mlxcel::cpu {

/// A linear layer; rows, dtype, out_stride, x and out are the caller's to fill in.
struct Matrix {
  LinearParams params;
  LinearArrays arrays;
};

/// Weights of one layer of a llama-like decoder. The outputs of several matrices lie side by side
/// in one row. Norms are of the activations' dtype.
struct DecoderLayerArrays {
  std::vector<Matrix> qkv;
  std::vector<Matrix> output;
  std::vector<Matrix> gate_up;
  std::vector<Matrix> down;
  const void* input_norm;
  const void* post_norm;
  const void* q_norm;  // (head_dim), or null
  const void* k_norm;  // the same
  int32_t window_left;
};

struct PagePair {
  void* k;
  void* v;
};

struct DecoderParams {
  PagedAttentionParams attention;  // window_left and q are the layers' own
  RopeAppendParams rope;
  AddRmsNormParams norm;   // rows: all tokens
  int32_t intermediate;    // elements a row of gate, and of up
  int32_t has_logit_rows;  // 0: all tokens go on behind the last attention
  int32_t num_logit_rows;  // may be 0
};

struct DecoderArrays {
  const void* hidden;  // (tokens, hidden)
  AttentionInputs attention;
  const int32_t* slots;       // (tokens)
  const int32_t* positions;   // (tokens)
  const float* inv_freq;      // (rotary_dim / 2)
  const int32_t* logit_rows;  // (num_logit_rows) tokens that go on behind the last attention
  const void* final_norm;
  void* out;  // (num_logit_rows, hidden)
};

/// All layers of a decoder, each the same calls of this folder's kernels as the single ops make, so
/// that the result has the same bits. Writes the new tokens' keys and values into the pages.
void decoder_stack(const DecoderParams& params, const DecoderArrays& arrays,
                   std::span<const DecoderLayerArrays> layers, std::span<const PagePair> pages);

}  // namespace mlxcel::cpu

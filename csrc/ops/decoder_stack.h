#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/linear.h"
#include "ops/paged_attention.h"

namespace mlxcel {

/// A linear layer: its weight is packed on CPU, and as linear() or quantized_linear() take it on a
/// GPU.
struct StackLinear {
  Arrays arrays;
  PackedLinear layout;
  std::optional<mx::array> bias;
  bool packed;
  LinearParams params{};  // DecoderStack fills it in
};

/// Weights of one layer of a llama-like decoder. Each matrix may come in parts, which give
/// neighbouring columns of the output.
struct DecoderLayer {
  std::vector<StackLinear> qkv;
  std::vector<StackLinear> output;
  std::vector<StackLinear> gate_up;
  std::vector<StackLinear> down;
  mx::array input_norm;             // (hidden)
  mx::array post_norm;              // (hidden)
  std::optional<mx::array> q_norm;  // (head_dim), together with k_norm
  std::optional<mx::array> k_norm;
  int window_left;
};

struct DecoderShape {
  int num_qo_heads;
  int num_kv_heads;
  int head_dim;
  float norm_eps;
  float rope_scale;  // multiplies cosine and sine
};

/// All layers of a llama-like decoder between embedding and head, as one primitive: a graph of a
/// dozen nodes a layer costs the host as much time as a small model its arithmetic on CPU, and more
/// than decoding takes on a GPU.
class DecoderStack {
 public:
  /// Evaluates the weights; throws std::invalid_argument where shapes or dtypes do not fit.
  DecoderStack(std::vector<DecoderLayer> layers, const mx::array& final_norm,
               const mx::array& inv_freq, const DecoderShape& shape);

  /// hidden (tokens, hidden size), pools of each layer (kv_layout "NHD" or "HND"; on CPU they
  /// may be f16 or bf16 beside f32 activations), slots and positions (tokens) int32,
  /// logit_rows int32: tokens that go on behind the last attention. Returns the normed output
  /// (len(logit_rows), hidden size), then k_pages and v_pages of each layer, which share the
  /// inputs' buffers.
  Arrays operator()(const mx::array& hidden, const Arrays& k_pages, const Arrays& v_pages,
                    const mx::array& slots, const mx::array& positions, const AttentionTable& table,
                    const AttentionTiles& tiles, const std::optional<mx::array>& logit_rows,
                    const std::string& kv_layout, mx::StreamOrDevice s = {}) const;

  /// Whether a GPU has kernels for steps of so many tokens, all of which have logits.
  bool runs_on_gpu(int tokens) const;

  struct Weights {
    std::vector<DecoderLayer> layers;
    mx::array final_norm;
    mx::array inv_freq;
    DecoderShape shape;
    int hidden;
    int intermediate;
  };

 private:
  std::shared_ptr<const Weights> weights_;
};

struct DecoderStackParams {
  std::shared_ptr<const DecoderStack::Weights> weights;
  PagedAttentionParams attention;  // window_left is the layers' own
  RopeAppendParams rope;
  bool has_logit_rows;
};

/// Inputs: hidden, slots, positions, logit_rows where there are any, k_pages and v_pages of layer
/// 0, 1, ..., then those of a PagedAttention.
class RunDecoderStack : public InferencePrimitive {
 public:
  RunDecoderStack(mx::Stream stream, DecoderStackParams params)
      : InferencePrimitive(stream, "decoder_stack"), params_(std::move(params)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override;

 private:
  DecoderStackParams params_;
};

}  // namespace mlxcel

#include "cpu/kernels/decoder_stack.h"

#include <cstring>
#include <memory>

#include "common/parallel.h"
#include "cpu/kernels/add_rms_norm.h"
#include "cpu/kernels/rope_append.h"
#include "cpu/kernels/swiglu.h"

namespace mlxcel::cpu {
namespace {

/// Memory of one call, cut into parts that each start on a cache line.
class Workspace {
 public:
  /// Returns the part's place, for at().
  size_t add(size_t bytes) {
    const size_t place = size_;
    size_ += (bytes + kLine - 1) / kLine * kLine;
    return place;
  }
  void allocate() { memory_.reset(new (std::align_val_t(kLine)) char[size_]); }
  char* at(size_t place) const { return memory_.get() + place; }

 private:
  static constexpr size_t kLine = 64;
  struct Free {
    void operator()(char* p) const { ::operator delete[](p, std::align_val_t(kLine)); }
  };
  size_t size_ = 0;
  std::unique_ptr<char[], Free> memory_;
};

class Run {
 public:
  Run(const DecoderParams& params, const DecoderArrays& arrays)
      : params_(params), arrays_(arrays), residual_(arrays.hidden), rows_(params.norm.rows) {
    const auto row = [&](int64_t elements) { return memory_.add(rows_ * elements * size_); };
    const int64_t q = int64_t{params.rope.num_qo_heads} * params.rope.head_dim;
    const int64_t kv = int64_t{params.rope.num_kv_heads} * params.rope.head_dim;
    qkv_row_ = q + 2 * kv;
    const size_t places[] = {row(params.norm.hidden),
                             row(params.norm.hidden),
                             row(params.norm.hidden),
                             row(qkv_row_),
                             row(q),
                             row(q),
                             row(2 * params.intermediate),
                             row(params.intermediate),
                             memory_.add(rows_ * params.rope.num_qo_heads * sizeof(float))};
    memory_.allocate();
    char** const parts[] = {&sum_,      &normed_,  &branch_,    &qkv_, &q_rot_,
                            &attended_, &gate_up_, &activated_, &lse_};
    for (size_t i = 0; i < std::size(parts); ++i) *parts[i] = memory_.at(places[i]);
  }

  void layers(std::span<const DecoderLayerArrays> layers, std::span<const PagePair> pages) {
    norm(arrays_.hidden, layers[0].input_norm, normed_);
    for (size_t i = 0; i < layers.size(); ++i) {
      const DecoderLayerArrays& layer = layers[i];
      const bool last = i + 1 == layers.size();
      attend(layer, pages[i]);
      if (last && params_.has_logit_rows) keep_logit_rows();
      multiply(layer.output, attended_, branch_, params_.norm.hidden);
      add_branch(layer.post_norm, normed_);
      activate(layer.gate_up);
      multiply(layer.down, activated_, branch_, params_.norm.hidden);
      add_branch(last ? arrays_.final_norm : layers[i + 1].input_norm,
                 last ? arrays_.out : normed_);
    }
  }

 private:
  void attend(const DecoderLayerArrays& layer, const PagePair& pages) {
    const RopeAppendParams& rope = params_.rope;
    multiply(layer.qkv, normed_, qkv_, qkv_row_);
    char* const k = qkv_ + int64_t{rope.num_qo_heads} * rope.head_dim * size_;
    char* const v = k + int64_t{rope.num_kv_heads} * rope.head_dim * size_;
    if (layer.q_norm != nullptr) {
      norm_heads(layer.q_norm, qkv_, rope.num_qo_heads);
      norm_heads(layer.k_norm, k, rope.num_kv_heads);
    }
    rope_append(rope, {qkv_, k, v, qkv_row_, qkv_row_, arrays_.slots, arrays_.positions,
                       arrays_.inv_freq, q_rot_, pages.k, pages.v});
    PagedAttentionParams attention = params_.attention;
    attention.window_left = layer.window_left;
    AttentionInputs in = arrays_.attention;
    in.q = q_rot_;
    in.k_pages = pages.k;
    in.v_pages = pages.v;
    paged_attention(attention, in, attended_, reinterpret_cast<float*>(lse_));
  }

  /// Behind the last attention a token meets no other: only those that have logits go on.
  void keep_logit_rows() {
    const auto gather = [&](const void* from, int64_t elements, char* to) {
      const int64_t bytes = elements * size_;
      for (int64_t i = 0; i < params_.num_logit_rows; ++i) {
        std::memcpy(to + i * bytes, static_cast<const char*>(from) + arrays_.logit_rows[i] * bytes,
                    bytes);
      }
    };
    gather(attended_, int64_t{params_.rope.num_qo_heads} * params_.rope.head_dim, q_rot_);
    std::swap(attended_, q_rot_);
    gather(residual_, params_.norm.hidden, normed_);
    std::swap(sum_, normed_);
    residual_ = sum_;
    rows_ = params_.num_logit_rows;
  }

  Matrix filled_in(Matrix part, const void* x, char* out, int64_t stride) const {
    part.params.rows = rows_;
    part.params.dtype = params_.norm.dtype;
    part.params.out_stride = static_cast<int32_t>(stride);
    part.arrays.x = x;
    part.arrays.out = out;
    return part;
  }

  void multiply(std::span<const Matrix> parts, const void* x, char* out, int64_t stride) const {
    for (const Matrix& part : parts) {
      const Matrix m = filled_in(part, x, out, stride);
      linear(m.params, m.arrays);
      out += part.params.n * size_;
    }
  }

  /// silu(gate) * up of the normed rows.
  void activate(std::span<const Matrix> gate_up) const {
    const int64_t stride = 2 * int64_t{params_.intermediate};
    if (gate_up.size() == 1) {
      const Matrix m = filled_in(gate_up[0], normed_, gate_up_, stride);
      return linear_swiglu(m.params, m.arrays, activated_);
    }
    multiply(gate_up, normed_, gate_up_, stride);
    swiglu({rows_, params_.intermediate, 1, params_.norm.dtype}, gate_up_, nullptr, activated_);
  }

  void norm(const void* x, const void* weight, void* normed) const {
    AddRmsNormParams params = params_.norm;
    params.rows = rows_;
    add_rms_norm(params, x, nullptr, weight, normed, nullptr);
  }

  /// Adds the branch to the residual stream and normalises the sum for what follows.
  void add_branch(const void* weight, void* normed) {
    AddRmsNormParams params = params_.norm;
    params.rows = rows_;
    add_rms_norm(params, branch_, residual_, weight, normed, sum_);
    residual_ = sum_;
  }

  /// Each head of a part of the qkv rows by itself, in place.
  void norm_heads(const void* weight, char* heads, int32_t count) const {
    AddRmsNormParams params = params_.norm;
    params.rows = count;
    params.hidden = params_.rope.head_dim;
    parallel_for(rows_, 16384 / qkv_row_ + 1, [&](size_t begin, size_t end) {
      for (size_t token = begin; token < end; ++token) {
        char* const at = heads + token * qkv_row_ * size_;
        add_rms_norm(params, at, nullptr, weight, at, nullptr);
      }
    });
  }

  const DecoderParams& params_;
  const DecoderArrays& arrays_;
  const void* residual_;  // the stream that layers add to: the input, then sum_
  int64_t rows_;
  const int64_t size_ = params_.norm.dtype == FloatType::f32 ? 4 : 2;
  int64_t qkv_row_;
  Workspace memory_;
  char *sum_, *normed_, *branch_;  // (rows, hidden)
  char *qkv_, *q_rot_, *attended_, *gate_up_, *activated_, *lse_;
};

}  // namespace

void decoder_stack(const DecoderParams& params, const DecoderArrays& arrays,
                   std::span<const DecoderLayerArrays> layers, std::span<const PagePair> pages) {
  if (params.norm.rows == 0) return;
  const KeepAwake keep_awake;
  Run(params, arrays).layers(layers, pages);
}

}  // namespace mlxcel::cpu

#include "cpu/kernels/decoder_stack.h"

#include <algorithm>
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
    const size_t place = end_;
    end_ += (bytes + kLine - 1) / kLine * kLine;
    size_ = std::max(size_, end_);
    return place;
  }
  /// What is added from now on shares the memory of the part at `place` and of those behind it.
  void share_from(size_t place) { end_ = place; }
  void allocate() { memory_.reset(new (std::align_val_t(kLine)) char[size_]); }
  char* at(size_t place) const { return memory_.get() + place; }

 private:
  static constexpr size_t kLine = 64;
  struct Free {
    void operator()(char* p) const { ::operator delete[](p, std::align_val_t(kLine)); }
  };
  size_t end_ = 0, size_ = 0;
  std::unique_ptr<char[], Free> memory_;
};

/// Rows that go through a layer behind its attention at a time, so that what lies between its
/// matrices does not grow with the prompt. Weights that are unpacked serve so many rows at once
/// anyway.
constexpr int64_t kMaxRows = 384;

class Run {
 public:
  Run(const DecoderParams& params, const DecoderArrays& arrays)
      : params_(params),
        arrays_(arrays),
        residual_(static_cast<const char*>(arrays.hidden)),
        rows_(params.norm.rows) {
    // Equal parts, as linear() makes them.
    const int64_t parts = (rows_ + kMaxRows - 1) / kMaxRows;
    rows_in_part_ = (rows_ + parts - 1) / parts;
    const auto add = [&](int64_t rows, int64_t elements) {
      return memory_.add(rows * elements * size_);
    };
    const int64_t hidden = params.norm.hidden, intermediate = params.intermediate;
    q_row_ = int64_t{params.rope.num_qo_heads} * params.rope.head_dim;
    qkv_row_ = q_row_ + 2 * int64_t{params.rope.num_kv_heads} * params.rope.head_dim;
    const size_t sum = add(rows_, hidden), normed = add(rows_, hidden);
    const size_t q_rot = add(rows_, q_row_), attended = add(rows_, q_row_);
    const size_t lse = memory_.add(rows_ * params.rope.num_qo_heads * sizeof(float));
    const size_t rotations = memory_.add(rows_ * params.rope.rotary_dim * sizeof(float));
    const size_t qkv = add(rows_, qkv_row_);
    memory_.share_from(qkv);  // which attention has used up when the first part begins
    const size_t branch = add(rows_in_part_, hidden);
    const size_t gate_up = add(rows_in_part_, 2 * intermediate);
    const size_t activated = add(rows_in_part_, intermediate);
    memory_.allocate();
    sum_ = memory_.at(sum);
    normed_ = memory_.at(normed);
    q_rot_ = memory_.at(q_rot);
    attended_ = memory_.at(attended);
    lse_ = memory_.at(lse);
    rotations_ = reinterpret_cast<float*>(memory_.at(rotations));
    qkv_ = memory_.at(qkv);
    branch_ = memory_.at(branch);
    gate_up_ = memory_.at(gate_up);
    activated_ = memory_.at(activated);
  }

  void layers(std::span<const DecoderLayerArrays> layers, std::span<const PagePair> pages) {
    norm(arrays_.hidden, layers[0].input_norm, normed_);
    rope_rotations(params_.rope, arrays_.positions, arrays_.inv_freq, rotations_);
    for (size_t i = 0; i < layers.size(); ++i) {
      const bool last = i + 1 == layers.size();
      attend(layers[i], pages[i]);
      if (last && params_.has_logit_rows) keep_logit_rows();
      for (int64_t row = 0; row < rows_; row += rows_in_part_) {
        transform(layers[i], row, std::min(rows_in_part_, rows_ - row),
                  last ? arrays_.final_norm : layers[i + 1].input_norm,
                  last ? static_cast<char*>(arrays_.out) : normed_);
      }
      residual_ = sum_;
    }
  }

 private:
  void attend(const DecoderLayerArrays& layer, const PagePair& pages) {
    const RopeAppendParams& rope = params_.rope;
    multiply(layer.qkv, rows_, normed_, qkv_, qkv_row_);
    char* const k = qkv_ + int64_t{rope.num_qo_heads} * rope.head_dim * size_;
    char* const v = k + int64_t{rope.num_kv_heads} * rope.head_dim * size_;
    if (layer.q_norm != nullptr) {
      norm_heads(layer.q_norm, qkv_, rope.num_qo_heads);
      norm_heads(layer.k_norm, k, rope.num_kv_heads);
    }
    rope_append(rope, {qkv_, k, v, qkv_row_, qkv_row_, arrays_.slots, rotations_, q_rot_, pages.k,
                       pages.v});
    PagedAttentionParams attention = params_.attention;
    attention.window_left = layer.window_left;
    AttentionInputs in = arrays_.attention;
    in.q = q_rot_;
    in.k_pages = pages.k;
    in.v_pages = pages.v;
    paged_attention(attention, in, attended_, reinterpret_cast<float*>(lse_));
  }

  /// What follows attention, for rows [first, first + rows): their residual stream, and its norm as
  /// the next layer's input.
  void transform(const DecoderLayerArrays& layer, int64_t first, int64_t rows,
                 const void* next_norm, char* next) const {
    const int64_t hidden = params_.norm.hidden, at = first * hidden * size_;
    const auto add_branch = [&](const char* residual, const void* weight, char* normed) {
      AddRmsNormParams params = params_.norm;
      params.rows = rows;
      add_rms_norm(params, branch_, residual + at, weight, normed + at, sum_ + at);
    };
    multiply(layer.output, rows, attended_ + first * q_row_ * size_, branch_, hidden);
    add_branch(residual_, layer.post_norm, normed_);
    activate(layer.gate_up, rows, normed_ + at);
    multiply(layer.down, rows, activated_, branch_, hidden);
    add_branch(sum_, next_norm, next);
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
    gather(attended_, q_row_, q_rot_);
    std::swap(attended_, q_rot_);
    gather(residual_, params_.norm.hidden, normed_);
    std::swap(sum_, normed_);
    residual_ = sum_;
    rows_ = params_.num_logit_rows;
  }

  Matrix filled_in(Matrix part, int64_t rows, const void* x, char* out, int64_t stride) const {
    part.params.rows = rows;
    part.params.dtype = params_.norm.dtype;
    part.params.out_stride = static_cast<int32_t>(stride);
    part.arrays.x = x;
    part.arrays.out = out;
    return part;
  }

  void multiply(std::span<const Matrix> parts, int64_t rows, const void* x, char* out,
                int64_t stride) const {
    for (const Matrix& part : parts) {
      const Matrix m = filled_in(part, rows, x, out, stride);
      linear(m.params, m.arrays);
      out += part.params.n * size_;
    }
  }

  /// silu(gate) * up of normed rows.
  void activate(std::span<const Matrix> gate_up, int64_t rows, const void* normed) const {
    const int64_t stride = 2 * int64_t{params_.intermediate};
    if (gate_up.size() == 1) {
      const Matrix m = filled_in(gate_up[0], rows, normed, gate_up_, stride);
      return linear_swiglu(m.params, m.arrays, activated_);
    }
    multiply(gate_up, rows, normed, gate_up_, stride);
    swiglu({rows, params_.intermediate, 1, params_.norm.dtype}, gate_up_, nullptr, activated_);
  }

  void norm(const void* x, const void* weight, void* normed) const {
    AddRmsNormParams params = params_.norm;
    params.rows = rows_;
    add_rms_norm(params, x, nullptr, weight, normed, nullptr);
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
  const char* residual_;  // the stream that layers add to: the input, then sum_
  int64_t rows_, rows_in_part_;
  const int64_t size_ = params_.norm.dtype == FloatType::f32 ? 4 : 2;
  int64_t q_row_, qkv_row_;
  Workspace memory_;
  char *sum_, *normed_;                   // (rows, hidden)
  char *q_rot_, *attended_, *qkv_;        // (rows, their own)
  char* lse_;                             // (rows, num_qo_heads)
  float* rotations_;                      // (rows, rotary_dim)
  char *branch_, *gate_up_, *activated_;  // (rows_in_part, their own)
};

}  // namespace

void decoder_stack(const DecoderParams& params, const DecoderArrays& arrays,
                   std::span<const DecoderLayerArrays> layers, std::span<const PagePair> pages) {
  if (params.norm.rows == 0) return;
  const KeepAwake keep_awake;
  Run(params, arrays).layers(layers, pages);
}

}  // namespace mlxcel::cpu

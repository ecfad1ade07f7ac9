#include "ops/decoder_stack.h"

#include "attention.h"
#include "glue.h"
#include "launchers.h"

namespace mlxcel::cuda {
namespace {

/// One call: the kernels of all layers, each behind the one before it.
class Run {
 public:
  Run(const DecoderStackParams& params, const Arrays& inputs, Arrays& outputs,
      const mx::Stream& stream)
      : params_(params),
        weights_(*params.weights),
        inputs_(inputs),
        outputs_(outputs),
        stream_(stream),
        chain_(stream),
        tokens_(params.attention.num_q),
        qkv_row_((weights_.shape.num_qo_heads + 2 * weights_.shape.num_kv_heads) *
                 weights_.shape.head_dim),
        q_row_(weights_.shape.num_qo_heads * weights_.shape.head_dim),
        normed_(buffer(weights_.hidden)),
        branch_(buffer(weights_.hidden)),
        residual_(buffer(weights_.hidden)),
        sum_(buffer(weights_.hidden)),
        qkv_(buffer(qkv_row_)),
        q_(buffer(q_row_)),
        attended_(buffer(q_row_)),
        activated_(buffer(weights_.intermediate)) {
    for (size_t i = 1; i < outputs.size(); ++i) outputs[i].copy_shared_buffer(inputs[2 + i]);
    allocate_output(outputs[0], stream);
    attention_ = attention_arrays(params.attention, std::span(inputs).subspan(2 + outputs.size()));
    attention_.q = device_ptr<void>(q_);
    attention_.out = device_ptr<void>(attended_);
    counters_ = add_workspaces(params.attention, attention_, stream);
  }

  void operator()() {
    const auto& layers = weights_.layers;
    norm(inputs_[0], nullptr, layers[0].input_norm, normed_);
    for (size_t i = 0; i < layers.size(); ++i) {
      const DecoderLayer& layer = layers[i];
      const bool last = i + 1 == layers.size();
      attend(layer, i);
      multiply(layer.output, attended_, branch_, weights_.hidden);
      norm(branch_, &residual_, layer.post_norm, normed_);
      multiply(layer.gate_up, normed_, activated_, weights_.intermediate, true);
      multiply(layer.down, activated_, branch_, weights_.hidden);
      norm(branch_, &residual_, last ? weights_.final_norm : layers[i + 1].input_norm,
           last ? outputs_[0] : normed_);
    }
    Arrays written = outputs_;
    if (counters_) written.push_back(*counters_);
    chain_.commit(inputs_, written);
  }

 private:
  mx::array buffer(int columns) const {
    return workspace({tokens_, columns}, weights_.final_norm.dtype(), stream_);
  }

  void attend(const DecoderLayer& layer, size_t index) {
    multiply(layer.qkv, normed_, qkv_, qkv_row_);
    const mx::array &k_pages = outputs_[1 + 2 * index], &v_pages = outputs_[2 + 2 * index];
    const size_t item = qkv_.itemsize();
    const char* q = device_ptr<char>(qkv_);
    const char* k = q + q_row_ * item;
    const char* v = k + (qkv_row_ - q_row_) / 2 * item;
    launch_rope_append(params_.rope,
                       {q, k, v, qkv_row_, qkv_row_, device_ptr<int32_t>(inputs_[1]),
                        device_ptr<int32_t>(inputs_[2]), device_ptr<float>(weights_.inv_freq),
                        device_ptr<void>(q_), device_ptr<void>(k_pages), device_ptr<void>(v_pages)},
                       chain_);
    PagedAttentionParams attention = params_.attention;
    attention.window_left = layer.window_left;
    attention_.k_pages = device_ptr<void>(k_pages);
    attention_.v_pages = device_ptr<void>(v_pages);
    launch_paged_attention(attention, attention_, chain_);
  }

  void multiply(const std::vector<StackLinear>& parts, const mx::array& x, const mx::array& out,
                int out_row, bool gated = false) {
    char* to = device_ptr<char>(out);
    for (const StackLinear& part : parts) {
      LinearParams params = part.params;
      params.rows = tokens_;
      params.out_stride = out_row;
      LinearArrays arrays{};
      arrays.x = device_ptr<void>(x);
      arrays.weight = device_ptr<void>(part.arrays[0]);
      if (params.group_size != 0) {
        arrays.scales = device_ptr<void>(part.arrays[1]);
        arrays.offsets = device_ptr<void>(part.arrays[2]);
      }
      if (part.bias) arrays.bias = device_ptr<void>(*part.bias);
      arrays.out = to;
      launch_linear(params, arrays, gated, chain_);
      to += params.n * out.itemsize();
    }
  }

  /// Adds x to the residual stream and normalises the sum; without a stream, x begins it.
  void norm(const mx::array& x, const mx::array* residual, const mx::array& weight,
            const mx::array& normed) {
    const AddRmsNormParams params{tokens_, weights_.hidden, params_.attention.dtype,
                                  weights_.shape.norm_eps, 0.0f};
    launch_add_rms_norm(
        params, device_ptr<void>(x), residual == nullptr ? nullptr : device_ptr<void>(*residual),
        device_ptr<void>(weight), device_ptr<void>(normed), device_ptr<void>(sum_), chain_);
    std::swap(residual_, sum_);
  }

  const DecoderStackParams& params_;
  const DecoderStack::Weights& weights_;
  const Arrays& inputs_;
  Arrays& outputs_;
  const mx::Stream& stream_;
  ChainLaunch chain_;
  int tokens_, qkv_row_, q_row_;
  mx::array normed_, branch_, residual_, sum_, qkv_, q_, attended_, activated_;
  AttentionArrays attention_{};
  std::optional<mx::array> counters_;
};

}  // namespace

void decoder_stack(const DecoderStackParams& params, const Arrays& inputs, Arrays& outputs,
                   const mx::Stream& stream) {
  Run(params, inputs, outputs, stream)();
  // The weights outlive the step, should the model go before it.
  mx::cu::get_command_encoder(stream).add_completed_handler([weights = params.weights] {});
}

}  // namespace mlxcel::cuda

#include "ops/decoder_stack.h"

#include "common/pool.h"
#include "cpu/attention_arrays.h"
#include "cpu/eval.h"
#include "cpu/kernels/decoder_stack.h"

namespace mlxcel {
namespace {

std::vector<cpu::Matrix> matrices(const std::vector<StackLinear>& parts) {
  std::vector<cpu::Matrix> out;
  for (const StackLinear& part : parts) {
    cpu::Matrix& m = out.emplace_back();
    m.params = part.params;
    m.arrays.weight = part.arrays[0].data<void>();
    if (part.params.group_size != 0) {
      m.arrays.scales = part.arrays[1].data<void>();
      m.arrays.offsets = part.arrays[2].data<void>();
    }
    if (part.bias) m.arrays.bias = part.bias->data<void>();
  }
  return out;
}

const void* data_or_null(const std::optional<mx::array>& a) {
  return a ? a->data<void>() : nullptr;
}

}  // namespace

void RunDecoderStack::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  const DecoderStack::Weights& w = *params_.weights;
  cpu::DecoderArrays arrays{};
  size_t next = 0;
  arrays.hidden = inputs[next++].data<void>();
  arrays.slots = inputs[next++].data<int32_t>();
  arrays.positions = inputs[next++].data<int32_t>();
  if (params_.has_logit_rows) arrays.logit_rows = inputs[next++].data<int32_t>();
  for (size_t i = 1; i < outputs.size(); ++i, ++next) {
    check_pool_contiguous(op_, i % 2 == 1 ? "k_pages" : "v_pages", inputs[next]);
    outputs[i].copy_shared_buffer(inputs[next]);
  }
  arrays.attention = attention_arrays(params_.attention, std::span(inputs).subspan(next));
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  arrays.inv_freq = w.inv_freq.data<float>();
  arrays.final_norm = w.final_norm.data<void>();
  arrays.out = outputs[0].data<void>();

  std::vector<cpu::DecoderLayerArrays> layers;
  std::vector<cpu::PagePair> pages;
  for (const DecoderLayer& layer : w.layers) {
    layers.push_back({matrices(layer.qkv), matrices(layer.output), matrices(layer.gate_up),
                      matrices(layer.down), layer.input_norm.data<void>(),
                      layer.post_norm.data<void>(), data_or_null(layer.q_norm),
                      data_or_null(layer.k_norm), layer.window_left});
    const size_t k = 1 + 2 * pages.size();
    pages.push_back({outputs[k].data<void>(), outputs[k + 1].data<void>()});
  }
  cpu::DecoderParams params{};
  params.attention = params_.attention;
  params.rope = params_.rope;
  params.norm = {params_.attention.num_q, w.hidden, params_.attention.dtype, w.shape.norm_eps,
                 0.0f};
  params.intermediate = w.intermediate;
  params.has_logit_rows = params_.has_logit_rows ? 1 : 0;
  params.num_logit_rows = outputs[0].shape(0);
  // The weights keep the buffers alive, should the model go before the step does.
  encoder.dispatch(
      [params, arrays, layers = std::move(layers), pages = std::move(pages),
       weights = params_.weights] { cpu::decoder_stack(params, arrays, layers, pages); });
}

}  // namespace mlxcel

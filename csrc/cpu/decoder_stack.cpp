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

void run(const DecoderStackParams& stack, const Arrays& inputs, Arrays& outputs) {
  const DecoderStack::Weights& w = *stack.weights;
  cpu::DecoderArrays arrays{};
  arrays.hidden = inputs[0].data<void>();
  arrays.slots = inputs[1].data<int32_t>();
  arrays.positions = inputs[2].data<int32_t>();
  size_t next = 3;
  if (stack.has_logit_rows) arrays.logit_rows = inputs[next++].data<int32_t>();
  next += outputs.size() - 1;  // the pools, whose buffers are the outputs'
  arrays.attention = attention_arrays(stack.attention, std::span(inputs).subspan(next));
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
  params.attention = stack.attention;
  params.rope = stack.rope;
  params.norm = {stack.attention.num_q, w.hidden, stack.attention.dtype, w.shape.norm_eps, 0.0f};
  params.intermediate = w.intermediate;
  params.has_logit_rows = stack.has_logit_rows ? 1 : 0;
  params.num_logit_rows = outputs[0].shape(0);
  cpu::decoder_stack(params, arrays, layers, pages);
}

}  // namespace

void RunDecoderStack::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  const size_t first_pool = params_.has_logit_rows ? 4 : 3;
  for (size_t i = 1; i < outputs.size(); ++i) {
    const mx::array& pool = inputs[first_pool + i - 1];
    check_pool_contiguous(op_, i % 2 == 1 ? "k_pages" : "v_pages", pool);
    outputs[i].copy_shared_buffer(pool);
  }
  // The shared weights keep their buffers alive, should the model go before the step does.
  cpu_dispatch(stream(), inputs, outputs,
               [stack = params_](const Arrays& in, Arrays& out) { run(stack, in, out); });
}

}  // namespace mlxcel

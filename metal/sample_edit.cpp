#include <algorithm>

#include "launchers.h"
#include "library.h"

namespace mlxcel::metal {

void edit_logits(const EditLogitsParams& params, const Arrays& inputs, Arrays& outputs,
                 const mx::Stream& stream) {
  allocate(outputs[0]);
  if (params.batch == 0) return;
  constexpr size_t kThreads = 256;  // as in the kernel, which takes four tokens a thread
  auto& encoder = mx::metal::get_command_encoder(stream);
  encoder.set_compute_pipeline_state(
      kernel(stream, sources::k_sample_edit, "edit_logits", {params.dtype}));
  // No row reads an array that is empty: the rows are bound in its place.
  for (int i = 0; i < 6; ++i)
    encoder.set_input_array(inputs[i].size() > 0 ? inputs[i] : inputs[1], i);
  encoder.set_output_array(outputs[0], 6);
  encoder.set_bytes(params, 7);
  encoder.dispatch_threadgroups(MTL::Size(ceil_div(params.vocab, 4 * kThreads), params.batch, 1),
                                MTL::Size(kThreads, 1, 1));
}

void count_tokens(const CountTokensParams& params, const Arrays& inputs, Arrays& outputs,
                  const mx::Stream& stream) {
  outputs[0].copy_shared_buffer(inputs[0]);  // in place
  if (params.num_tokens == 0 || params.num_rows == 0) return;
  auto& encoder = mx::metal::get_command_encoder(stream);
  if (params.reset != 0) {
    auto* clear = kernel(stream, sources::k_sample_edit, "clear_counts");
    encoder.set_compute_pipeline_state(clear);
    encoder.set_input_array(inputs[1], 0);
    encoder.set_output_array(outputs[0], 1);
    encoder.set_bytes(params, 2);
    encoder.dispatch_threads(MTL::Size(params.vocab, 1, 1),
                             MTL::Size(threadgroup_size(clear, std::min(params.vocab, 256)), 1, 1));
  }
  auto* count = kernel(stream, sources::k_sample_edit, "count_tokens");
  encoder.set_compute_pipeline_state(count);
  for (int i = 0; i < 2; ++i) encoder.set_input_array(inputs[1 + i], i);
  encoder.set_output_array(outputs[0], 2);
  encoder.set_bytes(params, 3);
  encoder.dispatch_threads(
      MTL::Size(params.num_tokens, 1, 1),
      MTL::Size(threadgroup_size(count, std::min(params.num_tokens, 256)), 1, 1));
}

}  // namespace mlxcel::metal

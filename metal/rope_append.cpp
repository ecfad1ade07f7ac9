#include "launchers.h"
#include "library.h"

namespace mlxcel::metal {

void rope_append(const RopeAppendParams& params, const Arrays& inputs, Arrays& outputs,
                 const mx::Stream& stream) {
  allocate(outputs[0]);
  outputs[1].copy_shared_buffer(inputs[3]);  // in place
  outputs[2].copy_shared_buffer(inputs[4]);
  if (params.num_tokens == 0) return;
  auto* pipeline = kernel(stream, sources::k_rope_append, "rope_append", {params.dtype});
  auto& encoder = mx::metal::get_command_encoder(stream);
  encoder.set_compute_pipeline_state(pipeline);
  for (int i = 0; i < 3; ++i) encoder.set_input_array(inputs[i], i);
  // The pools are bound as outputs alone: Metal assumes that buffer arguments do not alias.
  for (int i = 3; i < 6; ++i) encoder.set_input_array(inputs[i + 2], i);
  for (int i = 0; i < 3; ++i) encoder.set_output_array(outputs[i], 6 + i);
  encoder.set_bytes(params, 9);
  constexpr size_t kHeads = 4;  // of one thread, as in the kernel
  const size_t pairs = ceil_div(params.head_dim, 2);
  const size_t runs = ceil_div(params.num_qo_heads + params.num_kv_heads, kHeads);
  const size_t width = threadgroup_size(pipeline, std::min<size_t>(pairs, 128));
  encoder.dispatch_threads(MTL::Size(pairs, runs, params.num_tokens), MTL::Size(width, 1, 1));
}

}  // namespace mlxcel::metal

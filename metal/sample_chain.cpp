#include "launchers.h"
#include "sample_parts.h"

namespace mlxcel::metal {

void chain_speculative_sample(const ChainParams& params, const Arrays& inputs, Arrays& outputs,
                              const mx::Stream& stream) {
  for (mx::array& out : outputs) allocate(out);
  if (params.batch == 0) return;
  const RowParts parts(params.batch, params.vocab);
  mx::array summaries = workspace({params.batch, parts.count, kSummaryWords}, mx::int32, stream);
  auto& encoder = mx::metal::get_command_encoder(stream);
  // Without drafts there are no draft ids and probabilities: the target is bound and not read.
  const auto bind_inputs = [&] {
    for (int i = 0; i < 4; ++i)
      encoder.set_input_array(i < 2 && params.num_draft == 0 ? inputs[2] : inputs[i], i);
  };

  auto* scan = kernel(stream, sources::k_sample_chain, "chain_scan");
  encoder.set_compute_pipeline_state(scan);
  bind_inputs();
  encoder.set_output_array(summaries, 4);
  encoder.set_bytes(params, 5);
  encoder.set_bytes(parts.size, 6);
  encoder.dispatch_threadgroups(MTL::Size(parts.count, params.batch, 1),
                                MTL::Size(parts.threads(scan), 1, 1));

  encoder.set_compute_pipeline_state(kernel(stream, sources::k_sample_chain, "chain_pick"));
  bind_inputs();
  encoder.set_input_array(summaries, 4);
  for (int i = 0; i < 2; ++i) encoder.set_output_array(outputs[i], 5 + i);
  encoder.set_bytes(params, 7);
  encoder.set_bytes(parts.count, 8);
  encoder.dispatch_threadgroups(MTL::Size(params.batch, 1, 1), MTL::Size(kSimdWidth, 1, 1));
}

}  // namespace mlxcel::metal

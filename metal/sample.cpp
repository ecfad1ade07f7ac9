#include "launchers.h"
#include "sample_parts.h"

namespace mlxcel::metal {

void sample(const SampleParams& params, const Arrays& inputs, Arrays& outputs,
            const mx::Stream& stream) {
  for (mx::array& out : outputs) allocate(out);
  if (params.batch == 0) return;
  const RowParts parts(params.batch, params.vocab);
  mx::array summaries = workspace({params.batch, parts.count, kSummaryWords}, mx::int32, stream);
  auto& encoder = mx::metal::get_command_encoder(stream);

  auto* scan = kernel(stream, sources::k_sample, "sample_scan", {params.dtype});
  encoder.set_compute_pipeline_state(scan);
  for (int i = 0; i < 2; ++i) encoder.set_input_array(inputs[i], i);
  encoder.set_output_array(summaries, 2);
  encoder.set_bytes(params, 3);
  encoder.set_bytes(parts.size, 4);
  encoder.dispatch_threadgroups(MTL::Size(parts.count, params.batch, 1),
                                MTL::Size(parts.threads(scan), 1, 1));

  const bool filters = params.work == SampleWork::top_k || params.work == SampleWork::filters;
  if (!filters) {
    encoder.set_compute_pipeline_state(kernel(stream, sources::k_sample, "sample_pick"));
    encoder.set_input_array(summaries, 0);
    for (int i = 0; i < 3; ++i) encoder.set_output_array(outputs[i], 1 + i);
    encoder.set_bytes(parts.count, 4);
    encoder.dispatch_threadgroups(MTL::Size(params.batch, 1, 1), MTL::Size(kSimdWidth, 1, 1));
    return;
  }
  auto* filter = kernel(stream, sources::k_sample, "sample_filter", {params.dtype});
  encoder.set_compute_pipeline_state(filter);
  for (int i = 0; i < 2; ++i) encoder.set_input_array(inputs[i], i);
  encoder.set_input_array(summaries, 2);
  for (int i = 0; i < 3; ++i) encoder.set_output_array(outputs[i], 3 + i);
  encoder.set_bytes(params, 6);
  encoder.set_bytes(parts.count, 7);
  encoder.dispatch_threadgroups(MTL::Size(params.batch, 1, 1),
                                MTL::Size(row_threads(filter, params.vocab), 1, 1));
}

}  // namespace mlxcel::metal

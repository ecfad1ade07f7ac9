#pragma once

#include <algorithm>

#include "library.h"

namespace mlxcel::metal {

// As in kernels/sample_draw.h.
constexpr int kSummaryWords = 5;
constexpr size_t kScanThreads = 256;

/// How rows are cut for the kernels that draw: few rows into many parts, many rows into few.
struct RowParts {
  RowParts(int batch, int vocab) {
    constexpr size_t kThreadgroups = 128;  // two for each core of the largest GPU
    constexpr size_t kLeast = 4096;        // tokens of a part
    const size_t wanted = std::clamp(ceil_div(kThreadgroups, batch), size_t{1},
                                     std::max(ceil_div(vocab, kLeast), size_t{1}));
    size = static_cast<int>(ceil_div(ceil_div(vocab, wanted), 4) * 4);  // of whole noise blocks
    count = static_cast<int>(ceil_div(vocab, size));
  }

  int size;   // tokens of a part
  int count;  // parts of a row
};

/// Two launches: `scan` leaves a summary of each part of a row, `join` makes the row's outputs of
/// them, with `join_threads` threads a row. Their buffers are the inputs, the summaries, join's
/// outputs, the params, then the size or the number of the parts; a kernel may leave some out.
template <class Params>
void scan_and_join(MTL::ComputePipelineState* scan, MTL::ComputePipelineState* join,
                   size_t join_threads, const Params& params, const Arrays& inputs, Arrays& outputs,
                   const mx::Stream& stream) {
  const RowParts parts(params.batch, params.vocab);
  mx::array summaries = workspace({params.batch, parts.count, kSummaryWords}, mx::int32, stream);
  auto& encoder = mx::metal::get_command_encoder(stream);
  const auto bind_inputs = [&](MTL::ComputePipelineState* pipeline) {
    encoder.set_compute_pipeline_state(pipeline);
    int index = 0;
    for (const mx::array& input : inputs) encoder.set_input_array(input, index++);
    return index;
  };

  int next = bind_inputs(scan);
  encoder.set_output_array(summaries, next++);
  encoder.set_bytes(params, next++);
  encoder.set_bytes(parts.size, next++);
  const size_t threads = threadgroup_size(scan, std::min(ceil_div(parts.size, 4), kScanThreads));
  encoder.dispatch_threadgroups(MTL::Size(parts.count, params.batch, 1), MTL::Size(threads, 1, 1));

  next = bind_inputs(join);
  encoder.set_input_array(summaries, next++);
  for (mx::array& out : outputs) encoder.set_output_array(out, next++);
  encoder.set_bytes(params, next++);
  encoder.set_bytes(parts.count, next++);
  encoder.dispatch_threadgroups(MTL::Size(params.batch, 1, 1), MTL::Size(join_threads, 1, 1));
}

}  // namespace mlxcel::metal

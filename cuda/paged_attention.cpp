#include <algorithm>

#include "attention.h"
#include "common/attention_inputs.h"
#include "glue.h"
#include "launchers.h"
#include "paged_attention_dispatch.h"

namespace mlxcel::cuda {

AttentionArrays attention_arrays(const PagedAttentionParams& params,
                                 std::span<const mx::array> inputs) {
  AttentionArrays a{};
  static_cast<AttentionInputs&>(a) = attention_inputs(
      params, inputs, []<class T>(const mx::array& x) { return device_ptr<T>(x); });
  a.num_indices = static_cast<int32_t>(inputs[4].size());
  return a;
}

namespace {

std::optional<mx::array> add_counters(const PagedAttentionParams& params, AttentionArrays& a,
                                      const mx::Stream& stream) {
  if (params.num_partials == 0 && !needs_queues(params)) return std::nullopt;
  const mx::array counters =
      stream_counters(std::max(params.num_q * params.num_kv_heads, 2), stream);
  a.counters = device_ptr<int32_t>(counters);
  return counters;
}

}  // namespace

std::optional<mx::array> add_workspaces(const PagedAttentionParams& params, AttentionArrays& a,
                                        const mx::Stream& stream) {
  if (params.num_partials > 0) {
    const mx::array v =
        workspace({params.num_partials, params.num_qo_heads, params.head_dim}, mx::float32, stream);
    const mx::array lse =
        workspace({params.num_partials, params.num_qo_heads}, mx::float32, stream);
    a.partial_v = device_ptr<float>(v);
    a.partial_lse = device_ptr<float>(lse);
  }
  return add_counters(params, a, stream);
}

void paged_attention(const PagedAttentionParams& params, const Arrays& inputs, Arrays& outputs,
                     const mx::Stream& stream) {
  AttentionArrays a = attention_arrays(params, inputs);
  EncoderLaunch launch(stream);
  launch.declare(inputs, outputs, stream);
  a.out = device_ptr<void>(outputs[0]);
  a.lse = device_ptr<float>(outputs[1]);
  if (const auto counters = add_workspaces(params, a, stream)) launch.writes(*counters);
  launch_paged_attention(params, a, launch);
}

void paged_attention_partial(const PagedAttentionParams& params, const Arrays& inputs,
                             Arrays& outputs, const mx::Stream& stream) {
  AttentionArrays a = attention_arrays(params, inputs);
  EncoderLaunch launch(stream);
  launch.declare(inputs, outputs, stream);
  a.partial_v = device_ptr<float>(outputs[0]);
  a.partial_lse = device_ptr<float>(outputs[1]);
  if (const auto counters = add_counters(params, a, stream)) launch.writes(*counters);
  launch_paged_attention(params, a, launch);
}

}  // namespace mlxcel::cuda

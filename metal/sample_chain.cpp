#include "launchers.h"
#include "sample_parts.h"

namespace mlxcel::metal {

void chain_speculative_sample(const ChainParams& params, const Arrays& inputs, Arrays& outputs,
                              const mx::Stream& stream) {
  for (mx::array& out : outputs) allocate(out);
  if (params.batch == 0) return;
  Arrays bound = inputs;
  // Without drafts there are no draft ids and probabilities: the target is bound and not read.
  if (params.num_draft == 0) bound[0] = bound[1] = inputs[2];
  scan_and_join(kernel(stream, sources::k_sample_chain, "chain_scan"),
                kernel(stream, sources::k_sample_chain, "chain_pick"), kSimdWidth, params, bound,
                outputs, stream);
}

}  // namespace mlxcel::metal

#include "launchers.h"
#include "sample_parts.h"

namespace mlxcel::metal {

void sample(const SampleParams& params, const Arrays& inputs, Arrays& outputs,
            const mx::Stream& stream) {
  for (mx::array& out : outputs) allocate(out);
  if (params.batch == 0) return;
  auto* scan = kernel(stream, sources::k_sample, "sample_scan", {params.dtype});
  if (params.work == SampleWork::top_k || params.work == SampleWork::filters) {
    auto* filter = kernel(stream, sources::k_sample, "sample_filter", {params.dtype});
    scan_and_join(scan, filter, row_threads(filter, params.vocab), params, inputs, outputs, stream);
  } else {
    auto* pick = kernel(stream, sources::k_sample, "sample_pick");
    scan_and_join(scan, pick, kSimdWidth, params, inputs, outputs, stream);
  }
}

}  // namespace mlxcel::metal

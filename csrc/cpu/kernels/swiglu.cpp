#include "cpu/kernels/swiglu.h"

#include "common/cpu_features.h"
#include "common/parallel.h"
#include "cpu/kernels/swiglu_impl.h"

namespace mlxcel::cpu {

#if defined(__x86_64__)
extern decltype(&swiglu_range) const swiglu_range_avx2;
#endif

void swiglu(const SwigluParams& params, const void* gate, const void* up, void* out) {
  if (params.features == 0) return;
  auto range = &swiglu_range;
#if defined(__x86_64__)
  if (cpu_features().avx2) range = swiglu_range_avx2;
#endif
  // A thread is worth waking for about 16K elements.
  parallel_for(params.rows, 16384 / params.features + 1,
               [&](size_t begin, size_t end) { range(params, begin, end, gate, up, out); });
}

}  // namespace mlxcel::cpu

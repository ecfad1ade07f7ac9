#include "cpu/kernels/add_rms_norm.h"

#include "common/cpu_features.h"
#include "common/parallel.h"
#include "cpu/kernels/add_rms_norm_impl.h"

namespace mlxcel::cpu {

#if defined(__x86_64__)
extern decltype(&add_rms_norm_range) const add_rms_norm_range_avx2;
#endif

void add_rms_norm(const AddRmsNormParams& params, const void* x, const void* residual,
                  const void* weight, void* normed, void* new_residual) {
  auto range = &add_rms_norm_range;
#if defined(__x86_64__)
  if (cpu_features().avx2) range = add_rms_norm_range_avx2;
#endif
  // A thread is worth waking for about 16K elements.
  const size_t grain = 16384 / params.hidden + 1;
  parallel_for(params.rows, grain, [&](size_t begin, size_t end) {
    range(params, begin, end, x, residual, weight, normed, new_residual);
  });
}

}  // namespace mlxcel::cpu

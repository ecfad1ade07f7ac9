#include "cpu/kernels/merge_states.h"

#include "common/cpu_features.h"
#include "common/parallel.h"
#include "cpu/kernels/merge_states_impl.h"

namespace mlxcel::cpu {

#if defined(__x86_64__)
extern decltype(&merge_states_range) const merge_states_range_avx2;
#endif

void merge_states(const MergeStatesParams& params, const void* v_in, const float* lse_in,
                  const int32_t* o_indptr, void* v_out, float* lse_out) {
  auto range = &merge_states_range;
#if defined(__x86_64__)
  if (cpu_features().avx2) range = merge_states_range_avx2;
#endif
  const size_t grain = 8192 / params.head_dim + 1;
  parallel_for(static_cast<size_t>(params.num_out) * params.num_heads, grain,
               [&](size_t begin, size_t end) {
                 range(params, begin, end, v_in, lse_in, o_indptr, v_out, lse_out);
               });
}

}  // namespace mlxcel::cpu

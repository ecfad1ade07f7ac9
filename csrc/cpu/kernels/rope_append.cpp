#include "cpu/kernels/rope_append.h"

#include "common/cpu_features.h"
#include "common/parallel.h"
#include "cpu/kernels/rope_append_impl.h"

namespace mlxcel::cpu {

#if defined(__x86_64__)
extern decltype(&rope_append_range) const rope_append_range_avx2;
#endif

void rope_append(const RopeAppendParams& params, const RopeAppendArrays& arrays) {
  auto range = &rope_append_range;
#if defined(__x86_64__)
  if (cpu_features().avx2) range = rope_append_range_avx2;
#endif
  // A thread is worth waking for about 8K elements.
  const size_t grain =
      8192 / (params.head_dim * (params.num_qo_heads + 2 * params.num_kv_heads)) + 1;
  parallel_for(params.num_tokens, grain,
               [&](size_t begin, size_t end) { range(params, begin, end, arrays); });
}

}  // namespace mlxcel::cpu

#include "cpu/kernels/rope_append.h"

#include <cmath>

#include "common/cpu_features.h"
#include "common/parallel.h"
#include "cpu/kernels/rope_append_impl.h"

namespace mlxcel::cpu {

#if defined(__x86_64__)
extern decltype(&rope_append_range) const rope_append_range_avx2;
#endif

void rope_rotations(const RopeAppendParams& params, const int32_t* positions, const float* inv_freq,
                    float* rotations) {
  const int half = params.rotary_dim / 2;
  // A sine and a cosine take some 20 ns.
  parallel_for(params.num_tokens, 1024 / (half + 1) + 1, [&](size_t begin, size_t end) {
    for (size_t token = begin; token < end; ++token) {
      float *cosines = rotations + token * 2 * half, *sines = cosines + half;
      for (int i = 0; i < half; ++i) {
        // Formed and reduced in f64: at position 100,000 an f32 product is off by 0.004 radians.
        const double angle =
            static_cast<double>(positions[token]) * static_cast<double>(inv_freq[i]);
        cosines[i] = params.scale * static_cast<float>(std::cos(angle));
        sines[i] = params.scale * static_cast<float>(std::sin(angle));
      }
    }
  });
}

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

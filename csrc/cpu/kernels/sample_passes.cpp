#include "cpu/kernels/sample_passes.h"

#include <cmath>

#include "common/cpu_features.h"
#include "cpu/kernels/sample_passes_impl.h"

namespace mlxcel::cpu {

#if defined(__x86_64__)
extern const SamplePasses sample_passes_avx2;
#endif

const SamplePasses& sample_passes() {
#if defined(__x86_64__)
  if (cpu_features().avx2) return sample_passes_avx2;
#endif
  return kPasses;
}

const GumbelTable& GumbelTable::instance() {
  static const GumbelTable table;
  return table;
}

GumbelTable::GumbelTable() {
  for (int i = 0; i < kSize; ++i) {
    // gumbel(u) > gap where u > exp(-exp(-gap)); two steps of slack cover the rounding.
    const double u = std::exp(-std::exp(-(i / 16.0 - 4.0)));
    const double step = std::floor(u * 0x1p23) - 2.0;
    bits_[i] = step > 0.0 ? static_cast<uint32_t>(step) << 9 : 0;
  }
}

}  // namespace mlxcel::cpu

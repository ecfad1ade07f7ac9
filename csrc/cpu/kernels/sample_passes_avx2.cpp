#include "cpu/kernels/sample_passes_impl.h"

namespace mlxcel::cpu {

extern const SamplePasses sample_passes_avx2;
const SamplePasses sample_passes_avx2 = kPasses;

}  // namespace mlxcel::cpu

#include "cpu/kernels/add_rms_norm_impl.h"

namespace mlxcel::cpu {

extern decltype(&add_rms_norm_range) const add_rms_norm_range_avx2;
decltype(&add_rms_norm_range) const add_rms_norm_range_avx2 = &add_rms_norm_range;

}  // namespace mlxcel::cpu

#include "cpu/kernels/linear_impl.h"

namespace mlxcel::cpu {

extern decltype(&linear_kernels) const linear_kernels_avx512;
decltype(&linear_kernels) const linear_kernels_avx512 = &linear_kernels;

}  // namespace mlxcel::cpu

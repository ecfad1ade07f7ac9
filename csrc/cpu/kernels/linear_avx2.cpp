#include "cpu/kernels/linear_impl.h"

namespace mlxcel::cpu {

extern decltype(&linear_kernels) const linear_kernels_avx2;
decltype(&linear_kernels) const linear_kernels_avx2 = &linear_kernels;

}  // namespace mlxcel::cpu

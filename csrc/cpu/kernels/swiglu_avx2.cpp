#include "cpu/kernels/swiglu_impl.h"

namespace mlxcel::cpu {

extern decltype(&swiglu_range) const swiglu_range_avx2;
decltype(&swiglu_range) const swiglu_range_avx2 = &swiglu_range;

}  // namespace mlxcel::cpu

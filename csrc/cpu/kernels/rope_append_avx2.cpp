#include "cpu/kernels/rope_append_impl.h"

namespace mlxcel::cpu {

extern decltype(&rope_append_range) const rope_append_range_avx2;
decltype(&rope_append_range) const rope_append_range_avx2 = &rope_append_range;

}  // namespace mlxcel::cpu

#include "cpu/kernels/merge_states_impl.h"

namespace mlxcel::cpu {

extern decltype(&merge_states_range) const merge_states_range_avx2;
decltype(&merge_states_range) const merge_states_range_avx2 = &merge_states_range;

}  // namespace mlxcel::cpu

#include "cpu/kernels/paged_attention_impl.h"

namespace mlxcel::cpu {

extern decltype(&attention_code) const attention_code_avx512;
decltype(&attention_code) const attention_code_avx512 = &attention_code;

}  // namespace mlxcel::cpu

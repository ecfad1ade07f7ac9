#include "paged_attention_matrix.h"

#define INSTANTIATE(name, type, dim)                                          \
  template [[host_name("paged_attention_matrix_" #name "_" #dim)]] [[kernel]] \
  decltype(mlxcel::paged_attention_matrix<type, dim>) mlxcel::paged_attention_matrix<type, dim>;

#define INSTANTIATE_DIMS(name, type) \
  INSTANTIATE(name, type, 64)        \
  INSTANTIATE(name, type, 80)        \
  INSTANTIATE(name, type, 96)        \
  INSTANTIATE(name, type, 112)       \
  INSTANTIATE(name, type, 128)       \
  INSTANTIATE(name, type, 192)       \
  INSTANTIATE(name, type, 256)

INSTANTIATE_DIMS(f32, float)
INSTANTIATE_DIMS(f16, half)
INSTANTIATE_DIMS(bf16, bfloat)

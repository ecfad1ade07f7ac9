#include "paged_attention.h"

#define INSTANTIATE(name, type, dim, rows)                                         \
  template [[host_name("paged_attention_" #name "_" #dim "_" #rows)]] [[kernel]]   \
  decltype(mlxcel::paged_attention<type, dim, rows>) mlxcel::paged_attention<type, dim, rows>;

#define INSTANTIATE_ROWS(name, type, dim) \
  INSTANTIATE(name, type, dim, 1)         \
  INSTANTIATE(name, type, dim, 2)         \
  INSTANTIATE(name, type, dim, 4)         \
  INSTANTIATE(name, type, dim, 8)

#define INSTANTIATE_DIMS(name, type) \
  INSTANTIATE_ROWS(name, type, 64)   \
  INSTANTIATE_ROWS(name, type, 80)   \
  INSTANTIATE_ROWS(name, type, 96)   \
  INSTANTIATE_ROWS(name, type, 112)  \
  INSTANTIATE_ROWS(name, type, 128)  \
  INSTANTIATE_ROWS(name, type, 192)  \
  INSTANTIATE_ROWS(name, type, 256)

INSTANTIATE_DIMS(f32, float)
INSTANTIATE_DIMS(f16, half)
INSTANTIATE_DIMS(bf16, bfloat)

#include "rope_append.h"

#define INSTANTIATE(name, type)                           \
  template [[host_name("rope_append_" #name)]] [[kernel]] \
  decltype(mlxcel::rope_append<type>) mlxcel::rope_append<type>;

INSTANTIATE(f32, float)
INSTANTIATE(f16, half)
INSTANTIATE(bf16, bfloat)

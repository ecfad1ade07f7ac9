#include "sample_renorm.h"

#define INSTANTIATE(name, type)                      \
  template [[host_name("renorm_" #name)]] [[kernel]] \
  decltype(mlxcel::renorm<type>) mlxcel::renorm<type>;

INSTANTIATE(f32, float)
INSTANTIATE(f16, half)
INSTANTIATE(bf16, bfloat)

#include "add_rms_norm.h"

#define INSTANTIATE(name, type)                            \
  template [[host_name("add_rms_norm_" #name)]] [[kernel]] \
  decltype(mlxcel::add_rms_norm<type>) mlxcel::add_rms_norm<type>;

INSTANTIATE(f32, float)
INSTANTIATE(f16, half)
INSTANTIATE(bf16, bfloat)

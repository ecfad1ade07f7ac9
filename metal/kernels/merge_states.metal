#include "merge_states.h"

#define INSTANTIATE(name, type)                            \
  template [[host_name("merge_states_" #name)]] [[kernel]] \
  decltype(mlxcel::merge_states<type>) mlxcel::merge_states<type>;

INSTANTIATE(f32, float)
INSTANTIATE(f16, half)
INSTANTIATE(bf16, bfloat)

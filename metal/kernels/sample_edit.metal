#include "sample_edit.h"

#define INSTANTIATE(name, type)                           \
  template [[host_name("edit_logits_" #name)]] [[kernel]] \
  decltype(mlxcel::edit_logits<type>) mlxcel::edit_logits<type>;

INSTANTIATE(f32, float)
INSTANTIATE(f16, half)
INSTANTIATE(bf16, bfloat)

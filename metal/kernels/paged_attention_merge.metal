#include "paged_attention_merge.h"

#define INSTANTIATE(name, type)                                     \
  template [[host_name("paged_attention_merge_" #name)]] [[kernel]] \
  decltype(mlxcel::paged_attention_merge<type>) mlxcel::paged_attention_merge<type>;

INSTANTIATE(f32, float)
INSTANTIATE(f16, half)
INSTANTIATE(bf16, bfloat)

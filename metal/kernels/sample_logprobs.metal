#include "sample_logprobs.h"

#define INSTANTIATE(name, type)                              \
  template [[host_name("token_logprobs_" #name)]] [[kernel]] \
  decltype(mlxcel::token_logprobs<type>) mlxcel::token_logprobs<type>;

INSTANTIATE(f32, float)
INSTANTIATE(f16, half)
INSTANTIATE(bf16, bfloat)

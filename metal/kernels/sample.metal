#include "sample.h"

#define INSTANTIATE(name, type)                                  \
  template [[host_name("sample_scan_" #name)]] [[kernel]]        \
  decltype(mlxcel::sample_scan<type>) mlxcel::sample_scan<type>; \
  template [[host_name("sample_filter_" #name)]] [[kernel]]      \
  decltype(mlxcel::sample_filter<type>) mlxcel::sample_filter<type>;

INSTANTIATE(f32, float)
INSTANTIATE(f16, half)
INSTANTIATE(bf16, bfloat)

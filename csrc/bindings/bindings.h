#pragma once

#include <nanobind/nanobind.h>

namespace mlxcel {

void bind_runtime(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_norm(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_kvcache(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_decoder_stack(nanobind::module_& m);

}  // namespace mlxcel

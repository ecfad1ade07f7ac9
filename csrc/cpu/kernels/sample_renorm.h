#pragma once

#include "params/sample_renorm.h"

namespace mlxcel::cpu {

/// x, out (batch, vocab) of params.dtype, values (batch). Runs on the thread pool.
void renorm(const RenormParams& params, const void* x, const RenormValue* values, void* out);

}  // namespace mlxcel::cpu

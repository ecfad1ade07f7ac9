#pragma once

#include "params/linear.h"

namespace mlxcel::cpu {

/// Operands of a linear layer; shapes and types are in LinearParams.
struct LinearArrays {
  const void* x;
  const void* weight;
  const void* scales;   // null where dense
  const void* offsets;  // the same
  const void* bias;     // null where there is none
  void* out;            // (rows, n), rows out_stride apart
};

/// Runs on the thread pool. Every out[m, n] is summed in one order, which depends on k and the
/// format alone: runs of fused multiply-adds in ascending k (a run is a quantization group, or 256
/// elements where the weight is dense), then the runs in ascending order. So a row of x gives the
/// same bits in any batch and with any number of threads.
void linear(const LinearParams& params, const LinearArrays& arrays);

/// linear() of a weight whose n rows are those of a gate, then those of `up`, and activated[m, i] =
/// silu(gate) * up, (rows, n / 2). arrays.out, (rows, n), holds gate and up meanwhile; out_stride
/// is n.
void linear_swiglu(const LinearParams& params, const LinearArrays& arrays, void* activated);

/// Row-major weight, scales and offsets of `from` into the packed layout.
void pack_linear(const LinearParams& params, const LinearArrays& from, void* weight, void* scales,
                 void* offsets);

/// out[i, :] = row ids[i] of a packed weight as params.dtype; ids outside [0, n) give NaN.
void linear_rows(const LinearParams& params, const LinearArrays& arrays, const int32_t* ids,
                 void* out);

}  // namespace mlxcel::cpu

#pragma once

#include <algorithm>

#include "library.h"

namespace mlxcel::metal {

// As in kernels/sample_draw.h and kernels/sample.h.
constexpr int kSummaryWords = 5;
constexpr size_t kScanThreads = 256;

/// How rows are cut for the kernels that draw: few rows into many parts, many rows into few.
struct RowParts {
  RowParts(int batch, int vocab) {
    constexpr size_t kThreadgroups = 128;  // two for each core of the largest GPU
    constexpr size_t kLeast = 4096;        // tokens of a part
    const size_t wanted = std::clamp(ceil_div(kThreadgroups, batch), size_t{1},
                                     std::max(ceil_div(vocab, kLeast), size_t{1}));
    size = static_cast<int>(ceil_div(ceil_div(vocab, wanted), 4) * 4);  // of whole noise blocks
    count = static_cast<int>(ceil_div(vocab, size));
  }

  size_t threads(const MTL::ComputePipelineState* kernel) const {
    return threadgroup_size(kernel, std::min(ceil_div(size, 4), kScanThreads));
  }

  int size;   // tokens of a part
  int count;  // parts of a row
};

}  // namespace mlxcel::metal

#pragma once

#include <cstdint>

namespace mlxcel {

/// Seed and draw index of one request, [batch, 4] 32-bit words. Position i of its chain uses draw
/// index draw + i.
struct ChainRow {
  uint32_t seed[2];
  uint32_t draw[2];
};
static_assert(sizeof(ChainRow) == 16);

struct ChainParams {
  int32_t batch;
  int32_t num_draft;
  int32_t vocab;
};
static_assert(sizeof(ChainParams) == 12);

}  // namespace mlxcel

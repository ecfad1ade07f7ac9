#pragma once

#include <cstdint>

#include "params/dtype.h"

namespace mlxcel {

/// How one row is drawn. Rows travel as one [batch, 8] array of 32-bit words.
struct SampleRow {
  float temperature;  // below 1e-5: argmax
  int32_t top_k;      // 1: argmax; below 1 or at least the vocabulary: off
  float top_p;        // <= 0: argmax; >= 1: off
  float min_p;        // <= 0: off
  uint32_t seed[2];   // low, high word: the Philox key
  uint32_t draw[2];   // low, high word: index of this draw among the request's draws
};
static_assert(sizeof(SampleRow) == 32);

MLXCEL_CONSTANT float kGreedyTemperature = 1e-5f;

#if defined(__CUDACC__)
#define MLXCEL_HOST_DEVICE __host__ __device__
#else
#define MLXCEL_HOST_DEVICE
#endif

MLXCEL_HOST_DEVICE inline bool is_greedy(SampleRow row) {
  return !(row.temperature >= kGreedyTemperature) || row.top_k == 1 || row.top_p <= 0.0f;
}

MLXCEL_HOST_DEVICE inline bool is_filtered(SampleRow row, int32_t vocab) {
  return (row.top_k > 0 && row.top_k < vocab) || row.top_p < 1.0f || row.min_p > 0.0f;
}

/// The most that any row of a launch asks for: lets a launcher pick a lighter kernel. A row that
/// asks for less is served as if alone.
enum class SampleWork : int32_t {
  greedy = 0,
  temperature = 1,
  top_k = 2,   // every row that filters has a top_k of at most kMaxListedTopK
  filters = 3  // anything
};

MLXCEL_CONSTANT int32_t kMaxListedTopK = 512;

struct SampleParams {
  int32_t batch;
  int32_t vocab;
  FloatType dtype;  // of the logits
  SampleWork work;
  int32_t joint;  // 0: top_p is a share of what min_p and top_k left; 1: of the whole row
  int32_t temperature_last;  // 1: the filters see the distribution at temperature 1
};
static_assert(sizeof(SampleParams) == 24);

/// What the second word of the Philox counter keeps apart. The words are: element block (four
/// tokens), stream, draw index low, draw index high.
enum class RngStream : uint32_t {
  gumbel = 0,  // noise of each token
  accept = 1   // acceptance of a drafted token; element block 0
};

}  // namespace mlxcel

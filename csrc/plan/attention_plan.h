#pragma once

#include <cstdint>
#include <vector>

#include "params/paged_attention.h"

namespace mlxcel::plan {

/// What the planner must know of a machine. Costs are counted in KV tokens of a decode tile.
struct PlanTarget {
  int32_t slots;           // (tile, KV head) pairs that run at once: threads, or SMs * blocks an SM
  int32_t tile_rows;       // most query rows (tokens * group size) of a tile
  int32_t rows_per_token;  // query rows whose arithmetic costs as much as loading a token's K and V
  int32_t min_chunk_tokens;        // the shortest span worth a tile of its own
  int32_t tile_overhead;           // fixed cost of a tile and of merging its result
  int32_t max_waves;               // split until this many rounds of `slots` are full
  int32_t invariant_chunk_tokens;  // chunk length where batch_invariant is asked for
};

/// Page counts, not token counts: a plan stays valid while the page counts do.
struct AttentionProblem {
  const int32_t* kv_indptr;  // [batch + 1] pages
  const int32_t* qo_indptr;  // [batch + 1] query tokens, or nullptr: one token a request
  int32_t batch;
  int32_t page_size;
  int32_t num_kv_heads;
  int32_t group_size;
  int32_t window_left;   // -1: all
  bool causal;           // the last query token is the last KV token
  bool batch_invariant;  // chunk boundaries depend on nothing but the position in the request
  bool partial;          // every tile writes partial states, also those that nothing is merged with
};

struct AttentionPlan {
  std::vector<AttentionTile> tiles;   // the most expensive first
  std::vector<int32_t> merge_indptr;  // [num_q + 1] partial rows of each query token; an empty
                                      // range: its one tile writes the output itself
  int32_t num_partials = 0;
  int32_t num_groups = 0;
  int32_t max_q_len = 0;
  int32_t max_chunks = 0;    // tiles that share one query token
  int64_t chunk_tokens = 0;  // longest chunk of a decode tile, before clipping
};

/// Cuts the queries into tiles and the pages of long requests into chunks, so that `target.slots`
/// workers that take the tiles in order finish close together.
AttentionPlan plan_attention(const AttentionProblem& problem, const PlanTarget& target);

}  // namespace mlxcel::plan

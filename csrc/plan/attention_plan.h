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
  int32_t invariant_chunk_tokens;  // longest chunk where batch_invariant is asked for
  int32_t small_rows = 0;          // a launch with a tile of more query rows has another kernel, of
  int32_t large_slots = 0;         // which this many run at once; 0: `slots`, whatever the tiles
  int32_t mixed_rows = 0;    // a launch with a tile of more query rows may run large tiles beside
                             // decode tiles, each kind on all `slots`; 0: no such kernel
  int32_t max_cluster = 0;   // the most chunks of a token that the kernel merges by itself, where
                             // all have as many
  bool takes_turns = false;  // a slot runs one tile at a time, so that none hides what another
                             // waits for
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

/// Pages that the query tokens of several requests read in shared tiles.
struct SharedSpan {
  int32_t first;  // its members are CascadeLevels::requests[first, last)
  int32_t last;
  int32_t page_begin;
  int32_t page_end;
};

/// Which common prefixes have shared tiles.
struct CascadeLevels {
  std::vector<SharedSpan> spans;      // outer ones before those that continue them
  std::vector<int32_t> requests;      // members of every span are neighbours
  std::vector<int32_t> token_indptr;  // [requests + 1] their query tokens in token_order
  std::vector<int32_t> token_order;
};

struct AttentionPlan {
  std::vector<AttentionTile> tiles;   // the most expensive first
  std::vector<int32_t> merge_indptr;  // [num_q + 1] partial rows of each query token; an empty
                                      // range: its one tile writes the output itself
  std::vector<int32_t> token_order;   // query tokens of shared tiles
  int32_t num_members = 0;            // requests that have shared tiles
  int32_t num_levels = 0;             // the most shared spans of one request
  int32_t shared_pages = 0;           // of all spans together
  int32_t shared_chunks = 0;
  int32_t num_partials = 0;
  int32_t num_groups = 0;
  int32_t max_q_len = 0;
  int32_t num_large = 0;  // of a mixed launch (PlanTarget::mixed_rows): its large tiles, which come
                          // before the decode tiles; 0: it is not one
  int32_t max_chunks = 0;    // tiles that share one query token
  int32_t chunks_each = 0;   // PagedAttentionParams::chunks_each
  int64_t chunk_tokens = 0;  // longest chunk of a decode tile, before clipping
};

/// Cuts the queries into tiles and the pages of long requests into chunks, so that `target.slots`
/// workers that take the tiles in order finish close together. `levels` (none: flat) have tiles of
/// their own, in the same list; the requests' tiles then read what is left.
AttentionPlan plan_attention(const AttentionProblem& problem, const PlanTarget& target,
                             const CascadeLevels& levels = {});

/// Chunks of batch-invariant plans end at fixed pages of a request: the last of them up to `page`,
/// and the first of them behind it.
int32_t fixed_chunk_before(const AttentionProblem& problem, const PlanTarget& target, int32_t page);
int32_t fixed_chunk_after(const AttentionProblem& problem, const PlanTarget& target, int32_t page);

}  // namespace mlxcel::plan

#pragma once

#include <cstdint>
#include <vector>

#include "plan/attention_plan.h"
#include "plan/shared_prefix.h"

namespace mlxcel::plan {

/// What sharing costs on a machine, in the unit of PlanTarget: the time of a KV token of a decode
/// tile whose K and V nobody has read before. Measured by `mlxcel-ext tune cascade`.
struct CascadeCosts {
  float reread;  // a KV token that another tile of the launch reads too, from a cache
  float row;     // arithmetic of one query row of a stacked tile for one KV token
  float tile;    // one more tile
  float merge;   // one more partial row of one query head: written, read and merged
  float launch;  // what a launch takes longer for having shared tiles at all
  float other;   // a KV token of the tiles that are not shared, in a launch that has some: 1 or
                 // more, where they run on a kernel that is made for larger ones
};

/// Nodes with at least this many pages and members are shared whatever they cost; 0: costs decide.
struct CascadeFloors {
  int32_t min_pages;
  int32_t min_members;
};

/// Chooses the nodes of a tree that are worth tiles of their own; the spans of the others are read
/// by the nodes below them, or by each member. Empty where flat attention is estimated to be
/// faster.
///
/// A batch-invariant plan shares whole chunks of its fixed length alone, so that each query token
/// meets the same chunks as in a flat plan, in the same order; with a window, none.
CascadeLevels choose_levels(const SharedPrefixTree& tree, const AttentionProblem& problem,
                            const PlanTarget& target, const CascadeCosts& costs,
                            const CascadeFloors& floors);

}  // namespace mlxcel::plan

#pragma once

#include <iosfwd>

#include "attention_arrays.h"
#include "launch.h"

namespace mlxcel::cuda {

/// The kernels that can serve an attention launch.
enum class AttentionKernel {
  decode_sm90,  // keys as rows of the product, up to 32 query rows a tile; copies by the tensor
                // memory accelerator, head_dim 64 and 128 (paged_decode.cuh)
  decode,       // the same by cp.async, every head_dim
  ragged,  // query rows as rows of the product; up to 128 a tile, decode tiles in the same launch
           // (paged_ragged.cuh)
  ragged_sm90,  // the same with warpgroup products, head_dim 64 and 128 (paged_ragged_sm90.cuh)
  mixed_sm90,   // the same where the plan wants large tiles and decode tiles side by side on every
                // multiprocessor; not batch invariant (paged_mixed_sm90.cuh)
  simple,       // f32 arithmetic; everything else (paged_simple.cuh)
};

struct AttentionConfig {
  AttentionKernel kernel;
  int column_tiles;  // decode, decode_sm90: eights of query rows
  int warps;
  int cluster = 1;  // decode_sm90: blocks that merge their chunks through shared memory
};

/// Query rows of the largest tile: tokens x heads of a KV head's group.
inline int query_rows(const PagedAttentionParams& p) {
  return p.max_q_len * (p.num_qo_heads / p.num_kv_heads);
}

/// Whether the launch may be mixed_sm90's, which keeps its queues in AttentionArrays::counters.
inline bool needs_queues(const PagedAttentionParams& p) {
  return p.num_large_tiles > 0 && query_rows(p) <= 128 && p.page_size >= 8 &&
         p.dtype != FloatType::f32 && !p.batch_invariant;
}

/// What the choice depends on besides the problem: the kernels of one head dimension.
struct AttentionLimits {
  /// Shared memory of a decode block, with 1, 2 and 4 column tiles.
  struct Decode {
    int warp_bytes[3];
    int other_bytes[3];  // whatever the number of warps
  };
  int max_column_tiles;
  Decode decode;
  Decode decode_sm90;
  bool has_sm90;        // decode_sm90 and, if it is compiled, ragged_sm90 exist
  bool has_warpgroups;  // ragged_sm90 and mixed_sm90 are compiled
  int ragged_bytes;     // of a ragged block
};

/// Blocks of a decode_sm90 cluster for a launch whose query tokens have params.chunks_each tiles
/// each: as many, or 1 where the device does not hold all of its clusters at once.
template <class T, int D>
int decode_cluster(const AttentionConfig& config, const PagedAttentionParams& params,
                   const DeviceInfo& device);

/// For head_dim D; instantiated by paged_attention_d<D>.cu.
template <int D>
AttentionLimits attention_limits();

template <class T, int D>
void launch_attention(const AttentionConfig& config, const PagedAttentionParams& params,
                      const AttentionArrays& arrays, Launch& launch);

/// First match in the dispatch table; MLXCEL_EXT_FORCE=paged_attention:<kernel> takes that kernel
/// where it can serve the launch. MLXCEL_EXT_TRACE=1 prints each distinct choice once to stderr.
/// whole: out is wanted, not partial states.
AttentionConfig choose_attention(const PagedAttentionParams& params, bool whole,
                                 const DeviceInfo& device);

std::ostream& operator<<(std::ostream& out, const AttentionConfig& config);

}  // namespace mlxcel::cuda

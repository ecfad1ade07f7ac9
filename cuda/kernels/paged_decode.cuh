#pragma once

#include "kernels/cluster_merge.cuh"
#include "kernels/reduce.cuh"
#include "kernels/tma.cuh"

namespace mlxcel::cuda {

__host__ __device__ constexpr int align_up(int bytes, int alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

/// No tensor maps of the pools.
struct NoMaps {};

/// The pools as the tensor memory accelerator sees them (tensor_map.h).
struct PoolMaps {
  const CUtensorMap &k, &v;
  int page_groups;    // groups of eight tokens from a page to the next
  uint32_t barriers;  // shared address of one for each warp and stage
};

/// The threads of a block that work at one tile: neighbouring warps, with a named barrier.
struct Team {
  int first_warp, threads, barrier;

  static __device__ __forceinline__ Team whole_block() {
    return {0, static_cast<int>(blockDim.x), 0};
  }
  __device__ __forceinline__ int thread() const {
    return static_cast<int>(threadIdx.x) - first_warp * kWarp;
  }
  __device__ __forceinline__ void sync() const { named_barrier_sync(barrier, threads); }
};

/// Where a ring of buffers that serves several tiles goes on.
struct RingPlace {
  int full = 0;   // stage to read
  int round = 0;  // parity of the rounds through the ring
};

/// Attention of a few query rows (up to 8 * ColumnTiles rows: tokens x heads of one KV head's
/// group) over a span of pages, for 16-bit types.
///
/// Keys are the rows of the matrix product: S = K Q^T takes 16 keys by 8 query rows, O^T = V^T P
/// takes 16 dimensions by 8 query rows, so that a group of up to 8 heads fills the instruction.
///
/// Each warp is on its own: it takes every Warps-th run of `Keys` tokens, copies their K and V into
/// its own ring of `Stages` buffers, and keeps its own softmax state; no barrier until the states
/// of the warps are merged at the end (and one for Q, where it does not fit the registers: then all
/// warps of the block must stream). The number of warps is the launch's choice.
///
/// K and V come by cp.async, or with PoolMaps by the tensor memory accelerator.
template <class T, int D, int ColumnTiles, int Keys, int Stages, class Maps = NoMaps>
struct PagedDecode {
  static constexpr bool kBoxes = std::is_same_v<Maps, PoolMaps>;
  static constexpr int kColumns = 8 * ColumnTiles;
  static constexpr int kMaxWarps = 8;
  // One 16-byte piece of padding: neighbouring rows start in different banks for ldmatrix.
  static constexpr int kRow = D + 8;
  using Layout = std::conditional_t<kBoxes, SwizzledRows<T, D>, PaddedRows<T, D>>;
  static constexpr int kTile = Keys * (kBoxes ? D : kRow);  // elements of K or V
  static constexpr int kStage = 2 * kTile;                  // K, then V
  static constexpr int kKeyTiles = Keys / 16;
  static constexpr int kSteps = D / 16;
  // Q's fragments stay in registers where they leave room for the accumulators.
  static constexpr bool kQueryInRegisters = ColumnTiles * D <= 256;
  static constexpr int kStateRow = D + 4;  // floats

  static constexpr int kAlignment = kBoxes ? 1024 : 16;
  static constexpr int kQueryBytes =
      align_up(kQueryInRegisters ? 0 : sizeof(T) * kColumns * kRow, kAlignment);
  static constexpr int kRingBytes = sizeof(T) * Stages * kStage;
  static constexpr int kStateBytes = sizeof(float) * kColumns * (kStateRow + 2);
  static constexpr int kWarpBytes =
      align_up(kRingBytes > kStateBytes ? kRingBytes : kStateBytes, kAlignment);
  /// Shared memory, from an aligned address on, and with what aligning it may take.
  static __host__ __device__ constexpr int block_bytes(int warps) {
    return kQueryBytes + warps * kWarpBytes;
  }
  static int shared_bytes(int warps) { return block_bytes(warps) + (kBoxes ? kAlignment : 0); }

  const PagedAttentionParams& p;
  const AttentionArrays& a;
  const TileView& view;
  const int kv_head, group, columns;  // columns: query rows in use
  const Team team;
  const int warp, warps, lane;
  const int page_shift;
  const uint64_t policy;
  const Maps maps;
  uint32_t ring;       // shared address of the warp's buffers
  uint32_t query;      // shared address of Q, where it is not in registers
  int origin, blocks;  // first slot of block 0; runs of `Keys` slots of all warps together

  uint32_t q_fragment[kQueryInRegisters ? ColumnTiles : 1][kSteps][2];
  float o[ColumnTiles][kSteps][4];
  float row_max[ColumnTiles][2], row_sum[ColumnTiles][2];

  __device__ PagedDecode(const PagedAttentionParams& p, const AttentionArrays& a,
                         const TileView& view, int kv_head, int warps, char* shared,
                         const Maps& maps = {}, const Team& team = Team::whole_block())
      : p(p),
        a(a),
        view(view),
        kv_head(kv_head),
        group(p.num_qo_heads / p.num_kv_heads),
        columns(view.tile.q_len * (p.num_qo_heads / p.num_kv_heads)),
        team(team),
        warp(team.thread() / kWarp),
        warps(warps),
        lane(threadIdx.x % kWarp),
        page_shift(page_shift_of(p)),
        policy(l2_policy(a.evict_first != 0)),
        maps(maps) {
    query = shared_address(shared);
    ring = query + kQueryBytes + warp * kWarpBytes;
    origin = view.origin(p, Keys);
    blocks = view.blocks(origin, Keys);
  }

  __device__ __forceinline__ uint32_t stage_address(int stage) const {
    return ring + static_cast<uint32_t>(stage * kStage * sizeof(T));
  }

  /// Slot of a block that this lane has to do with: its key, or where its box begins.
  __device__ __forceinline__ int own_slot(int block) const {
    const int slot = origin + block * Keys;
    if constexpr (kBoxes) return slot + (p.page_size < Keys ? lane % 2 * 8 : 0);
    return slot + lane % Keys;
  }

  /// The page id of that slot.
  __device__ __forceinline__ int page_in(int block) const {
    return page_of(view, page_shift, own_slot(block));
  }

  /// The barrier of a stage of this warp.
  __device__ __forceinline__ uint32_t arrival(int stage) const {
    return maps.barriers + static_cast<uint32_t>(warp * Stages + stage) * 8;
  }

  __device__ __forceinline__ void copy_block(int block, int stage, int page) const {
    const uint32_t to = stage_address(stage);
    if constexpr (kBoxes) {
      copy_boxes(block, page, to, arrival(stage));
    } else {
      const int64_t from = pool_offset(p, view, kv_head, own_slot(block), page);
      copy_rows<T, D, Keys, Layout>(a.k_pages, from, to, 0, policy);
      copy_rows<T, D, Keys, Layout>(a.v_pages, from, to, Keys, policy);
    }
  }

  /// A box each of K and V, or two of pages of 8 by lanes 0 and 1.
  __device__ __forceinline__ void copy_boxes(int block, int page, uint32_t to,
                                             uint32_t barrier) const {
    static_assert(Keys == 16);
    const bool small = p.page_size < Keys;
    const int tokens = small ? 8 : Keys, slot = own_slot(block);
    const bool valid = lane < (small ? 2 : 1) && slot < view.end && slot + tokens > view.begin;
    const int boxes = small ? __popc(__ballot_sync(0xffffffffu, valid)) : 1;
    if (lane == 0) {
      barrier_expect(barrier, static_cast<uint32_t>(2 * boxes * tokens * D * sizeof(T)));
    }
    __syncwarp();
    if (!valid) return;
    const int group = page * maps.page_groups + (slot & (p.page_size - 1)) / 8;
    const uint32_t k = to + (small ? lane % 2 : 0) * Layout::kGroupBytes, v = k + kTile * sizeof(T);
    if (a.evict_first) {
      copy_box(k, maps.k, 0, 0, 0, kv_head, group, barrier, policy);
      copy_box(v, maps.v, 0, 0, 0, kv_head, group, barrier, policy);
    } else {
      copy_box(k, maps.k, 0, 0, 0, kv_head, group, barrier);
      copy_box(v, maps.v, 0, 0, 0, kv_head, group, barrier);
    }
  }

  /// Boxes bring all slots of a page: puts zeros where no query sees one, since what is there may
  /// be NaN.
  __device__ __forceinline__ void clean_values(int block, uint32_t values) const {
    const int slot = origin + block * Keys;
    if (slot >= view.begin && slot + Keys <= view.end) return;
    const int key = lane % Keys;
    if (slot + key < view.begin || slot + key >= view.end) {
      for (int d = lane / Keys * (D / 2); d < (lane / Keys + 1) * (D / 2); d += 8) {
        store_shared_16(values + Layout::offset(key, d), {});
      }
    }
    fence_shared_proxy();  // the stage is filled again
    __syncwarp();
  }

  /// Pointer to the query row of a column, which must be in use.
  __device__ __forceinline__ const T* query_row(int column) const {
    const int64_t token = view.token(column / group);
    return static_cast<const T*>(a.q) +
           (token * p.num_qo_heads + kv_head * group + column % group) * D;
  }

  /// Reads Q's fragments, or starts their copy to shared memory.
  __device__ __forceinline__ void load_query() {
    if constexpr (kQueryInRegisters) {
#pragma unroll
      for (int n = 0; n < ColumnTiles; ++n) {
        const int column = n * 8 + lane / 4;
        const bool used = column < columns;
        const uint32_t* row =
            reinterpret_cast<const uint32_t*>(query_row(used ? column : 0)) + lane % 4;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          q_fragment[n][k][0] = used ? __ldg(row + k * 8) : 0;
          q_fragment[n][k][1] = used ? __ldg(row + k * 8 + 4) : 0;
        }
      }
    } else {
      constexpr int kPieces = D / 8;
      for (int piece = team.thread(); piece < kColumns * kPieces; piece += warps * kWarp) {
        const int column = piece / kPieces, d = piece % kPieces * 8;
        const bool used = column < columns;
        copy_async_16(query + static_cast<uint32_t>((column * kRow + d) * sizeof(T)),
                      query_row(used ? column : 0) + d, used);
      }
      copy_async_commit();
    }
  }

  __device__ __forceinline__ void query_fragment(int n, int k, uint32_t (&b)[2]) const {
    if constexpr (kQueryInRegisters) {
      b[0] = q_fragment[n][k][0];
      b[1] = q_fragment[n][k][1];
    } else {
      const int row = n * 8 + lane % 8, d = k * 16 + lane / 8 % 2 * 8;
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                   : "=r"(b[0]), "=r"(b[1])
                   : "r"(query + static_cast<uint32_t>((row * kRow + d) * sizeof(T)))
                   : "memory");
    }
  }

  /// Logits of keys lane / 4 (+ 8) of each key tile and columns 2 * (lane % 4) (+ 1).
  __device__ __forceinline__ void scores(uint32_t keys, float (&s)[kKeyTiles][ColumnTiles][4]) {
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
      for (int n = 0; n < ColumnTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][n][e] = 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t b[ColumnTiles][2];
#pragma unroll
      for (int n = 0; n < ColumnTiles; ++n) query_fragment(n, k, b[n]);
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        uint32_t key[4];
        const int row = t * 16 + lane % 16, d = k * 16 + lane / 16 * 8;
        load_matrices(key, keys + Layout::offset(row, d));
#pragma unroll
        for (int n = 0; n < ColumnTiles; ++n) mma_16x8x16<T>(s[t][n], key, b[n][0], b[n][1]);
      }
    }
  }

  /// Logits to weights: masks, and moves the columns' references where that is due.
  __device__ __forceinline__ void softmax(int block, const LogitScale<>& logit,
                                          float (&s)[kKeyTiles][ColumnTiles][4]) {
    const int slot = origin + block * Keys;
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
      for (int n = 0; n < ColumnTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][n][e] = logit(s[t][n][e]);
      }
    }
    if (!view.all_see(p, slot, slot + Keys)) {
#pragma unroll
      for (int n = 0; n < ColumnTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int token = (n * 8 + lane % 4 * 2 + e) / group;
          const int from = view.first_slot(token), to = view.end_slot(p, token);
#pragma unroll
          for (int t = 0; t < kKeyTiles; ++t) {
            const int key = slot + t * 16 + lane / 4;
            if (key < from || key >= to) s[t][n][e] = -INFINITY;
            if (key + 8 < from || key + 8 >= to) s[t][n][e + 2] = -INFINITY;
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < ColumnTiles; ++n) {
      float m[2];  // of this lane's keys
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        m[e] = -INFINITY;
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) m[e] = fmaxf(m[e], fmaxf(s[t][n][e], s[t][n][e + 2]));
      }
      if (__any_sync(0xffffffffu,
                     above_headroom(m[0], row_max[n][0]) || above_headroom(m[1], row_max[n][1]))) {
        move(n, m);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        // All masked: weights 0, not NaN.
        const float base = row_max[n][e] == -INFINITY ? 0.0f : row_max[n][e];
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
          s[t][n][e] = exp2_fast(s[t][n][e] - base);
          s[t][n][e + 2] = exp2_fast(s[t][n][e + 2] - base);
          row_sum[n][e] += s[t][n][e] + s[t][n][e + 2];
        }
      }
    }
  }

  /// Moves the columns of a tile that have a logit above their headroom to their largest, given
  /// each lane's, and rescales what was summed so far.
  __device__ __forceinline__ void move(int n, const float (&lane_max)[2]) {
    float keep[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float m = lane_max[e];
#pragma unroll
      for (int step = 4; step < kWarp; step *= 2) {
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, step));
      }
      if (!above_headroom(m, row_max[n][e])) m = row_max[n][e];
      keep[e] = weight_of(row_max[n][e], m);
      row_max[n][e] = m;
      row_sum[n][e] *= keep[e];
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      o[n][k][0] *= keep[0];
      o[n][k][1] *= keep[1];
      o[n][k][2] *= keep[0];
      o[n][k][3] *= keep[1];
    }
  }

  __device__ __forceinline__ void add_values(uint32_t values,
                                             const float (&s)[kKeyTiles][ColumnTiles][4]) {
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
      uint32_t weights[ColumnTiles][2];
#pragma unroll
      for (int n = 0; n < ColumnTiles; ++n) {
        weights[n][0] = transpose_matrix(pack<T>(s[t][n][0], s[t][n][1]));
        weights[n][1] = transpose_matrix(pack<T>(s[t][n][2], s[t][n][3]));
      }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t value[4];
        const int row = t * 16 + lane / 16 * 8 + lane % 8, d = k * 16 + lane / 8 % 2 * 8;
        load_matrices_transposed(value, values + Layout::offset(row, d));
#pragma unroll
        for (int n = 0; n < ColumnTiles; ++n) {
          mma_16x8x16<T>(o[n][k], value, weights[n][0], weights[n][1]);
        }
      }
    }
  }

  __device__ __forceinline__ void add_taken_out() {
    for (int block = warp; block < blocks; block += warps) {
      const int slot = origin + block * Keys;
      if (view.all_see(p, slot, slot + Keys)) continue;
#pragma unroll
      for (int n = 0; n < ColumnTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = n * 8 + lane % 4 * 2 + e;
          add_nonfinite<T, Keys>(p, a, view, kv_head, min(column, columns - 1) / group, slot,
                                 [&](const T* row) {
#pragma unroll
                                   for (int k = 0; k < 2 * kSteps; ++k) {
                                     const float x = to_float(row[k * 8 + lane / 4]);
                                     if (!isfinite(x)) o[n][k / 2][k % 2 * 2 + e] += x;
                                   }
                                 });
        }
      }
    }
  }

  /// Makes the barriers of this warp's ring.
  __device__ __forceinline__ void init_ring() const {
    if constexpr (kBoxes) {
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < Stages; ++i) barrier_init(arrival(i), 1);
        barrier_init_fence();
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ void stream(RingPlace& place) {
    int page[Stages];
#pragma unroll
    for (int i = 0; i < Stages; ++i) page[i] = page_in(warp + i * warps);
    load_query();  // in flight together with the page ids
#pragma unroll
    for (int i = 0; i < Stages - 1; ++i) {
      if (warp + i * warps < blocks)
        copy_block(warp + i * warps, (place.full + i) % Stages, page[i]);
      if constexpr (!kBoxes) copy_async_commit();
    }
    int next = page[Stages - 1];
    if constexpr (!kQueryInRegisters) {
      copy_async_wait<kBoxes ? 0 : Stages - 1>();
      team.sync();
    }
#pragma unroll
    for (int n = 0; n < ColumnTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        row_max[n][e] = -INFINITY;
        row_sum[n][e] = 0.0f;
      }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][k][e] = 0.0f;
      }
    }
    const LogitScale<> logit(p);
    bool taken_out = false;
    int &full = place.full, empty = (full + Stages - 1) % Stages;  // stage to read, stage to fill
    [[maybe_unused]] int& round = place.round;
    for (int block = warp; block < blocks; block += warps) {
      if constexpr (!kBoxes) copy_async_wait<Stages - 2>();
      __syncwarp();
      const int ahead = block + (Stages - 1) * warps;
      const int page_now = next;
      next = page_in(ahead + warps);
      if (ahead < blocks) copy_block(ahead, empty, page_now);
      if constexpr (kBoxes)
        barrier_wait(arrival(full), round);
      else
        copy_async_commit();

      const uint32_t keys = stage_address(full), values = keys + kTile * sizeof(T);
      float s[kKeyTiles][ColumnTiles][4];
      scores(keys, s);
      softmax(block, logit, s);
      if constexpr (kBoxes) clean_values(block, values);
      if (view.tile.q_len > 1 &&
          !view.all_see(p, origin + block * Keys, origin + (block + 1) * Keys)) {
        taken_out |= take_out_nonfinite<T, D, Keys, Layout, kWarp>(values, lane);
        if constexpr (kBoxes) fence_shared_proxy();
        __syncwarp();
      }
      add_values(values, s);
      if (++full == Stages) {
        full = 0;
        round ^= 1;
      }
      empty = empty + 1 == Stages ? 0 : empty + 1;
    }
    if constexpr (!kBoxes) copy_async_wait<0>();
    if (view.tile.q_len > 1 && __any_sync(0xffffffffu, taken_out)) add_taken_out();
  }

  /// Puts this warp's state into its part of shared memory.
  __device__ __forceinline__ void store_state(char* shared) {
    __syncwarp();
    char* mine = shared + kQueryBytes + warp * kWarpBytes;
    float* values = reinterpret_cast<float*>(mine);
    float* stats = values + kColumns * kStateRow;  // [kColumns][max, sum]
#pragma unroll
    for (int n = 0; n < ColumnTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = n * 8 + lane % 4 * 2 + e;
        float sum = row_sum[n][e];
#pragma unroll
        for (int step = 4; step < kWarp; step *= 2) {
          sum += __shfl_xor_sync(0xffffffffu, sum, step);
        }
        if (lane < 4) {
          stats[column * 2] = row_max[n][e];
          stats[column * 2 + 1] = sum;
        }
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          values[column * kStateRow + k * 16 + lane / 4] = o[n][k][e];
          values[column * kStateRow + k * 16 + lane / 4 + 8] = o[n][k][e + 2];
        }
      }
    }
  }

  /// Merges the states of the warps, and what they give with those of the cluster's other blocks.
  /// Called by all threads of the team, also by those of warps that did not stream.
  template <class Cluster>
  __device__ __forceinline__ void finish(char* shared, const Cluster& cluster) {
    if (warp < warps) store_state(shared);
    team.sync();

    constexpr int N = 4, kPieces = D / N;
    for (int item = team.thread(); item < columns * kPieces; item += team.threads) {
      const int column = item / kPieces, d = item % kPieces * N;
      MergedState<N> state;
      float weight[kMaxWarps];
      float4 x[kMaxWarps];
#pragma unroll
      for (int w = 0; w < kMaxWarps; ++w) {
        if (w < warps) {
          const float* from = reinterpret_cast<const float*>(shared + kQueryBytes + w * kWarpBytes);
          weight[w] = from[kColumns * kStateRow + column * 2];
          x[w] = *reinterpret_cast<const float4*>(from + column * kStateRow + d);
          state.max = fmaxf(state.max, weight[w]);
        }
      }
#pragma unroll
      for (int w = 0; w < kMaxWarps; ++w) {
        if (w < warps) {
          const float* from = reinterpret_cast<const float*>(shared + kQueryBytes + w * kWarpBytes);
          weight[w] = weight_of(weight[w], state.max);
          state.sum += from[kColumns * kStateRow + column * 2 + 1] * weight[w];
          state.v[0] += x[w].x * weight[w];
          state.v[1] += x[w].y * weight[w];
          state.v[2] += x[w].z * weight[w];
          state.v[3] += x[w].w * weight[w];
        }
      }
      if (cluster.blocks == 1)
        write_state<T, N>(p, a, view, column / group, kv_head * group + column % group, d, state);
      else
        cluster.send(item, state.divided());
    }
    if (cluster.blocks == 1) return;
    cluster.finish([&](int item, const MergedState<N>& state) {
      const int column = item / kPieces;
      write_output<T, N>(p, a, view.token(column / group), kv_head * group + column % group,
                         item % kPieces * N, state);
    });
  }

  template <class Cluster = NoCluster>
  __device__ __forceinline__ void run(char* shared, const Cluster& cluster = {}) {
    if (warp < warps) {
      init_ring();
      RingPlace place;
      stream(place);
    }
    if (cluster.blocks > 1) cluster.begin();
    finish(shared, cluster);
  }

  /// One of several tiles in a row, all warps streaming; the rings' barriers were made before the
  /// first.
  __device__ __forceinline__ void run_next(char* shared, RingPlace& place) {
    stream(place);
    finish(shared, NoCluster());
    fence_shared_proxy();  // states were written where boxes are copied to
    team.sync();
  }
};

/// Tiles of few rows in a launch of larger ones, such as the private tiles beside shared ones, do
/// the arithmetic of eight rows.
template <class T, int D, int ColumnTiles, int Keys, int Stages>
__global__ void __launch_bounds__(256)
    paged_decode_kernel(const __grid_constant__ PagedAttentionParams p,
                        const __grid_constant__ AttentionArrays a) {
  extern __shared__ __align__(16) char shared[];
  const int kv_head = blockIdx.x % p.num_kv_heads;
  prefetch_tables(p, a);
  const TileView view(p, a, blockIdx.x / p.num_kv_heads);
  auto run = [&]<int Columns>() {
    PagedDecode<T, D, Columns, Keys, Stages> decode(p, a, view, kv_head, blockDim.x / kWarp,
                                                    shared);
    decode.run(shared);
  };
  if (ColumnTiles > 1 && view.tile.q_len * (p.num_qo_heads / p.num_kv_heads) <= 8)
    run.template operator()<1>();
  else
    run.template operator()<ColumnTiles>();
  merge_in_launch<T>(p, a, view, kv_head);
}

/// The same by the tensor memory accelerator, sm_90 and later. In clusters, there is one for each
/// query token and KV head, of a block a chunk.
template <class T, int D, int ColumnTiles, int Keys, int Stages, bool Clusters>
__global__ void __launch_bounds__(256)
    paged_decode_sm90_kernel(const __grid_constant__ PagedAttentionParams p,
                             const __grid_constant__ AttentionArrays a,
                             const __grid_constant__ CUtensorMap k_map,
                             const __grid_constant__ CUtensorMap v_map, int page_groups) {
  if constexpr (!kHasClusters) {
    __trap();
  } else {
    using Decode = PagedDecode<T, D, ColumnTiles, Keys, Stages, PoolMaps>;
    extern __shared__ __align__(16) char unaligned[];
    __shared__ __align__(8) uint64_t barriers[Decode::kMaxWarps * Stages + 1];
    char* shared = unaligned + (-shared_address(unaligned) & (Decode::kAlignment - 1));
    if (threadIdx.x == 0) {
      prefetch_map(k_map);
      prefetch_map(v_map);
    }
    const int blocks = Clusters ? cluster_blocks() : 1, warps = blockDim.x / kWarp;
    const int set = blockIdx.x / blocks, kv_head = set % p.num_kv_heads;
    prefetch_tables(p, a);
    const TileView view(p, a, set / p.num_kv_heads * blocks + (Clusters ? cluster_rank() : 0));
    const int columns = view.tile.q_len * (p.num_qo_heads / p.num_kv_heads);
    const PoolMaps maps{k_map, v_map, page_groups, shared_address(barriers)};
    auto run = [&]<int Columns>(const auto& cluster) {
      PagedDecode<T, D, Columns, Keys, Stages, PoolMaps> decode(p, a, view, kv_head, warps, shared,
                                                                maps);
      decode.run(shared, cluster);
    };
    if constexpr (Clusters) {
      run.template operator()<ColumnTiles>(
          ClusterMerge<T, D>(columns, shared_address(shared) + Decode::block_bytes(warps),
                             barriers + Decode::kMaxWarps * Stages));
    } else {
      if (ColumnTiles > 1 && columns <= 8)
        run.template operator()<1>(NoCluster());
      else
        run.template operator()<ColumnTiles>(NoCluster());
      merge_in_launch<T>(p, a, view, kv_head);
    }
  }
}

}  // namespace mlxcel::cuda

#pragma once

#include "kernels/paged_decode.cuh"
#include "kernels/paged_rows.cuh"
#include "kernels/tma.cuh"
#include "kernels/wgmma.cuh"

namespace mlxcel::cuda {

/// Large tiles (up to 128 query rows) and decode tiles in one launch of sm_90a, side by side on
/// every multiprocessor: the tensor cores work for the large tiles while the memory system streams
/// the decode tiles. head_dim 64 and 128; one block a multiprocessor, which takes tiles from two
/// queues until they are empty.
///
/// A block has four warpgroups. Two consume: 64 query rows of the large tile each, S = Q K^T and
/// O += P V by warpgroup products; weights of a block of keys are made while the product of those
/// before them with V runs. The third produces, ahead of the consumers and across the ends of
/// tiles: a warp copies K into a ring, another V (each waits for stages of its own), two more the
/// query rows. The fourth runs decode tiles, and the consumers join it when no large tile is left:
/// always four warps a tile, so that a tile's bits do not depend on who runs it.
///
/// Code that runs once a tile is short and there once, whatever it costs: with a cold cache each of
/// its lines is a trip to memory (a second loop for blocks that all rows see: 2 % faster in long
/// tiles, 15 % slower in short ones, H200, 2026-11-30).
template <class T, int D>
struct PagedMixedSm90 {
  static constexpr int kThreads = 512, kConsumers = 256, kConsumerWarps = 8, kDecodeWarps = 4;
  // Registers of a thread, of four times the 128 of the launch.
  static constexpr int kConsumerRegisters = 192, kDecodeRegisters = 96, kProducerRegisters = 32;
  static constexpr int kRows = 128, kKeys = kLargeKeys, kSteps = D / 16;
  using Rows = SwizzledRows<T, D>;
  using Decode = PagedDecode<T, D, 1, 16, 2, PoolMaps>;
  static_assert(Decode::kColumns == kDecodeRows);

  static constexpr int kAlignment = 1024;
  static constexpr int kQueryBytes = kRows * D * sizeof(T);
  static constexpr int kTileBytes = kKeys * D * sizeof(T);
  static constexpr int kLargeBytes = kQueryBytes + 4 * kTileBytes;  // two stages of K and of V
  static_assert(2 * Decode::block_bytes(kDecodeWarps) <= kLargeBytes);
  static constexpr int kSharedBytes = kAlignment + kLargeBytes + Decode::block_bytes(kDecodeWarps);

  // Named barriers; 0 is the whole block's.
  enum Barrier { kFirstTeam = 1, kAllRows = kFirstTeam + 3 };

  /// What a block keeps in shared memory besides the tiles.
  struct Control {
    uint64_t keys_full[2], keys_empty[2], values_full[2], values_empty[2];
    uint64_t query_full[2], query_empty[2];  // of the two halves of the rows
    uint64_t rows_full[2][2];  // the same, of this tile and the next: that may be there before all
                               // warps have looked at this one's
    uint64_t item_full[2], item_empty[2];
    uint64_t decode[3 * 2 * kDecodeWarps];
    int rows[2][kRows];  // where the states of a tile's rows go (RowStrip::write), and the next's
    int item[2];         // numbers of large tiles times KV heads, -1: none left
    int decode_item[3];  // the same for the three teams that run decode tiles
  };

  const PagedAttentionParams& p;
  const AttentionArrays& a;
  const CUtensorMap &k_map, &v_map;
  const int page_groups;
  Control& control;
  char* const shared;  // aligned
  const uint32_t base;
  const int group, warp, lane, page_shift, num_large, num_decode;

  __device__ PagedMixedSm90(const PagedAttentionParams& p, const AttentionArrays& a,
                            const CUtensorMap& k_map, const CUtensorMap& v_map, int page_groups,
                            Control& control, char* shared)
      : p(p),
        a(a),
        k_map(k_map),
        v_map(v_map),
        page_groups(page_groups),
        control(control),
        shared(shared),
        base(shared_address(shared)),
        group(p.num_qo_heads / p.num_kv_heads),
        warp(threadIdx.x / kWarp),
        lane(threadIdx.x % kWarp),
        page_shift(page_shift_of(p)),
        num_large(p.num_large_tiles * p.num_kv_heads),
        num_decode((p.num_tiles - p.num_large_tiles) * p.num_kv_heads) {}

  static __device__ __forceinline__ uint32_t at(const uint64_t& barrier) {
    return shared_address(&barrier);
  }
  __device__ __forceinline__ uint32_t keys_of(uint32_t fill) const {
    return base + static_cast<uint32_t>(kQueryBytes + fill % 2 * kTileBytes);
  }
  __device__ __forceinline__ uint32_t values_of(uint32_t fill) const {
    return base + static_cast<uint32_t>(kQueryBytes + (2 + fill % 2) * kTileBytes);
  }

  static __device__ __forceinline__ bool any_of_all_rows(bool x) {
    int any;
    asm volatile(
        "{.reg .pred p, q; setp.ne.b32 p, %1, 0;\n"
        "bar.red.or.pred q, %2, %3, p;\n"
        "selp.b32 %0, 1, 0, q;}"
        : "=r"(any)
        : "r"(static_cast<int>(x)), "r"(static_cast<int>(kAllRows)), "r"(kConsumers)
        : "memory");
    return any != 0;
  }

  /// Takes the next number of a queue (0: large tiles, 1: decode tiles), a counter in global memory
  /// that is asked `calls` times in all and is zero again after the last. A block's first tile of
  /// each kind is its own number, so that one that starts early does not take a second before
  /// another has its first.
  __device__ __forceinline__ int take(int queue, int calls) const {
    const int count = atomicAdd(a.counters + queue, 1);
    if (count == calls - 1) a.counters[queue] = 0;
    return static_cast<int>(gridDim.x) + count;
  }
  /// Once for each large tile: those that are no block's first, and a vain one of each block that
  /// had a first.
  __device__ __forceinline__ int take_large() const { return take(0, num_large); }
  /// The same, and a vain one of each team of consumers.
  __device__ __forceinline__ int take_decode() const {
    return take(1, num_decode + 2 * static_cast<int>(gridDim.x));
  }

  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        barrier_init(at(control.keys_full[i]), 1);
        barrier_init(at(control.values_full[i]), 1);
        barrier_init(at(control.item_full[i]), 1);
        barrier_init(at(control.query_full[i]), 1);
        barrier_init(at(control.rows_full[0][i]), 1);
        barrier_init(at(control.rows_full[1][i]), 1);
        barrier_init(at(control.keys_empty[i]), kConsumerWarps);
        barrier_init(at(control.values_empty[i]), kConsumerWarps);
        barrier_init(at(control.query_empty[i]), kConsumerWarps / 2);
        barrier_init(at(control.item_empty[i]), kConsumerWarps + 3);
      }
      for (auto& barrier : control.decode) barrier_init(at(barrier), 1);
      barrier_init_fence();
      prefetch_map(k_map);
      prefetch_map(v_map);
    }
    __syncthreads();
  }

  /// Calls f(item, n) for the large tiles of this block, as the producer of keys published them.
  template <class F>
  __device__ __forceinline__ void for_items(F&& f) const {
    for (uint32_t n = 0;; ++n) {
      barrier_wait(at(control.item_full[n % 2]), n / 2 & 1);
      __syncwarp();  // all lanes have seen this phase before one lets it end
      int item = 0;
      if (lane == 0) {
        item = control.item[n % 2];
        barrier_arrive(at(control.item_empty[n % 2]));
      }
      item = __shfl_sync(0xffffffffu, item, 0);
      if (item < 0) break;
      f(item, n);
    }
  }

  // The producers.

  /// Each lane below `boxes` copies one box of a block: 16 tokens, or 8 of smaller pages.
  __device__ __forceinline__ void produce_block(const CUtensorMap& map, const TileView& view,
                                                int kv_head, int slot, int page, uint32_t to,
                                                uint32_t barrier) const {
    const int tokens = min(p.page_size, 16), from = slot + lane * tokens;
    const bool valid = lane < kKeys / tokens && from < view.end && from + tokens > view.begin;
    const int boxes = __popc(__ballot_sync(0xffffffffu, valid));
    if (lane == 0) barrier_expect(barrier, static_cast<uint32_t>(boxes * tokens * D * sizeof(T)));
    __syncwarp();
    if (valid) {
      copy_box(to + lane * tokens / 8 * Rows::kGroupBytes, map, 0, 0, 0, kv_head,
               page * page_groups + (from & (p.page_size - 1)) / 8, barrier);
    }
  }

  /// Calls f(slot, page, last) for a tile's blocks of keys: `page` is the id of this lane's box.
  template <class F>
  __device__ __forceinline__ void for_blocks(const TileView& view, F&& f) const {
    const int tokens = min(p.page_size, 16);
    const int origin = view.origin(p, kKeys), blocks = view.blocks(origin, kKeys);
    int page = page_of(view, page_shift, origin + lane * tokens);
    for (int block = 0; block < blocks; ++block) {
      const int slot = origin + block * kKeys, now = page;
      page = page_of(view, page_shift, slot + kKeys + lane * tokens);
      f(slot, now, block + 1 == blocks);
    }
  }

  /// Takes the block's large tiles and publishes them, and copies their keys.
  __device__ __forceinline__ void produce_keys() const {
    uint32_t fill = 0;
    int item = static_cast<int>(blockIdx.x);
    for (uint32_t n = 0;; ++n) {
      const bool there = item < num_large;
      barrier_wait(at(control.item_empty[n % 2]), (n / 2 & 1) ^ 1);
      __syncwarp();  // as in for_items
      if (lane == 0) {
        control.item[n % 2] = there ? item : -1;
        barrier_arrive(at(control.item_full[n % 2]));
      }
      if (!there) break;
      const TileView view(p, a, item / p.num_kv_heads);
      const int kv_head = item % p.num_kv_heads;
      int next = -1;
      for_blocks(view, [&](int slot, int page, bool last) {
        // Late, since no other block can run what this one has taken; back before it is needed.
        if (last && lane == 0) next = take_large();
        barrier_wait(at(control.keys_empty[fill % 2]), (fill / 2 & 1) ^ 1);
        produce_block(k_map, view, kv_head, slot, page, keys_of(fill),
                      at(control.keys_full[fill % 2]));
        ++fill;
      });
      if (next < 0 && lane == 0) next = take_large();
      item = __shfl_sync(0xffffffffu, next, 0);
    }
  }

  __device__ __forceinline__ void produce_values() const {
    uint32_t fill = 0;
    for_items([&](int item, uint32_t) {
      const TileView view(p, a, item / p.num_kv_heads);
      for_blocks(view, [&](int slot, int page, bool) {
        barrier_wait(at(control.values_empty[fill % 2]), (fill / 2 & 1) ^ 1);
        produce_block(v_map, view, item % p.num_kv_heads, slot, page, values_of(fill),
                      at(control.values_full[fill % 2]));
        ++fill;
      });
    });
  }

  /// Copies 64 of the query rows, zeros past the tile's, and then notes where their states go.
  __device__ __forceinline__ void produce_query(int half) const {
    constexpr int kPieces = D / 8, kAtOnce = kWarp / kPieces;  // pieces of a row; rows
    for_items([&](int item, uint32_t n) {
      const TileView view(p, a, item / p.num_kv_heads);
      const int rows = view.tile.q_len * group, first = half * 64;
      // This lane's two rows: query token of the tile, query head, row of q.
      int token[2], head[2], from[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = min(first + i * kWarp + lane, rows - 1);
        token[i] = row / group;
        head[i] = item % p.num_kv_heads * group + row - token[i] * group;
        from[i] = view.token(token[i]) * p.num_qo_heads + head[i];
      }
      barrier_wait(at(control.query_empty[half]), (n & 1) ^ 1);
#pragma unroll 2
      for (int i = 0; i < 64; i += kAtOnce) {
        const int row = first + i + lane / kPieces, d = lane % kPieces * 8;
        const int64_t q_row = __shfl_sync(0xffffffffu, i < kWarp ? from[0] : from[1], row % kWarp);
        copy_async_16(base + Rows::offset(row, d), static_cast<const T*>(a.q) + q_row * D + d,
                      row < rows);
      }
      copy_async_commit();
      copy_async_wait<0>();
      fence_shared_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(at(control.query_full[half]));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        control.rows[n % 2][first + i * kWarp + lane] =
            static_cast<int>(view.state_row(p, a, token[i], head[i]));
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(at(control.rows_full[half][n % 2]));
    });
  }

  // The consumers.

  struct Consumer {
    const PagedMixedSm90& m;
    const int half;        // which 64 of the rows
    const uint32_t query;  // where they are in shared memory
    RowStrip<T, D> strip;
    float s[kKeys / 8][4];
    uint32_t weights[kKeys / 16][4];

    __device__ __forceinline__ void hold_scores() {
      hold(reinterpret_cast<float (&)[kKeys / 2]>(s));
    }
    __device__ __forceinline__ void hold_values() {
      hold(reinterpret_cast<float (&)[D / 2]>(strip.o));
    }

    /// Starts s = Q K^T.
    __device__ __forceinline__ void start_scores(uint32_t fill) {
      float (&flat)[kKeys / 2] = reinterpret_cast<float (&)[kKeys / 2]>(s);
      const uint64_t q = matrix_descriptor(query, Rows::kGroupBytes, 0);
      const uint64_t k = matrix_descriptor(m.keys_of(fill), Rows::kGroupBytes, 0);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int at = step / 4 * Rows::kBlockBytes + step % 4 * 32;
        wgmma_64x128<T>(flat, descriptor_at(q, at), descriptor_at(k, at), step > 0);
      }
      wgmma_commit();
    }

    /// Starts o += weights V.
    __device__ __forceinline__ void start_values(uint32_t fill) {
      float (&flat)[D / 2] = reinterpret_cast<float (&)[D / 2]>(strip.o);
      const uint64_t v = matrix_descriptor(m.values_of(fill), Rows::kGroupBytes, Rows::kBlockBytes);
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) {
        wgmma_add<T>(flat, weights[step], descriptor_at(v, step * 2 * Rows::kGroupBytes));
      }
      wgmma_commit();
    }

    __device__ __forceinline__ void pack_all() {
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) pack_weights<T>(s, k, weights[k]);
    }

    __device__ __forceinline__ void release(const uint64_t& empty) const {
      if (m.lane == 0) barrier_arrive(at(empty));
    }

    /// Puts zeros where no query sees a slot of V (what is there may be NaN), and keeps what is not
    /// finite from queries that do not see it: returns whether there was such a value. All rows'
    /// threads together.
    __device__ __forceinline__ bool clean_values(const TileView& view, int slot,
                                                 uint32_t fill) const {
      const int rank = static_cast<int>(threadIdx.x) - kConsumers, key = rank / 2;
      if (slot + key < view.begin || slot + key >= view.end) {
        for (int d = 0; d < D / 2; d += 8) {
          store_shared_16(m.values_of(fill) + Rows::offset(key, rank % 2 * (D / 2) + d), {});
        }
      }
      bool found = false;
      if (view.tile.q_len > 1) {
        named_barrier_sync(kAllRows, kConsumers);
        found = take_out_nonfinite<T, D, kKeys, Rows, kConsumers>(m.values_of(fill), rank);
      }
      fence_shared_proxy();
      named_barrier_sync(kAllRows, kConsumers);
      return found;
    }

    /// The block's n-th tile; `fill` counts the blocks of keys of all tiles.
    __device__ __forceinline__ void run(int item, uint32_t n, uint32_t& fill) {
      const TileView view(m.p, m.a, item / m.p.num_kv_heads);
      const int kv_head = item % m.p.num_kv_heads, rows = view.tile.q_len * m.group;
      const StripPlace place{half * 64 + m.warp % 4 * 16, rows, m.group};
      const int origin = view.origin(m.p, kKeys), blocks = view.blocks(origin, kKeys);
      strip.clear();
      barrier_wait(at(m.control.query_full[half]), n & 1);
      if (blocks > 0) {
        bool taken_out = stream(view, place, origin, blocks, fill);
        if (view.tile.q_len > 1 && any_of_all_rows(taken_out)) {
          add_taken_out(view, kv_head, place, origin, blocks);
        }
        fill += blocks;
      } else {
        __syncwarp();  // as in for_items
        release(m.control.query_empty[half]);
      }
      barrier_wait(at(m.control.rows_full[half][n % 2]), n / 2 & 1);
      strip.write(m.p, m.a, view, kv_head, place,
                  [&](int row) { return m.control.rows[n % 2][row]; });
    }

    __device__ __forceinline__ bool stream(const TileView& view, const StripPlace& place,
                                           int origin, int blocks, uint32_t first) {
      const LogitScale<> logit(m.p);
      // Blocks [inner, outer) and those before them are seen by all rows, their logits not capped.
      const int seen_from = view.first_slot(view.tile.q_len - 1), seen_to = view.end_slot(m.p, 0);
      const int inner = 1 + (max(seen_from - origin, 0) + kKeys - 1) / kKeys;
      const int outer = logit.folded() ? (seen_to - origin) / kKeys : 0;
      float keep[2];
      bool taken_out = false;
      barrier_wait(at(m.control.keys_full[first % 2]), first / 2 & 1);
      wgmma_begin();
      start_scores(first);
      wgmma_wait<0>();
      hold_scores();
      release(m.control.keys_empty[first % 2]);
      if (inner > 1 || outer < 1) strip.mask_logits(m.p, view, logit, place, origin, s);
      strip.softmax(logit, s, keep);
      pack_all();
#pragma unroll 1
      for (int block = 1; block < blocks; ++block) {
        const uint32_t fill = first + block, before = fill - 1;
        const int slot = origin + block * kKeys;
        const bool seen = block >= inner && block < outer;
        barrier_wait(at(m.control.keys_full[fill % 2]), fill / 2 & 1);
        wgmma_begin();
        start_scores(fill);
        barrier_wait(at(m.control.values_full[before % 2]), before / 2 & 1);
        if (!seen && !view.all_see(m.p, slot - kKeys, slot)) {
          taken_out |= clean_values(view, slot - kKeys, before);
        }
        wgmma_begin();
        start_values(before);
        wgmma_wait<1>();
        hold_scores();
        release(m.control.keys_empty[fill % 2]);
        if (!seen) strip.mask_logits(m.p, view, logit, place, slot, s);
        // Weights are made while the product with V runs. The wait for it stands in the branches,
        // or the compiler would move it up to where these begin.
        if (strip.softmax(logit, s, keep)) {
          wgmma_wait<0, 1>();
          hold_values();
          strip.rescale(keep);
        } else {
          wgmma_wait<0, 2>();
          hold_values();
        }
        release(m.control.values_empty[before % 2]);
        pack_all();
      }
      release(m.control.query_empty[half]);
      const uint32_t last = first + blocks - 1;
      const int slot = origin + (blocks - 1) * kKeys;
      barrier_wait(at(m.control.values_full[last % 2]), last / 2 & 1);
      if (!view.all_see(m.p, slot, slot + kKeys)) taken_out |= clean_values(view, slot, last);
      wgmma_begin();
      start_values(last);
      wgmma_wait<0>();
      hold_values();
      release(m.control.values_empty[last % 2]);
      return taken_out;
    }

    __device__ __forceinline__ void add_taken_out(const TileView& view, int kv_head,
                                                  const StripPlace& place, int origin, int blocks) {
      for (int block = 0; block < blocks; ++block) {
        const int slot = origin + block * kKeys;
        if (view.all_see(m.p, slot, slot + kKeys)) continue;
        strip.template add_taken_out<kKeys>(m.p, m.a, view, kv_head, place, slot);
      }
    }
  };

  __device__ __forceinline__ void consume() const {
    const int half = warp / 4 - 2;
    // Said to be the same in all lanes: else the compiler moves each descriptor from the lanes.
    const uint32_t query = base + half * 8 * Rows::kGroupBytes;
    Consumer consumer{*this, half, __shfl_sync(0xffffffffu, query, 0)};
    uint32_t fill = 0;
    for_items([&](int item, uint32_t n) { consumer.run(item, n, fill); });
    fence_shared_proxy();
    named_barrier_sync(kAllRows, kConsumers);
  }

  // Decode tiles.

  /// Runs decode tiles with the calling warpgroup; `team` numbers those that do, 0 the one that
  /// does nothing else.
  __device__ __forceinline__ void decode(int team, char* memory) const {
    const Team threads{warp / 4 * 4, kDecodeWarps * kWarp, kFirstTeam + team};
    const PoolMaps maps{k_map, v_map, page_groups, at(control.decode[2 * kDecodeWarps * team])};
    int& slot = control.decode_item[team];
    RingPlace place;
    int next = static_cast<int>(blockIdx.x);
    if (team > 0 && threads.thread() == 0) next = take_decode();
    for (;;) {
      if (threads.thread() == 0) slot = next;
      threads.sync();
      const int item = slot;
      if (item >= num_decode) break;
      if (threads.thread() == 0) next = take_decode();
      const TileView view(p, a, p.num_large_tiles + item / p.num_kv_heads);
      Decode tile(p, a, view, item % p.num_kv_heads, kDecodeWarps, memory, maps, threads);
      tile.run_next(memory, place);
    }
  }

  __device__ __forceinline__ void run() const {
    init();
    const int role = warp / 4;
    if (role == 0) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
      if (warp == 0) {
        produce_keys();
      } else if (warp == 1) {
        produce_values();
      } else {
        produce_query(warp - 2);
      }
    } else if (role == 1) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kDecodeRegisters));
      decode(0, shared + kLargeBytes);
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
      consume();
      const int half = role - 2;
      decode(1 + half, shared + half * Decode::block_bytes(kDecodeWarps));
    }
  }
};

template <class T, int D>
__global__ void __launch_bounds__(512, 1)
    paged_mixed_sm90_kernel(const __grid_constant__ PagedAttentionParams p,
                            const __grid_constant__ AttentionArrays a,
                            const __grid_constant__ CUtensorMap k_map,
                            const __grid_constant__ CUtensorMap v_map, int page_groups) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Mixed = PagedMixedSm90<T, D>;
  extern __shared__ __align__(16) char unaligned[];
  __shared__ typename Mixed::Control control;
  prefetch_tables(p, a);
  char* shared = unaligned + (-shared_address(unaligned) & (Mixed::kAlignment - 1));
  Mixed(p, a, k_map, v_map, page_groups, control, shared).run();
#endif
}

}  // namespace mlxcel::cuda

#pragma once

#include "kernels/attention_tile.cuh"

namespace mlxcel::cuda {

/// Where sixteen query rows of a warp are: `first` is the tile's row (token x head of the group)
/// that is the strip's first. Lane l holds rows l / 4 and l / 4 + 8.
struct StripPlace {
  int first, rows, group;  // rows: of the tile, those past it are not in use

  __device__ __forceinline__ int row(int half) const {
    return first + static_cast<int>(threadIdx.x) % kWarp / 4 + half * 8;
  }
  __device__ __forceinline__ int token(int half) const { return min(row(half), rows - 1) / group; }
};

/// What sixteen query rows have summed so far, in the layout of the results of mma.m16n8k16: for
/// each eight columns a lane holds two neighbouring ones, 2 * (lane % 4), of its two rows.
template <class T, int D>
struct RowStrip {
  static constexpr int kValueTiles = D / 8;
  float o[kValueTiles][4];
  float max[2], sum[2];  // max: what weights are relative to; sum: of this lane's columns alone

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] = -INFINITY;
      sum[half] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[n][e] = 0.0f;
    }
  }

  /// Products of the rows with the keys of slots [slot, slot + 8 KeyTiles) to weights: scales,
  /// caps, masks, moves the references where that is due and rescales what was summed so far.
  template <int KeyTiles>
  __device__ __forceinline__ void weigh(const PagedAttentionParams& p, const TileView& view,
                                        const LogitScale<>& logit, const StripPlace& place,
                                        int slot, float (&s)[KeyTiles][4]) {
    float keep[2];
    mask_logits(p, view, logit, place, slot, s);
    if (softmax(logit, s, keep)) rescale(keep);
  }

  /// Products to logits where that takes more than a positive factor, and masks.
  template <int KeyTiles>
  __device__ __forceinline__ void mask_logits(const PagedAttentionParams& p, const TileView& view,
                                              const LogitScale<>& logit, const StripPlace& place,
                                              int slot, float (&s)[KeyTiles][4]) const {
    if (!logit.folded()) {
#pragma unroll
      for (int n = 0; n < KeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = logit(s[n][e]);
      }
    }
    if (!view.all_see(p, slot, slot + 8 * KeyTiles)) mask(p, view, place, slot, s);
  }

  /// What mask_logits gave, or products where that had nothing to do, to weights. Returns whether a
  /// row of the warp moved: then the sums have to be rescaled, which is left to rescale(keep),
  /// since that of the keys before may still be on its way.
  template <int KeyTiles>
  __device__ __forceinline__ bool softmax(const LogitScale<>& logit, float (&s)[KeyTiles][4],
                                          float (&keep)[2]) {
    const float scale = logit.folded() ? logit.scale : 1.0f;
    float m[2] = {-INFINITY, -INFINITY}, base[2], total[4] = {};
#pragma unroll
    for (int n = 0; n < KeyTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        m[half] = fmaxf(m[half], fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
      }
    }
    const bool above = above_headroom(m[0] * scale, max[0]) || above_headroom(m[1] * scale, max[1]);
    const bool moves = __any_sync(0xffffffffu, above);
    if (moves) move(scale, m, keep);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      base[half] = max[half] == -INFINITY ? 0.0f : max[half];  // all masked: weights 0, not NaN
    }
#pragma unroll
    for (int n = 0; n < KeyTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] = exp2_fast(s[n][e] * scale - base[e / 2]);
        total[e] += s[n][e];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] += total[half * 2] + total[half * 2 + 1];
    return moves;
  }

  __device__ __forceinline__ void rescale(const float (&keep)[2]) {
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[n][e] *= keep[e / 2];
    }
  }

  /// Adds what was taken out of a block of V to the rows that see it.
  template <int Keys>
  __device__ __forceinline__ void add_taken_out(const PagedAttentionParams& p,
                                                const AttentionArrays& a, const TileView& view,
                                                int kv_head, const StripPlace& place, int slot) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      add_nonfinite<T, Keys>(p, a, view, kv_head, place.token(half), slot, [&](const T* row) {
#pragma unroll
        for (int n = 0; n < kValueTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float x = to_float(row[n * 8 + threadIdx.x % 4 * 2 + e]);
            if (!isfinite(x)) o[n][half * 2 + e] += x;
          }
        }
      });
    }
  }

  /// Writes the states of the rows in use: state_row(row) is TileView::state_row of a row of the
  /// tile. Short code: it runs once, and each of its instructions is then a miss in the instruction
  /// cache.
  template <class StateRow>
  __device__ __forceinline__ void write(const PagedAttentionParams& p, const AttentionArrays& a,
                                        const TileView& view, int kv_head, const StripPlace& place,
                                        StateRow&& state_row) const {
    const int d = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      MergedState<1> state{max[half], sum[half], {1.0f}};
      state.sum += __shfl_xor_sync(0xffffffffu, state.sum, 1);
      state.sum += __shfl_xor_sync(0xffffffffu, state.sum, 2);
      const int row = place.row(half);
      if (row >= place.rows) continue;
      const int64_t at = state_row(row);
      const float scale = state.scale();
      state = {state.lse(), state.sum == 0.0f ? 0.0f : 1.0f, {1.0f}};
      if (view.tile.chunk < 0) {
        if (p.has_sinks) {
          state.add_sink(a.sinks[kv_head * place.group + row % place.group] * kLog2e);
        }
        T* out = static_cast<T*>(a.out) + at * D + d;
#pragma unroll
        for (int n = 0; n < kValueTiles; ++n) {
          Vec<T, 2> pair;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float x = o[n][half * 2 + e] * scale * state.v[0] * state.scale();
            pair.at[e] = from_float<T>(x);
          }
          store_vec(out + n * 8, pair);
        }
        if (d == 0 && a.lse != nullptr) a.lse[at] = state.lse();
      } else {
        float* out = a.partial_v + at * D + d;
#pragma unroll
        for (int n = 0; n < kValueTiles; ++n) {
          store_vec(out + n * 8, Vec<float, 2>{o[n][half * 2] * scale, o[n][half * 2 + 1] * scale});
        }
        if (d == 0) a.partial_lse[at] = state.max;
      }
    }
  }

  /// The same, each row's looked up.
  __device__ __forceinline__ void write(const PagedAttentionParams& p, const AttentionArrays& a,
                                        const TileView& view, int kv_head,
                                        const StripPlace& place) const {
    write(p, a, view, kv_head, place, [&](int row) {
      const int token = row / place.group;
      return view.state_row(p, a, token, kv_head * place.group + row - token * place.group);
    });
  }

 private:
  template <int KeyTiles>
  static __device__ __forceinline__ void mask(const PagedAttentionParams& p, const TileView& view,
                                              const StripPlace& place, int slot,
                                              float (&s)[KeyTiles][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = place.token(half);
      const int from = view.first_slot(token), to = view.end_slot(p, token);
#pragma unroll
      for (int n = 0; n < KeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = slot + n * 8 + threadIdx.x % 4 * 2 + e;
          if (key < from || key >= to) s[n][half * 2 + e] = -INFINITY;
        }
      }
    }
  }

  /// Moves the rows that have a logit above their headroom to their largest, given each lane's.
  __device__ __forceinline__ void move(float scale, const float (&lane_max)[2], float (&keep)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m = lane_max[half];
#pragma unroll
      for (int step = 1; step < 4; step *= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, step));
      m *= scale;
      if (!above_headroom(m, max[half])) m = max[half];
      keep[half] = weight_of(max[half], m);
      max[half] = m;
      sum[half] *= keep[half];
    }
  }
};

/// Weights of keys [16 k, 16 k + 16) as the left operand of the product with V.
template <class T, int KeyTiles>
__device__ __forceinline__ void pack_weights(const float (&s)[KeyTiles][4], int k,
                                             uint32_t (&weights)[4]) {
  weights[0] = pack<T>(s[2 * k][0], s[2 * k][1]);
  weights[1] = pack<T>(s[2 * k][2], s[2 * k][3]);
  weights[2] = pack<T>(s[2 * k + 1][0], s[2 * k + 1][1]);
  weights[3] = pack<T>(s[2 * k + 1][2], s[2 * k + 1][3]);
}

}  // namespace mlxcel::cuda

#pragma once

#include "cpu/kernels/attention_blocks.h"
#include "cpu/kernels/merge_states.h"
#include "cpu/kernels/paged_attention.h"
#include "cpu/kernels/softmax_states.h"

namespace mlxcel::cpu {

/// Where tiles and merges write.
struct TileOutput {
  void* out;     // (num_q, num_qo_heads, head_dim) of the dtype; unused where all tiles are partial
  float* lse;    // (num_q, num_qo_heads)
  float* v;      // partial states, (num_partials, num_qo_heads, head_dim)
  float* v_lse;  // (num_partials, num_qo_heads)
};

/// The code of one instruction set: (tile, KV head) pairs, and output rows to merge.
struct AttentionCode {
  void (*tiles)(const PagedAttentionParams&, const AttentionInputs&, const TileOutput&,
                int64_t begin, int64_t end);
  void (*merge)(const PagedAttentionParams&, const AttentionInputs&, const TileOutput&,
                int64_t begin, int64_t end);
};

namespace {

/// Tokens of one step of the online softmax. Blocks are aligned to this in the request, so the
/// steps of a query row do not depend on its tile.
constexpr int kBlock = 64;

/// Tokens whose V rows are gathered at a time: 32 rows of 128 are 16 KB, half of L1.
constexpr int kValueBlock = 32;

/// Query rows whose scores are computed against all of a block before the next rows are: 18 rows of
/// 128, nine KB, stay in L1.
constexpr int kRowBlock = 18;

/// Adds a sink to a state: its denominator grows by 2^sink. The same in the direct path and after a
/// merge, so that both give the same bits.
inline float add_sink(float* v, int head_dim, float lse, float sink) {
  sink *= 1.44269504f;
  const float most = std::max(lse, sink);
  if (most == kMinusInfinity) return lse;
  const float scale = 1.0f / (1.0f + std::exp2(sink - lse));
  for (int d = 0; d < head_dim; ++d) v[d] *= scale;
  return most + std::log2(std::exp2(lse - most) + std::exp2(sink - most));
}

/// Working memory of one tile. head_dim is a multiple of 16, so that all rows begin on a cache
/// line.
struct TileMemory {
  TileMemory(int rows, int head_dim) {
    const size_t row = head_dim;
    q = attention_scratch(rows * (2 * row + kBlock + 4) + kBlock * row);
    o = q + rows * row;
    p = o + rows * row;
    gathered = p + static_cast<size_t>(rows) * kBlock;
    m = gathered + kBlock * row;
    l = m + rows;
    from = reinterpret_cast<int32_t*>(l + rows);
    to = from + rows;
  }

  float* q;         // (rows, head_dim), times sm_scale * log2(e)
  float* o;         // (rows, head_dim), not normalised
  float* p;         // (rows, kBlock) scores, then weights
  float* gathered;  // (kBlock, head_dim) K or V rows in f32
  float* m;         // (rows) running maximum
  float* l;         // (rows) running denominator
  int32_t* from;    // (rows) tokens [from, to) of the current block that the row sees
  int32_t* to;
};

/// One tile for one KV head: query rows r = token * group_size + head of the group.
template <class T>
class TileRun {
 public:
  TileRun(const PagedAttentionParams& params, const AttentionInputs& in, const AttentionTile& tile,
          int kv_head)
      : params_(params),
        tile_(tile),
        tokens_(tile.shared != 0 ? in.token_order + tile.q_begin : nullptr),
        merge_indptr_(in.merge_indptr),
        kv_head_(kv_head),
        group_(params.num_qo_heads / params.num_kv_heads),
        rows_(tile.q_len * group_),
        dim_(params.head_dim),
        mem_(rows_, dim_),
        pages_(in.kv_indices + in.kv_indptr[tile.request]) {
    const int32_t r = tile.request;
    const int32_t num_pages = in.kv_indptr[r + 1] - in.kv_indptr[r];
    const int64_t size = params.page_size;
    first_ = in.first_page_offset != nullptr && num_pages > 0 ? in.first_page_offset[r] : 0;
    const int64_t kv_end = num_pages > 0 ? (num_pages - 1) * size + in.kv_last_page_len[r] : 0;
    begin_ = std::max<int64_t>(tile.page_begin * size, first_);
    end_ = std::min<int64_t>(tile.page_end * size, kv_end);
    const int32_t qo_begin = in.qo_indptr != nullptr ? in.qo_indptr[r] : r;
    const int32_t qo_len = in.qo_indptr != nullptr ? in.qo_indptr[r + 1] - qo_begin : 1;
    own_ = kv_end - qo_len + (tile.q_begin - qo_begin);
    causal_ = params.causal != 0 && tile.shared == 0;
    window_left_ = tile.shared != 0 ? -1 : params.window_left;
    const int64_t head = int64_t{kv_head} * params.stride_head;
    k_ = static_cast<const T*>(in.k_pages) + head;
    v_ = static_cast<const T*>(in.v_pages) + head;
    q_in_ = static_cast<const T*>(in.q);
  }

  void run() {
    for (int r = 0; r < rows_; ++r) {
      const T* q = q_in_ + q_row(r) * dim_;
      for (int d = 0; d < dim_; d += kLanes) {
        store(mem_.q + r * dim_ + d, load(q + d) * params_.sm_scale_log2);
      }
    }
    std::fill(mem_.o, mem_.o + static_cast<int64_t>(rows_) * dim_, 0.0f);
    std::fill(mem_.m, mem_.m + rows_, kMinusInfinity);
    std::fill(mem_.l, mem_.l + rows_, 0.0f);
    const int64_t low = lowest(0);
    high_ = highest(tile_.q_len - 1);
    for (int64_t block = low / kBlock * kBlock; block < high_; block += kBlock) {
      step(block, std::max(low, block), std::min(high_, block + kBlock));
    }
  }

  void write(const TileOutput& out, const float* sinks) {
    for (int r = 0; r < rows_; ++r) {
      const float l = mem_.l[r];
      float* v = mem_.o + r * dim_;
      float lse = kMinusInfinity;
      if (l != 0.0f) {  // a NaN goes on
        const float scale = 1.0f / l;
        for (int d = 0; d < dim_; ++d) v[d] *= scale;
        lse = mem_.m[r] + std::log2(l);
      }
      const int head = kv_head_ * group_ + r % group_;
      if (tile_.chunk >= 0) {
        const int64_t row = merge_indptr_[token(r / group_)] + tile_.chunk;
        const int64_t at = row * params_.num_qo_heads + head;
        std::copy(v, v + dim_, out.v + at * dim_);
        out.v_lse[at] = lse;
      } else {
        if (sinks != nullptr) lse = add_sink(v, dim_, lse, sinks[head]);
        store_row(static_cast<T*>(out.out) + q_row(r) * dim_, v, dim_);
        out.lse[q_row(r)] = lse;
      }
    }
  }

 private:
  /// The packed query token that the tile's token i is.
  int32_t token(int i) const { return tokens_ != nullptr ? tokens_[i] : tile_.q_begin + i; }

  int64_t q_row(int r) const {
    return int64_t{token(r / group_)} * params_.num_qo_heads + kv_head_ * group_ + r % group_;
  }

  /// Tokens [lowest, highest) that query token i of the tile sees, within the tile's span.
  int64_t lowest(int i) const {
    return window_left_ < 0 ? begin_ : std::max(begin_, own_ + i - window_left_);
  }
  int64_t highest(int i) const { return causal_ ? std::min(end_, own_ + i + 1) : end_; }

  /// Elements from the start of a pool's head to token t of the request.
  int64_t place(int64_t t) const {
    const int shift = __builtin_ctz(params_.page_size);
    return static_cast<int64_t>(pages_[t >> shift]) * params_.stride_page +
           (t & (params_.page_size - 1)) * params_.stride_token;
  }

  /// Brings a row into L2. Rows lie a page or more apart, where the hardware does not follow.
  void prefetch(const T* row) const {
    for (int d = 0; d < dim_; d += 64 / static_cast<int>(sizeof(T))) {
      __builtin_prefetch(row + d, 0, 2);
    }
  }

  /// Rows of tokens [begin, end) of a block that starts at `block`; entries that round the range up
  /// to whole quads repeat a valid row, so that nothing outside the range is read.
  void point(int64_t block, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t at = place(t);
      keys_[t - block] = k_ + at;
      values_[t - block] = v_ + at;
    }
    from_ = static_cast<int>(begin - block);
    to_ = static_cast<int>(end - block);
    for (int t = from_ & -kQuad; t < from_; ++t) keys_[t] = keys_[from_];
    for (int t = to_; t % kQuad != 0; ++t) keys_[t] = keys_[from_];
  }

  /// One step of the online softmax over tokens [begin, end) of a block.
  void step(int64_t block, int64_t begin, int64_t end) {
    point(block, begin, end);
    for (int i = 0; i < tile_.q_len; ++i) {
      const auto inside = [block](int64_t t) {
        return static_cast<int32_t>(std::clamp<int64_t>(t - block, 0, kBlock));
      };
      const int32_t from = inside(lowest(i)), to = inside(highest(i));
      std::fill_n(mem_.from + i * group_, group_, from);
      std::fill_n(mem_.to + i * group_, group_, std::max(from, to));
    }
    scores();
    by_rows<4>(0, rows_, [&](auto rows, int r) { softmax<rows>(r); });
    weigh_values(block);
  }

  /// f(R, r) for groups [r, r + R) of rows that cover [begin, end), R <= Most. Four rows in threes
  /// are two and two.
  template <int Most, class F>
  static void by_rows(int begin, int end, F&& f) {
    int r = begin;
    while (end - r >= Most && !(Most == 3 && end - r == 4)) {
      f(std::integral_constant<int, Most>{}, r);
      r += Most;
    }
    if constexpr (Most == 3) {
      if (end - r == 4) {
        f(std::integral_constant<int, 2>{}, r);
        r += 2;
      }
    }
    if constexpr (Most > 1) {
      if (r < end) by_rows<Most - 1>(r, end, f);
    }
  }

  void scores() {
    for (int r0 = 0; r0 < rows_; r0 += kRowBlock) {
      const int r1 = std::min(rows_, r0 + kRowBlock);
      for (int t = from_ & -kQuad; t < to_; t += kQuad) {
        if (r0 == 0) {
          for (int j = t; j < t + kQuad; ++j) key_[j] = key_row(keys_[j], j);
          for (int j = std::max(t, from_); j < std::min(t + kQuad, to_); ++j) prefetch(values_[j]);
        }
        const float* const* key = key_ + t;
        by_rows<3>(r0, r1, [&](auto rows, int r) {
          dot_quad<rows>(mem_.q + r * dim_, dim_, key, mem_.p + r * kBlock + t, kBlock);
        });
      }
    }
  }

  /// A K row in f32: itself where few query rows read it, else gathered.
  const float* key_row(const T* row, int index) {
    if constexpr (std::is_same_v<T, float>) {
      if (rows_ <= 4) return row;
    }
    return gather(row, index);
  }

  const float* gather(const T* row, int index) {
    float* to = mem_.gathered + index * dim_;
    for (int d = 0; d < dim_; d += kLanes) store(to + d, load(row + d));
    return to;
  }

  /// Turns the scores of rows [r, r + Rows) into weights, 0 where a row does not see.
  template <int Rows>
  void softmax(int r) {
    for (int i = r; i < r + Rows; ++i) {
      float* p = mem_.p + i * kBlock;
      if (params_.logits_soft_cap > 0.0f) {
        for (int t = 0; t < kBlock; t += kLanes) {
          store(p + t, soft_cap(load(p + t), params_.logits_soft_cap));
        }
      }
      for (int t = 0; t < mem_.from[i]; ++t) p[t] = kMinusInfinity;
      for (int t = mem_.to[i]; t < kBlock; ++t) p[t] = kMinusInfinity;
    }
    float factor[Rows];
    online_softmax<Rows, kBlock>(mem_.p + r * kBlock, mem_.m + r, mem_.l + r, factor);
    for (int i = 0; i < Rows; ++i) {
      if (factor[i] == 1.0f) continue;
      float* o = mem_.o + (r + i) * dim_;
      for (int d = 0; d < dim_; d += kLanes) store(o + d, load(o + d) * factor[i]);
    }
  }

  /// Adds the weighted values. V rows are gathered into dense memory: in the pool, the rows of
  /// consecutive tokens may be 4 KB apart and would evict each other from L1.
  void weigh_values(int64_t block) {
    const float* value[kBlock];
    for (int t0 = from_ & -kValueBlock; t0 < to_; t0 += kValueBlock) {
      const int begin = std::max(t0, from_), end = std::min(t0 + kValueBlock, to_);
      for (int t = begin; t < end; ++t) {
        value[t] = gather(values_[t], t - t0);
        if (block + kBlock + t < high_) prefetch(k_ + place(block + kBlock + t));
      }
      by_rows<4>(0, rows_, [&](auto rows, int r) { weigh_rows<rows>(r, value, begin, end); });
    }
  }

  /// Adds tokens [begin, end) to rows [r, r + Rows). A row never reads tokens that it does not see:
  /// 0 * NaN is NaN.
  template <int Rows>
  void weigh_rows(int r, const float* const* value, int begin, int end) {
    float* o = mem_.o + r * dim_;
    const float* p = mem_.p + r * kBlock;
    const int32_t *from = mem_.from + r, *to = mem_.to + r;
    // Later rows start and end later: what all of them see is done together, the rest row by row.
    const int all_begin = std::max(begin, from[Rows - 1]);
    const int all_end = std::max(all_begin, std::min(end, to[0]));
    const auto alone = [&](int i, int first, int last) {
      accumulate<1>(o + i * dim_, dim_, p + i * kBlock, kBlock, value, std::max(first, from[i]),
                    std::min(last, to[i]));
    };
    for (int i = 0; Rows > 1 && i < Rows; ++i) alone(i, begin, std::min(all_begin, end));
    accumulate<Rows>(o, dim_, p, kBlock, value, all_begin, all_end);
    for (int i = 0; Rows > 1 && i < Rows; ++i) alone(i, all_end, end);
  }

  const PagedAttentionParams& params_;
  const AttentionTile& tile_;
  const int32_t* tokens_;  // query tokens of a shared tile
  const int32_t* merge_indptr_;
  int kv_head_, group_, rows_, dim_;
  TileMemory mem_;
  const int32_t* pages_;  // page ids of the request
  int64_t begin_, end_;   // tokens of the tile's span
  int64_t first_;         // the request's first token
  int64_t high_;          // one past the last token that a query of the tile sees
  int64_t own_;           // the token that the tile's first query is; unused in shared tiles
  bool causal_;
  int window_left_;
  const T* k_;
  const T* v_;
  const T* q_in_;
  int from_, to_;  // tokens of the current block
  const T* keys_[kBlock];
  const T* values_[kBlock];
  const float* key_[kBlock];  // K rows in f32
};

template <class T>
void attention_tiles_as(const PagedAttentionParams& params, const AttentionInputs& in,
                        const TileOutput& out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const AttentionTile& tile = in.tiles[i / params.num_kv_heads];
    TileRun<T> run(params, in, tile, static_cast<int>(i % params.num_kv_heads));
    run.run();
    run.write(out, in.sinks);
  }
}

template <class T>
void merge_rows_as(const PagedAttentionParams& params, const AttentionInputs& in,
                   const TileOutput& out, int64_t begin, int64_t end) {
  const int64_t heads = params.num_qo_heads, dim = params.head_dim;
  float v[kMaxMergeDim];
  for (int64_t row = begin; row < end; ++row) {
    const int64_t from = in.merge_indptr[row], count = in.merge_indptr[row + 1] - from;
    if (count == 0) continue;  // its tile wrote the output
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t at = from * heads + head;
      float lse = merge<float>({out.v + at * dim, heads * dim, out.v_lse + at, heads, count},
                               params.head_dim, v);
      if (in.sinks != nullptr) lse = add_sink(v, params.head_dim, lse, in.sinks[head]);
      store_row(static_cast<T*>(out.out) + (row * heads + head) * dim, v, params.head_dim);
      out.lse[row * heads + head] = lse;
    }
  }
}

template <class T>
constexpr AttentionCode kAttentionCode{&attention_tiles_as<T>, &merge_rows_as<T>};

const AttentionCode& attention_code(FloatType dtype) {
  switch (dtype) {
    case FloatType::f16:
      return kAttentionCode<f16>;
    case FloatType::bf16:
      return kAttentionCode<bf16>;
    default:
      return kAttentionCode<float>;
  }
}

}  // namespace
}  // namespace mlxcel::cpu

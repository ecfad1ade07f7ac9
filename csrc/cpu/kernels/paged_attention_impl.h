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

/// The code of one instruction set: one (tile, KV head) pair of all num_tiles * num_kv_heads, and
/// the merge of a query token's parts, for the heads of a KV head. `next` is the pair that this
/// thread probably runs after it.
struct AttentionCode {
  void (*tile)(const PagedAttentionParams&, const AttentionInputs&, const TileOutput&, int64_t pair,
               int64_t next);
  void (*merge)(const PagedAttentionParams&, const AttentionInputs&, const TileOutput&, int token,
                int kv_head);
};

namespace {

/// Tokens of one step of the online softmax. Blocks are aligned to this in the request, so the
/// steps of a query row do not depend on its tile.
constexpr int kBlock = 64;

/// Tokens whose K rows lie in f32 at a time: with 32 query rows of 128 they fit L1.
constexpr int kKeyRows = 16;

/// Query rows that K and V rows in the pool are read for directly: those of a decode step.
constexpr int kFewRows = 4;

/// Query rows of a register block then: with kPanel vectors or kQuad keys each, they and what they
/// are multiplied by fit the registers.
constexpr int kRowBlock = kLanes == 16 ? 4 : 3;

/// Whether whole vectors of query rows lie as lanes, so that their scores add up without shuffles:
/// stacked tiles of 32 rows then take 0.87 of the time. With AVX2, whose shuffles are cheaper, it
/// is as fast either way, and 12 rows take 1.12 to 1.14 (2026-11-30).
constexpr bool kRowsAsLanes = kLanes == 16;
static_assert(!kRowsAsLanes || (kLanes > kFewRows && kLanes % kRowBlock == 0));

/// Keys that one or two such vectors are multiplied by at a time: enough sums to cover the latency
/// of a product, and they fit the registers.
constexpr int kLaneKeys = 8;

/// Vectors of V rows that are gathered at a time: 64 tokens of 32 floats (AVX2) are 8 KB of L1.
constexpr int kPanel = 4;

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
    constexpr size_t kGathered = kBlock * kPanel * kLanes;
    q = attention_scratch(rows * (2 * row + kBlock + 4) + std::max(kKeyRows * row, kGathered));
    o = q + rows * row;
    p = o + rows * row;
    gathered = p + static_cast<size_t>(rows) * kBlock;
    m = gathered + std::max(kKeyRows * row, kGathered);
    l = m + rows;
    from = reinterpret_cast<int32_t*>(l + rows);
    to = from + rows;
  }

  // Of q and p, rows that lie as lanes come first: kLanes rows are (head_dim, kLanes), as dot_lanes
  // takes them, and (kBlock, kLanes).
  float* q;         // (rows, head_dim), times sm_scale * log2(e)
  float* o;         // (rows, head_dim), not normalised
  float* p;         // (rows, kBlock) scores, then weights
  float* gathered;  // (kKeyRows, head_dim) of K or (kBlock, kPanel * kLanes) of V in f32
  float* m;         // (rows) running maximum
  float* l;         // (rows) running denominator
  int32_t* from;    // (rows) tokens [from, to) of the current block that the row sees
  int32_t* to;
};

/// One tile for one KV head: query rows r = token * group_size + head of the group. T is the type
/// of q and output, KV that of the pools.
template <class T, class KV>
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
        lane_rows_(kRowsAsLanes ? rows_ / kLanes * kLanes : 0),
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
    k_ = static_cast<const KV*>(in.k_pages);
    v_ = static_cast<const KV*>(in.v_pages);
    q_in_ = static_cast<const T*>(in.q);
  }

  /// `next` is the pair that comes after this one, of all pairs.
  void run(const AttentionInputs& in, int64_t next) {
    load_queries();
    std::fill(mem_.o, mem_.o + static_cast<int64_t>(rows_) * dim_, 0.0f);
    std::fill(mem_.m, mem_.m + rows_, kMinusInfinity);
    std::fill(mem_.l, mem_.l + rows_, 0.0f);
    const int64_t low = lowest(0);
    high_ = highest(tile_.q_len - 1);
    int64_t block = low / kBlock * kBlock, end = std::min(high_, block + kBlock);
    if (low < high_) locate(block, low, end, here_);
    for (int64_t begin = low; begin < high_; block += kBlock, begin = block) {
      const int64_t next_end = std::min(high_, end + kBlock);
      num_next_ = static_cast<int>(next_end - end);
      if (num_next_ > 0) {
        locate(block + kBlock, end, next_end, next_);
      } else if (rows_ <= kFewRows) {
        num_next_ = locate_first(in, next, next_);
      }
      step(block, begin, end);
      std::swap(here_, next_);
      end = next_end;
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
  using RowMajor = WeightLayout<kBlock, 1>;
  using Lanes = WeightLayout<1, kLanes>;

  /// Query rows, times sm_scale * log2(e).
  void load_queries() {
    const float scale = params_.sm_scale_log2;
    for (int r = 0; r < lane_rows_; r += kQuad) {
      const T* row[kQuad];
      for (int i = 0; i < kQuad; ++i) row[i] = q_in_ + q_row(r + i) * dim_;
      float* q = mem_.q + r / kLanes * kLanes * dim_ + r % kLanes;
      for (int d = 0; d < dim_; d += kLanes) {
        transpose(q + d, dim_, load(row[0] + d) * scale, load(row[1] + d) * scale,
                  load(row[2] + d) * scale, load(row[3] + d) * scale);
      }
    }
    for (int r = lane_rows_; r < rows_; ++r) {
      const T* q = q_in_ + q_row(r) * dim_;
      for (int d = 0; d < dim_; d += kLanes) store(mem_.q + r * dim_ + d, load(q + d) * scale);
    }
  }

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

  /// Brings elements [d, d + n) of a row into a cache, which the hardware does not where rows lie a
  /// page or more apart.
  template <int Locality>
  static void prefetch(const KV* row, int d, int n) {
    constexpr int kLine = 64 / static_cast<int>(sizeof(KV));
    for (const int end = d + n; d < end; d += kLine) __builtin_prefetch(row + d, 0, Locality);
  }

  /// at[t - begin] = elements from the start of a pool to the head's rows of tokens t in [begin,
  /// end).
  void places(const int32_t* pages, int kv_head, int64_t begin, int64_t end, int64_t* at) const {
    const int64_t size = params_.page_size, stride = params_.stride_token;
    const int shift = __builtin_ctz(params_.page_size);
    for (int64_t t = begin; t < end;) {
      const int64_t page = t >> shift, stop = std::min(end, (page + 1) * size);
      int64_t place = pages[page] * params_.stride_page + (t & (size - 1)) * stride +
                      kv_head * params_.stride_head;
      for (; t < stop; ++t, place += stride) *at++ = place;
    }
  }

  /// The places of tokens [begin, end) of a block, in at[token - block]; entries that round the
  /// range up to whole quads repeat one, so that nothing outside the range is read.
  void locate(int64_t block, int64_t begin, int64_t end, int64_t* at) const {
    places(pages_, kv_head_, begin, end, at + (begin - block));
    const auto from = static_cast<int>(begin - block), to = static_cast<int>(end - block);
    for (int t = from & -kQuad; t < from; ++t) at[t] = at[from];
    for (int t = to; t % kQuad != 0; ++t) at[t] = at[from];
  }

  /// Places of the first tokens of another pair, to be prefetched; returns how many.
  int locate_first(const AttentionInputs& in, int64_t pair, int64_t* at) const {
    if (pair >= int64_t{params_.num_tiles} * params_.num_kv_heads) return 0;
    const AttentionTile& tile = in.tiles[pair / params_.num_kv_heads];
    const int64_t begin = int64_t{tile.page_begin} * params_.page_size;
    const int64_t end = std::min(begin + kBlock, int64_t{tile.page_end} * params_.page_size);
    places(in.kv_indices + in.kv_indptr[tile.request],
           static_cast<int>(pair % params_.num_kv_heads), begin, end, at);
    return static_cast<int>(end - begin);
  }

  /// Prefetches of rows into L2, a line (of f32, two) a turn: many at once hold up the loads behind
  /// them.
  struct LinePrefetch {
    LinePrefetch(const KV* pool, const int64_t* at, int num_rows, int dim)
        : pool(pool),
          at(at),
          dim(dim),
          shift(std::bit_width((dim * sizeof(KV) - 1) / 64)),
          num_lines(num_rows << shift) {}

    /// The turn-th lines. Inlined, or GCC 12 would drop the call as one without an effect.
    [[gnu::always_inline]] void operator()(int turn) const {
      for (int line = turn * kLinesATurn; line < (turn + 1) * kLinesATurn; ++line) {
        if (line >= num_lines) return;
        const int d = (line & ((1 << shift) - 1)) * kLine;
        if (d < dim) __builtin_prefetch(pool + at[line >> shift] + d, 0, 2);
      }
    }

    /// Rows that so many turns have wholly prefetched.
    int rows(int turns) const { return std::min(turns * kLinesATurn, num_lines) >> shift; }

    static constexpr int kLine = 64 / sizeof(KV), kLinesATurn = sizeof(KV) / 2;
    const KV* pool;
    const int64_t* at;
    int dim;
    int shift;  // lines of a row, rounded up to a power of two
    int num_lines;
  };

  /// One step of the online softmax over tokens [begin, end) of a block.
  void step(int64_t block, int64_t begin, int64_t end) {
    from_ = static_cast<int>(begin - block);
    to_ = static_cast<int>(end - block);
    whole_ = lowest(tile_.q_len - 1) <= block && highest(0) >= block + kBlock;
    if (!whole_) set_ranges(block);
    if (rows_ <= kFewRows) {
      scores_of_few();
    } else {
      for (int t = from_ & -kQuad; t < to_; t += kKeyRows) scores(t, std::min(t + kKeyRows, to_));
    }
    for (int r = 0; r < lane_rows_; r += kLanes) softmax_lanes(r);
    by_parts<4>(lane_rows_, rows_, [&](auto rows, int r) { softmax<rows>(r); });
    if (rows_ <= kFewRows) {
      weigh_values_of_few();
    } else {
      weigh_values();
    }
  }

  /// The tokens of a block that each row sees.
  void set_ranges(int64_t block) {
    const auto inside = [block](int64_t t) {
      return static_cast<int32_t>(std::clamp<int64_t>(t - block, 0, kBlock));
    };
    for (int i = 0; i < tile_.q_len; ++i) {
      const int32_t from = inside(lowest(i)), to = inside(highest(i));
      std::fill_n(mem_.from + i * group_, group_, from);
      std::fill_n(mem_.to + i * group_, group_, std::max(from, to));
    }
  }

  /// f(N, i) for parts [i, i + N) of [begin, end), N <= Most. Four in threes are two and two.
  template <int Most, class F>
  static void by_parts(int begin, int end, F&& f) {
    int i = begin;
    while (end - i >= Most && !(Most == 3 && end - i == 4)) {
      f(std::integral_constant<int, Most>{}, i);
      i += Most;
    }
    if constexpr (Most == 3) {
      if (end - i == 4) {
        f(std::integral_constant<int, 2>{}, i);
        i += 2;
      }
    }
    if constexpr (Most > 1) {
      if (i < end) by_parts<Most - 1>(i, end, f);
    }
  }

  /// Scores of few rows, straight from the pool: K rows are read once, so that a copy in f32 would
  /// not pay. The quads' V rows come into L1 meanwhile.
  void scores_of_few() {
    by_parts<kRowBlock>(0, rows_, [&](auto rows, int r) {
      const float* q = mem_.q + r * dim_;
      float* p = mem_.p + r * kBlock;
      if (kPanel * kLanes == 64 && dim_ == 64) {
        quads<rows, 64>(q, p);
      } else {
        quads<rows, 0>(q, p);
      }
    });
  }

  /// Scores of query rows of Dim elements (0: dim_) for all quads of the block. Where the compiler
  /// knows that a row is four vectors, whole decode tiles run a tenth faster.
  template <int Rows, int Dim>
  void quads(const float* q, float* p) const {
    const KV *k = k_, *v = v_;
    const int64_t* here = here_;
    const int dim = Dim == 0 ? dim_ : Dim, end = to_;
    for (int t = from_ & -kQuad; t < end; t += kQuad) {
      const int64_t* at = here + t;
      unroll<kQuad>([&](auto i) { prefetch<3>(v + at[i], 0, dim); });
      dot_quad<Rows, Dim>(q, dim, k + at[0], k + at[1], k + at[2], k + at[3], p + t, kBlock);
    }
  }

  /// Scores of all rows for tokens [begin, end) in quads, and the tokens' V rows into L2: a few at
  /// a time, since a run of prefetches would hold up the loads behind it.
  void scores(int begin, int end) {
    if constexpr (kRowsAsLanes) {
      if (lane_rows_ > 0) {
        copy_keys<kLaneKeys>(begin, end);
        by_parts<2>(0, lane_rows_ / kLanes, [&](auto vectors, int i) {
          constexpr int kKeys = kLaneKeys;
          int t = begin;
          for (; t + kKeys <= end; t += kKeys) scores_of_lanes<vectors, kKeys>(i, t, begin);
          for (; t < end; t += kQuad) scores_of_lanes<vectors, kQuad>(i, t, begin);
        });
        return scores_of_rows<kLaneKeys>(begin, end);
      }
    }
    copy_keys<1>(begin, end);
    scores_of_rows<1>(begin, end);
  }

  /// Where the K row of the index-th token at hand lies in f32: as every Step-th vector of Step
  /// rows. With rows that lie as lanes Step is kLaneKeys, so that constants tell one key from the
  /// next.
  template <int Step>
  float* key(int index) const {
    return mem_.gathered + index / Step * Step * dim_ + index % Step * kLanes;
  }

  /// The K rows of tokens [begin, end) of the block in f32, and up to a whole quad.
  template <int Step>
  void copy_keys(int begin, int end) {
    const int count = (end - begin + kQuad - 1) & -kQuad;
    const KV* const k = k_;
    const int64_t* const here = here_ + begin;
    float* group = mem_.gathered;
    for (int t = 0; t < count; t += Step, group += Step * dim_) {
      by_parts<8>(0, dim_ / kLanes, [=](auto n, int i) {
        float* to = group + i * Step * kLanes;
        for (int j = t; j < std::min(count, t + Step); ++j, to += kLanes) {
          copy<n, Step>(to, k + here[j] + i * kLanes);
        }
      });
    }
  }

  /// Scores of the rows that do not lie as lanes, and the tokens' V rows into L2, unless they came
  /// during the products of rows that do.
  template <int Step>
  void scores_of_rows(int begin, int end) {
    const int first = lane_rows_ > 0 ? end : std::max(begin, from_);
    int next = first;
    by_parts<3>(lane_rows_, rows_, [&](auto rows, int r) {
      for (int t = begin; t < end; t += kQuad) {
        const float* k = key<Step>(t - begin);
        const int64_t row = Step == 1 ? dim_ : kLanes;
        dot_quad<rows, 0, Step>(mem_.q + r * dim_, dim_, k, k + row, k + 2 * row, k + 3 * row,
                                mem_.p + r * kBlock + t, kBlock);
      }
      const int until = first + (end - first) * (r + rows) / rows_;
      for (; next < until; ++next) prefetch<2>(v_ + here_[next], 0, dim_);
    });
  }

  /// Scores of the query rows that lie as vectors [i, i + Vectors), for tokens [t, t + Keys);
  /// `begin` is the first token whose K row lies in f32.
  template <int Vectors, int Keys>
  void scores_of_lanes(int i, int t, int begin) {
    // Copies: for all that the compiler knows, a store could alter members.
    const auto fetch = [first = i == 0, v = v_, here = here_ + t, dim = dim_](auto turn)
                           __attribute__((always_inline)) {
                             constexpr int kTurns = kLanes / Keys;  // for a V row
                             if (first && turn % kTurns == 0)
                               prefetch<2>(v + here[turn / kTurns], 0, dim);
                           };
    dot_lanes<Vectors, Keys, kLaneKeys, kBlock>(mem_.q + i * kLanes * dim_, dim_,
                                                key<kLaneKeys>(t - begin),
                                                mem_.p + (i * kBlock + t) * kLanes, fetch);
  }

  /// Vectors of a row to f32, every Step-th. The pointers are arguments: for all that the compiler
  /// knows, a store could alter members, and it would read them again for every vector.
  template <int Vectors, int Step = 1>
  static void copy(float* to, const KV* row) {
    unroll<Vectors / 2>([&](auto j) {
      const VectorPair pair = load_pair(row + 2 * j * kLanes);
      store(to + 2 * j * Step * kLanes, pair.first);
      store(to + (2 * j + 1) * Step * kLanes, pair.second);
    });
    if constexpr (Vectors % 2 != 0) {
      store(to + (Vectors - 1) * Step * kLanes, load(row + (Vectors - 1) * kLanes));
    }
  }

  /// Caps the scores of rows [r, r + rows) and drops those of tokens that a row does not see.
  template <class Layout>
  void mask(int r, int rows) {
    float* p = mem_.p + r * kBlock;
    if (params_.logits_soft_cap > 0.0f) {
      for (int i = 0; i < rows * kBlock; i += kLanes) {
        store(p + i, soft_cap(load(p + i), params_.logits_soft_cap));
      }
    }
    if (whole_) return;
    for (int i = 0; i < rows; ++i, p += Layout::row) {
      for (int t = 0; t < mem_.from[r + i]; ++t) p[t * Layout::token] = kMinusInfinity;
      for (int t = mem_.to[r + i]; t < kBlock; ++t) p[t * Layout::token] = kMinusInfinity;
    }
  }

  /// Turns the scores of rows [r, r + Rows) into weights, 0 where a row does not see.
  template <int Rows>
  void softmax(int r) {
    mask<RowMajor>(r, Rows);
    float factor[Rows];
    online_softmax<Rows, kBlock>(mem_.p + r * kBlock, mem_.m + r, mem_.l + r, factor);
    for (int i = 0; i < Rows; ++i) rescale(r + i, factor[i]);
  }

  /// The same for rows [r, r + kLanes), which lie as lanes.
  void softmax_lanes(int r) {
    mask<Lanes>(r, kLanes);
    float factor[kLanes];
    online_softmax_lanes<kBlock>(mem_.p + r * kBlock, mem_.m + r, mem_.l + r, factor);
    for (int i = 0; i < kLanes; ++i) rescale(r + i, factor[i]);
  }

  /// What row r has summed up, times a factor.
  void rescale(int r, float factor) {
    if (factor == 1.0f) return;
    float* o = mem_.o + r * dim_;
    for (int d = 0; d < dim_; d += kLanes) store(o + d, load(o + d) * factor);
  }

  /// Adds the weighted values to few rows, straight from the pool. The K rows of the next block
  /// come into L1 meanwhile, and behind the last one those that the next pair begins with: 5 % of
  /// the time of requests of 600 tokens.
  void weigh_values_of_few() {
    by_parts<kPanel>(0, dim_ / kLanes, [&](auto width, int first) {
      const int d = first * kLanes;
      const auto values = [here = here_, v = v_ + d](int t) { return v + here[t]; };
      const auto keys = [=, k = k_, next = next_, count = num_next_](int quad) {
        unroll<kQuad>([&](auto i) {
          const int t = quad * kQuad + i;
          if (t < count) prefetch<3>(k + next[t], d, width * kLanes);
        });
      };
      by_parts<kRowBlock>(0, rows_, [&](auto rows, int r) {
        weigh_rows<RowMajor, rows, width>(mem_.p + r * kBlock, r, d, values, keys);
      });
    });
  }

  /// Adds the weighted values, some vectors of all V rows at a time. They are gathered into dense
  /// memory: in the pool, the rows of consecutive tokens may be 4 KB apart and would evict each
  /// other from L1.
  void weigh_values() {
    const int vectors = dim_ / kLanes;
    int fetched = 0;  // K rows of the next block
    by_parts<kPanel>(0, vectors, [&](auto width, int first) {
      const KV* const v = v_ + first * kLanes;
      const int64_t* const here = here_;
      float* const gathered = mem_.gathered;
      for (int t = from_, to = to_; t < to; ++t) {
        copy<width>(gathered + t * width * kLanes, v + here[t]);
      }
      const auto values = [gathered, width](int64_t t) { return gathered + t * width * kLanes; };
      const auto weigh = [&](auto layout, auto rows, const float* p, int r) {
        const int until = num_next_ * (first * rows_ + width * (r + rows)) / (vectors * rows_);
        // A whole block has all the turns; rows that they do not suffice for follow at once.
        const LinePrefetch lines(k_, next_ + fetched, whole_ ? until - fetched : 0, dim_);
        weigh_rows<decltype(layout), rows, width>(p, r, first * kLanes, values, lines);
        fetched += lines.rows(kBlock / kQuad);
        for (; fetched < until; ++fetched) prefetch<2>(k_ + next_[fetched], 0, dim_);
      };
      if constexpr (kRowsAsLanes) {
        for (int r = 0; r < lane_rows_; r += kRowBlock) {
          const float* p = mem_.p + r / kLanes * kLanes * kBlock + r % kLanes;
          weigh(Lanes{}, std::integral_constant<int, kRowBlock>{}, p, r);
        }
      }
      by_parts<3>(lane_rows_, rows_,
                  [&](auto rows, int r) { weigh(RowMajor{}, rows, mem_.p + r * kBlock, r); });
    });
  }

  /// Adds values(t), vectors of V rows, to rows [r, r + Rows) from d on. A row never reads tokens
  /// that it does not see: 0 * NaN is NaN.
  template <class Layout, int Rows, int Vectors, class Values, class Meanwhile>
  void weigh_rows(const float* p, int r, int d, const Values& values, const Meanwhile& meanwhile) {
    float* o = mem_.o + r * dim_ + d;
    if (whole_) {
      return accumulate<Layout, Rows, Vectors>(o, dim_, p, values, 0, kBlock, meanwhile);
    }
    const int32_t *from = mem_.from + r, *to = mem_.to + r;
    // Later rows start and end later: what all of them see is done together, the rest row by row.
    const int all_begin = from[Rows - 1];
    const int all_end = std::max(all_begin, to[0]);
    const auto alone = [&](int i, int first, int last) {
      accumulate<Layout, 1, Vectors>(o + i * dim_, dim_, p + i * Layout::row, values,
                                     std::max(first, from[i]), std::min(last, to[i]), Nothing{});
    };
    for (int i = 0; Rows > 1 && i < Rows; ++i) alone(i, from_, all_begin);
    accumulate<Layout, Rows, Vectors>(o, dim_, p, values, all_begin, all_end, meanwhile);
    for (int i = 0; Rows > 1 && i < Rows; ++i) alone(i, all_end, to_);
  }

  const PagedAttentionParams& params_;
  const AttentionTile& tile_;
  const int32_t* tokens_;  // query tokens of a shared tile
  const int32_t* merge_indptr_;
  int kv_head_, group_, rows_;
  int lane_rows_;  // the first rows, which lie as lanes: whole vectors of rows
  int dim_;
  TileMemory mem_;
  const int32_t* pages_;  // page ids of the request
  int64_t begin_, end_;   // tokens of the tile's span
  int64_t first_;         // the request's first token
  int64_t high_;          // one past the last token that a query of the tile sees
  int64_t own_;           // the token that the tile's first query is; unused in shared tiles
  bool causal_;
  int window_left_;
  const KV* k_;
  const KV* v_;
  const T* q_in_;
  int from_, to_;  // tokens of the current block
  bool whole_;     // all rows see all of it: then their own ranges are not set
  int num_next_;   // tokens of the next one
  int64_t places_[2][kBlock];
  int64_t *here_ = places_[0], *next_ = places_[1];  // where the rows of both blocks are
};

template <class T, class KV>
void attention_tile_as(const PagedAttentionParams& params, const AttentionInputs& in,
                       const TileOutput& out, int64_t pair, int64_t next) {
  const AttentionTile& tile = in.tiles[pair / params.num_kv_heads];
  TileRun<T, KV> run(params, in, tile, static_cast<int>(pair % params.num_kv_heads));
  run.run(in, next);
  run.write(out, in.sinks);
}

template <class T>
void merge_as(const PagedAttentionParams& params, const AttentionInputs& in, const TileOutput& out,
              int token, int kv_head) {
  const int64_t heads = params.num_qo_heads, dim = params.head_dim;
  const int64_t from = in.merge_indptr[token], count = in.merge_indptr[token + 1] - from;
  const int group = params.num_qo_heads / params.num_kv_heads;
  float v[kMaxMergeDim];
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const int64_t at = from * heads + head;
    float lse = merge<float>({out.v + at * dim, heads * dim, out.v_lse + at, heads, count},
                             params.head_dim, v);
    if (in.sinks != nullptr) lse = add_sink(v, params.head_dim, lse, in.sinks[head]);
    store_row(static_cast<T*>(out.out) + (token * heads + head) * dim, v, params.head_dim);
    out.lse[token * heads + head] = lse;
  }
}

template <class T, class KV = T>
constexpr AttentionCode kAttentionCode{&attention_tile_as<T, KV>, &merge_as<T>};

const AttentionCode& attention_code(FloatType dtype, FloatType kv_dtype) {
  switch (dtype) {
    case FloatType::f16:
      return kAttentionCode<f16>;
    case FloatType::bf16:
      return kAttentionCode<bf16>;
    default:
      return kv_dtype == FloatType::f16    ? kAttentionCode<float, f16>
             : kv_dtype == FloatType::bf16 ? kAttentionCode<float, bf16>
                                           : kAttentionCode<float>;
  }
}

}  // namespace
}  // namespace mlxcel::cpu

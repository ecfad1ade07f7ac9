#include "ops/paged_attention.h"

#include <cmath>
#include <cstring>

#include "common/check.h"
#include "common/layout.h"
#include "common/pool.h"

namespace mlxcel {
namespace {

bool supported_head_dim(int d) {
  return d == 64 || d == 80 || d == 96 || d == 112 || d == 128 || d == 192 || d == 256;
}

void check_table(const char* op, const AttentionTable& t) {
  check_ndim(op, "kv_last_page_len", t.kv_last_page_len, 1, "[batch]");
  const int batch = t.kv_last_page_len.shape(0);
  check_ndim(op, "kv_indices", t.kv_indices, 1, "[num_pages_used]");
  check_shape(op, "kv_indptr", t.kv_indptr, {batch + 1});
  for (const auto& [name, a] : {std::pair{"kv_indptr", &t.kv_indptr},
                                {"kv_indices", &t.kv_indices},
                                {"kv_last_page_len", &t.kv_last_page_len}}) {
    check_dtype(op, name, *a, mx::int32);
  }
  if (t.qo_indptr) {
    check_shape(op, "qo_indptr", *t.qo_indptr, {batch + 1});
    check_dtype(op, "qo_indptr", *t.qo_indptr, mx::int32);
  }
  if (t.first_page_offset) {
    check_shape(op, "first_page_offset", *t.first_page_offset, {batch});
    check_dtype(op, "first_page_offset", *t.first_page_offset, mx::int32);
  }
}

}  // namespace

PagedAttentionParams attention_params(const char* op, const mx::array& q, const mx::array& k_pages,
                                      const mx::array& v_pages, const AttentionTable& table,
                                      const AttentionTiles& tiles,
                                      const std::optional<mx::array>& sinks,
                                      const AttentionOptions& options, mx::Device device) {
  check_ndim(op, "q", q, 3, "[nnz, num_qo_heads, head_dim]");
  const FloatType dtype = float_type(op, "q", q);
  const PoolLayout pool = pool_layout(op, k_pages, v_pages, options.kv_layout);
  const FloatType kv_dtype = pool_dtype(op, q.dtype(), k_pages, device);
  const int nnz = q.shape(0), heads = q.shape(1), dim = q.shape(2);
  if (dim != pool.head_dim) {
    fail(op, "q must have the pool's head_dim ", pool.head_dim, ", got shape ", q.shape(), ".");
  }
  if (!supported_head_dim(dim)) {
    fail(op, "head_dim must be 64, 80, 96, 112, 128, 192 or 256, got ", dim, ".");
  }
  if (heads == 0 || heads % pool.num_kv_heads != 0 || heads / pool.num_kv_heads > 32) {
    fail(op, "num_qo_heads of q must be 1 to 32 times num_kv_heads ", pool.num_kv_heads, ", got ",
         heads, ".");
  }
  check_table(op, table);
  const int batch = table.kv_last_page_len.shape(0);
  if (!table.qo_indptr && nnz != batch) {
    fail(op, "q must have one token for each of the ", batch,
         " requests where there is no qo_indptr, got shape ", q.shape(), ".");
  }
  check_ndim(op, "tiles", tiles.tiles, 2, "[num_tiles, 8]");
  check_shape(op, "tiles", tiles.tiles, {tiles.tiles.shape(0), 8});
  check_dtype(op, "tiles", tiles.tiles, mx::int32);
  check_shape(op, "merge_indptr", tiles.merge_indptr, {nnz + 1});
  check_dtype(op, "merge_indptr", tiles.merge_indptr, mx::int32);
  if (tiles.token_order) {
    check_ndim(op, "token_order", *tiles.token_order, 1, "[num_shared_tokens]");
    check_dtype(op, "token_order", *tiles.token_order, mx::int32);
  }
  if (sinks) check_shape(op, "sinks", *sinks, {heads});
  if (!std::isfinite(options.sm_scale)) {
    fail(op, "sm_scale must be finite, got ", options.sm_scale, ".");
  }
  if (options.window_left < -1) {
    fail(op, "window_left must be -1 or more, got ", options.window_left, ".");
  }
  if (!(options.logits_soft_cap >= 0.0f) || std::isinf(options.logits_soft_cap)) {
    fail(op, "logits_soft_cap must be 0 or more, got ", options.logits_soft_cap, ".");
  }

  PagedAttentionParams p{};
  p.num_q = nnz;
  p.num_requests = batch;
  p.num_qo_heads = heads;
  p.num_kv_heads = pool.num_kv_heads;
  p.head_dim = dim;
  p.page_size = pool.page_size;
  p.stride_page = pool.stride_page;
  p.stride_token = pool.stride_token;
  p.stride_head = pool.stride_head;
  p.num_tiles = tiles.tiles.shape(0);
  p.num_partials = tiles.num_partials;
  p.batch_invariant = tiles.batch_invariant ? 1 : 0;
  p.max_q_len = tiles.max_q_len;
  p.chunks_each = tiles.chunks_each;
  p.window_left = options.window_left;
  p.causal = options.causal ? 1 : 0;
  p.sm_scale_log2 = static_cast<float>(options.sm_scale * 1.4426950408889634);
  p.logits_soft_cap = options.logits_soft_cap;
  p.dtype = dtype;
  p.kv_dtype = kv_dtype;
  p.has_qo_indptr = table.qo_indptr ? 1 : 0;
  p.has_sinks = sinks ? 1 : 0;
  p.has_first_page_offset = table.first_page_offset ? 1 : 0;
  p.has_token_order = tiles.token_order ? 1 : 0;
  p.num_large_tiles = tiles.num_large;
  return p;
}

Arrays attention_inputs(const mx::array& q, const mx::array& k_pages, const mx::array& v_pages,
                        const AttentionTable& table, const AttentionTiles& tiles,
                        const std::optional<mx::array>& sinks, mx::Stream s) {
  const auto row = [s](const mx::array& a) { return row_contiguous(a, s); };
  Arrays inputs{row(q),
                k_pages,
                v_pages,
                row(table.kv_indptr),
                row(table.kv_indices),
                row(table.kv_last_page_len),
                row(tiles.tiles),
                row(tiles.merge_indptr)};
  if (table.qo_indptr) inputs.push_back(row(*table.qo_indptr));
  if (table.first_page_offset) inputs.push_back(row(*table.first_page_offset));
  if (sinks) inputs.push_back(row(mx::astype(*sinks, mx::float32, s)));
  if (tiles.token_order) inputs.push_back(row(*tiles.token_order));
  return inputs;
}

std::pair<mx::array, mx::array> paged_attention(
    const mx::array& q, const mx::array& k_pages, const mx::array& v_pages,
    const AttentionTable& table, const AttentionTiles& tiles, const std::optional<mx::array>& sinks,
    const AttentionOptions& options, mx::StreamOrDevice s_) {
  const mx::Stream s = mx::to_stream(s_);
  const PagedAttentionParams params = attention_params("paged_attention", q, k_pages, v_pages,
                                                       table, tiles, sinks, options, s.device);
  const Arrays out = mx::array::make_arrays(
      {q.shape(), {params.num_q, params.num_qo_heads}}, {q.dtype(), mx::float32},
      std::make_shared<PagedAttention>(s, params, false),
      attention_inputs(q, k_pages, v_pages, table, tiles, sinks, s));
  return {out[0], out[1]};
}

std::pair<mx::array, mx::array> paged_attention_partial(
    const mx::array& q, const mx::array& k_pages, const mx::array& v_pages,
    const AttentionTable& table, const AttentionTiles& tiles, const AttentionOptions& options,
    mx::StreamOrDevice s_) {
  const mx::Stream s = mx::to_stream(s_);
  const PagedAttentionParams params =
      attention_params("paged_attention_partial", q, k_pages, v_pages, table, tiles, std::nullopt,
                       options, s.device);
  const Arrays out = mx::array::make_arrays(
      {{params.num_partials, params.num_qo_heads, params.head_dim},
       {params.num_partials, params.num_qo_heads}},
      {mx::float32, mx::float32}, std::make_shared<PagedAttention>(s, params, true),
      attention_inputs(q, k_pages, v_pages, table, tiles, std::nullopt, s));
  return {out[0], out[1]};
}

void PagedAttention::eval_gpu(const Arrays& inputs, Arrays& outputs) {
  check_pool_contiguous(op_, "k_pages", inputs[1]);
  check_pool_contiguous(op_, "v_pages", inputs[2]);
  const auto entry = partial_ ? &GpuBackend::paged_attention_partial : &GpuBackend::paged_attention;
  gpu_launcher(op_, entry)(params_, inputs, outputs, stream());
}

bool PagedAttention::is_equivalent(const mx::Primitive& other) const {
  const auto& o = static_cast<const PagedAttention&>(other);
  // No padding (its size is asserted) and value-initialised: the bytes are the value.
  return partial_ == o.partial_ && std::memcmp(&params_, &o.params_, sizeof(params_)) == 0;
}

}  // namespace mlxcel

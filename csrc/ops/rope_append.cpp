#include "ops/rope_append.h"

#include "common/check.h"
#include "common/layout.h"
#include "common/pool.h"

namespace mlxcel {

std::tuple<mx::array, mx::array, mx::array> rope_append(
    const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& k_pages,
    const mx::array& v_pages, const mx::array& slots, const mx::array& positions,
    const mx::array& inv_freq, bool interleaved, float scale, const std::string& kv_layout,
    mx::StreamOrDevice s_) {
  constexpr const char* op = "rope_append";
  const FloatType dtype = float_type(op, "q", q);
  check_ndim(op, "q", q, 3, "[nnz, num_qo_heads, head_dim]");
  const mx::Stream s = mx::to_stream(s_);
  const FloatType kv_dtype = pool_dtype(op, q.dtype(), k_pages, s.device);
  const PoolLayout pool = pool_layout(op, k_pages, v_pages, kv_layout);
  if (k_pages.id() == v_pages.id()) fail(op, "k_pages and v_pages must be two pools, got one.");
  const int nnz = q.shape(0);
  if (q.shape(2) != pool.head_dim) {
    fail(op, "q must have the pool's head_dim ", pool.head_dim, ", got shape ", q.shape(), ".");
  }
  if (pool.head_dim > 1024) fail(op, "head_dim must be at most 1024, got ", pool.head_dim, ".");
  const mx::Shape kv_shape{nnz, pool.num_kv_heads, pool.head_dim};
  check_shape(op, "k", k, kv_shape);
  check_shape(op, "v", v, kv_shape);
  check_dtype(op, "k", k, q.dtype());
  check_dtype(op, "v", v, q.dtype());
  check_shape(op, "slots", slots, {nnz});
  check_dtype(op, "slots", slots, mx::int32);
  check_shape(op, "positions", positions, {nnz});
  check_dtype(op, "positions", positions, mx::int32);
  check_ndim(op, "inv_freq", inv_freq, 1, "[rotary_dim / 2]");
  check_dtype(op, "inv_freq", inv_freq, mx::float32);
  const int rotary_dim = 2 * inv_freq.shape(0);
  if (rotary_dim > pool.head_dim) {
    fail(op, "inv_freq must have at most head_dim / 2 = ", pool.head_dim / 2, " elements, got ",
         inv_freq.shape(0), ".");
  }

  const RopeAppendParams params{nnz,
                                q.shape(1),
                                pool.num_kv_heads,
                                pool.head_dim,
                                rotary_dim,
                                interleaved ? 1 : 0,
                                pool.page_size,
                                pool.num_pages,
                                pool.stride_page,
                                pool.stride_token,
                                pool.stride_head,
                                scale,
                                dtype,
                                kv_dtype};
  const Arrays out = mx::array::make_arrays(
      {q.shape(), k_pages.shape(), v_pages.shape()}, {q.dtype(), k_pages.dtype(), k_pages.dtype()},
      std::make_shared<RopeAppend>(s, params),
      {row_contiguous(q, s), row_contiguous(k, s), row_contiguous(v, s), k_pages, v_pages,
       row_contiguous(slots, s), row_contiguous(positions, s), row_contiguous(inv_freq, s)});
  return {out[0], out[1], out[2]};
}

void RopeAppend::eval_gpu(const Arrays& inputs, Arrays& outputs) {
  check_pool_contiguous(op_, "k_pages", inputs[3]);
  check_pool_contiguous(op_, "v_pages", inputs[4]);
  check_pools_apart(op_, inputs[3], inputs[4]);
  gpu_launcher(op_, &GpuBackend::rope_append)(params_, inputs, outputs, stream());
}

}  // namespace mlxcel

#include "ops/merge_states.h"

#include "common/check.h"
#include "common/layout.h"

namespace mlxcel {

std::pair<mx::array, mx::array> merge_states(const mx::array& v_in, const mx::array& lse_in,
                                             const mx::array& o_indptr, mx::StreamOrDevice s_) {
  constexpr const char* op = "merge_states";
  check_ndim(op, "v_in", v_in, 3, "[N, num_heads, head_dim]");
  const FloatType dtype = float_type(op, "v_in", v_in);
  const int heads = v_in.shape(1), dim = v_in.shape(2);
  if (dim < 1) fail(op, "head_dim must be at least 1, got v_in of shape ", v_in.shape(), ".");
  if (dim > 1024) fail(op, "head_dim must be at most 1024, got v_in of shape ", v_in.shape(), ".");
  check_shape(op, "lse_in", lse_in, {v_in.shape(0), heads});
  check_dtype(op, "lse_in", lse_in, mx::float32);
  check_ndim(op, "o_indptr", o_indptr, 1, "[M + 1]");
  check_dtype(op, "o_indptr", o_indptr, mx::int32);
  if (o_indptr.shape(0) == 0) fail(op, "o_indptr must have M + 1 elements, got none.");

  const mx::Stream s = mx::to_stream(s_);
  const int num_out = o_indptr.shape(0) - 1;
  const MergeStatesParams params{v_in.shape(0), num_out, heads, dim, dtype};
  const Arrays out = mx::array::make_arrays(
      {{num_out, heads, dim}, {num_out, heads}}, {v_in.dtype(), mx::float32},
      std::make_shared<MergeStates>(s, params),
      {row_contiguous(v_in, s), row_contiguous(lse_in, s), row_contiguous(o_indptr, s)});
  return {out[0], out[1]};
}

bool MergeStates::is_equivalent(const mx::Primitive& other) const {
  const MergeStatesParams& o = static_cast<const MergeStates&>(other).params_;
  return params_.num_in == o.num_in && params_.num_out == o.num_out &&
         params_.num_heads == o.num_heads && params_.head_dim == o.head_dim &&
         params_.dtype == o.dtype;
}

}  // namespace mlxcel

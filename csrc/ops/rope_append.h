#pragma once

#include <string>
#include <tuple>

#include "backend.h"
#include "common/primitive.h"
#include "mlx/ops.h"
#include "mlx/utils.h"
#include "params/rope_append.h"

namespace mlxcel {

/// Rotary position embedding of q and k, and the write of k and v into their pages, in one pass.
///
/// q         (nnz, num_qo_heads, head_dim)  f32|f16|bf16
/// k, v      (nnz, num_kv_heads, head_dim)  dtype of q
/// k_pages, v_pages  NHD (num_pages, page_size, num_kv_heads, head_dim) or HND (num_pages,
/// num_kv_heads, page_size,
///           head_dim), row-contiguous. dtype of q; on CPU also f16 or bf16 beside q in f32: finite
///           values beyond their range become the largest of it
/// slots     (nnz) i32, page * page_size + offset of each token, all different, or -1: not written.
/// Not checked
///           against the pool here (that would synchronise); PageTable checks them on the host
/// positions (nnz) i32, >= 0
/// inv_freq  (rotary_dim / 2) f32, radians a position
/// Returns (q_rot, k_pages, v_pages); the pools are the inputs' buffers, written in place, whoever
/// else holds them: use the returned handles from here on. A pool that is not row-contiguous is
/// refused when it is evaluated, since only a copy could serve it.
std::tuple<mx::array, mx::array, mx::array> rope_append(
    const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& k_pages,
    const mx::array& v_pages, const mx::array& slots, const mx::array& positions,
    const mx::array& inv_freq, bool interleaved = false, float scale = 1.0f,
    const std::string& kv_layout = "NHD", mx::StreamOrDevice s = {});

class RopeAppend : public InferencePrimitive {
 public:
  RopeAppend(mx::Stream stream, const RopeAppendParams& params)
      : InferencePrimitive(stream, "rope_append"), params_(params) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override;
  // Never equal: merging two appends would drop a write.
  bool is_equivalent(const mx::Primitive&) const override { return false; }

 private:
  RopeAppendParams params_;
};

}  // namespace mlxcel

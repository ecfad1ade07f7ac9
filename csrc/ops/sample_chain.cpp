#include "ops/sample_chain.h"

#include "common/check.h"
#include "common/layout.h"
#include "mlx/ops.h"
#include "ops/vocab.h"

namespace mlxcel {

Arrays chain_speculative_sample(const mx::array& draft_ids, const mx::array& draft_probs,
                                const mx::array& target_probs, const mx::array& rows,
                                mx::StreamOrDevice s_) {
  constexpr const char* op = "chain_speculative_sample";
  check_ndim(op, "draft_ids", draft_ids, 2, "[batch, n]");
  check_dtype(op, "draft_ids", draft_ids, mx::int32);
  const int batch = draft_ids.shape(0), n = draft_ids.shape(1);
  check_ndim(op, "target_probs", target_probs, 3, "[batch, n + 1, vocab]");
  const int vocab = target_probs.shape(2);
  check_vocab(op, "target_probs", vocab);
  check_shape(op, "target_probs", target_probs, {batch, n + 1, vocab});
  check_dtype(op, "target_probs", target_probs, mx::float32);
  check_shape(op, "draft_probs", draft_probs, {batch, n, vocab});
  check_dtype(op, "draft_probs", draft_probs, mx::float32);
  check_shape(op, "rows", rows, {batch, static_cast<int>(sizeof(ChainRow) / 4)});
  check_dtype(op, "rows", rows, mx::uint32);

  const mx::Stream s = mx::to_stream(s_);
  const ChainParams params{batch, n, vocab};
  return mx::array::make_arrays({{batch, n + 1}, {batch}}, {mx::int32, mx::int32},
                                std::make_shared<ChainSpeculativeSample>(s, params),
                                {row_contiguous(draft_ids, s), row_contiguous(draft_probs, s),
                                 row_contiguous(target_probs, s), row_contiguous(rows, s)});
}

bool ChainSpeculativeSample::is_equivalent(const mx::Primitive& other) const {
  const ChainParams& o = static_cast<const ChainSpeculativeSample&>(other).params_;
  return params_.batch == o.batch && params_.num_draft == o.num_draft && params_.vocab == o.vocab;
}

}  // namespace mlxcel

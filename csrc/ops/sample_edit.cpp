#include "ops/sample_edit.h"

#include "common/check.h"
#include "common/layout.h"
#include "common/pool.h"
#include "mlx/ops.h"
#include "ops/vocab.h"

namespace mlxcel {

mx::array edit_logits(const mx::array& logits, const mx::array& rows, const mx::array& bias_ids,
                      const mx::array& bias_values, const mx::array& counts, const mx::array& masks,
                      mx::StreamOrDevice s_) {
  constexpr const char* op = "edit_logits";
  check_ndim(op, "logits", logits, 2, "[batch, vocab]");
  const FloatType dtype = float_type(op, "logits", logits);
  const int batch = logits.shape(0), vocab = logits.shape(1);
  check_vocab(op, "logits", vocab);
  check_shape(op, "rows", rows, {batch, static_cast<int>(sizeof(EditRow) / 4)});
  check_dtype(op, "rows", rows, mx::uint32);
  check_ndim(op, "bias_ids", bias_ids, 1, "[nnz]");
  check_dtype(op, "bias_ids", bias_ids, mx::int32);
  check_shape(op, "bias_values", bias_values, bias_ids.shape());
  check_dtype(op, "bias_values", bias_values, mx::float32);
  check_ndim(op, "counts", counts, 2, "[slots, vocab]");
  check_shape(op, "counts", counts, {counts.shape(0), vocab});
  check_dtype(op, "counts", counts, mx::uint32);
  check_ndim(op, "masks", masks, 2, "[masks, words]");
  check_dtype(op, "masks", masks, mx::uint32);

  const mx::Stream s = mx::to_stream(s_);
  const EditLogitsParams params{
      batch, vocab, dtype, masks.shape(1), bias_ids.shape(0), counts.shape(0), masks.shape(0)};
  return mx::array(
      logits.shape(), mx::float32, std::make_shared<EditLogits>(s, params),
      {row_contiguous(logits, s), row_contiguous(rows, s), row_contiguous(bias_ids, s),
       row_contiguous(bias_values, s), row_contiguous(counts, s), row_contiguous(masks, s)});
}

mx::array count_tokens(const mx::array& counts, const mx::array& rows, const mx::array& ids,
                       bool reset, mx::StreamOrDevice s_) {
  constexpr const char* op = "count_tokens";
  check_ndim(op, "counts", counts, 2, "[slots, vocab]");
  check_dtype(op, "counts", counts, mx::uint32);
  check_vocab(op, "counts", counts.shape(1));
  check_ndim(op, "rows", rows, 1, "[n]");
  check_dtype(op, "rows", rows, mx::int32);
  check_shape(op, "ids", ids, rows.shape());
  check_dtype(op, "ids", ids, mx::int32);

  const mx::Stream s = mx::to_stream(s_);
  const CountTokensParams params{rows.shape(0), counts.shape(0), counts.shape(1), reset};
  return mx::array(counts.shape(), mx::uint32, std::make_shared<CountTokens>(s, params),
                   {counts, row_contiguous(rows, s), row_contiguous(ids, s)});
}

void CountTokens::eval_gpu(const Arrays& inputs, Arrays& outputs) {
  check_pool_contiguous(op_, "counts", inputs[0]);
  gpu_launcher(op_, &GpuBackend::count_tokens)(params_, inputs, outputs, stream());
}

bool EditLogits::is_equivalent(const mx::Primitive& other) const {
  const EditLogitsParams& o = static_cast<const EditLogits&>(other).params_;
  return params_.batch == o.batch && params_.vocab == o.vocab && params_.dtype == o.dtype &&
         params_.mask_words == o.mask_words && params_.num_bias == o.num_bias &&
         params_.num_counts == o.num_counts && params_.num_masks == o.num_masks;
}

}  // namespace mlxcel

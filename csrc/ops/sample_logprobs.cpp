#include "ops/sample_logprobs.h"

#include <algorithm>

#include "common/check.h"
#include "common/layout.h"
#include "mlx/ops.h"
#include "ops/vocab.h"

namespace mlxcel {

Arrays token_logprobs(const mx::array& logits, const mx::array& ids, int num_top,
                      mx::StreamOrDevice s_) {
  constexpr const char* op = "token_logprobs";
  check_ndim(op, "logits", logits, 2, "[batch, vocab]");
  const FloatType dtype = float_type(op, "logits", logits);
  const int batch = logits.shape(0), vocab = logits.shape(1);
  check_vocab(op, "logits", vocab);
  check_shape(op, "ids", ids, {batch});
  check_dtype(op, "ids", ids, mx::int32);
  if (num_top < 0 || num_top > std::min(kMaxTopLogprobs, vocab)) {
    fail(op, "num_top must be in 0..", std::min(kMaxTopLogprobs, vocab), ", got ", num_top, ".");
  }
  const mx::Stream s = mx::to_stream(s_);
  const TokenLogprobsParams params{batch, vocab, num_top, dtype};
  return mx::array::make_arrays({{batch}, {batch}, {batch, num_top}, {batch, num_top}},
                                {mx::float32, mx::int32, mx::int32, mx::float32},
                                std::make_shared<TokenLogprobs>(s, params),
                                {row_contiguous(logits, s), row_contiguous(ids, s)});
}

bool TokenLogprobs::is_equivalent(const mx::Primitive& other) const {
  const TokenLogprobsParams& o = static_cast<const TokenLogprobs&>(other).params_;
  return params_.batch == o.batch && params_.vocab == o.vocab && params_.num_top == o.num_top &&
         params_.dtype == o.dtype;
}

}  // namespace mlxcel

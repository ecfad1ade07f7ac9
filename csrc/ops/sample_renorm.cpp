#include "ops/sample_renorm.h"

#include "common/check.h"
#include "common/layout.h"
#include "mlx/ops.h"
#include "ops/vocab.h"

namespace mlxcel {

const char* renorm_name(RenormKind kind) {
  switch (kind) {
    case RenormKind::top_k_probs:
      return "top_k_renorm";
    case RenormKind::top_p_probs:
      return "top_p_renorm";
    case RenormKind::min_p_probs:
      return "min_p_renorm";
    default:
      return "top_k_mask";
  }
}

mx::array renorm(RenormKind kind, const mx::array& x, const mx::array& values,
                 mx::StreamOrDevice s_) {
  const char* op = renorm_name(kind);
  const bool top_k = kind == RenormKind::top_k_probs || kind == RenormKind::top_k_mask;
  const char* argument = kind == RenormKind::top_k_mask ? "logits" : "probs";
  check_ndim(op, argument, x, 2, "[batch, vocab]");
  const FloatType dtype = float_type(op, argument, x);
  const int batch = x.shape(0), vocab = x.shape(1);
  check_vocab(op, argument, vocab);
  check_shape(op, top_k ? "top_k" : "p", values, {batch});
  check_dtype(op, top_k ? "top_k" : "p", values, top_k ? mx::int32 : mx::float32);

  const mx::Stream s = mx::to_stream(s_);
  const RenormParams params{batch, vocab, dtype, kind};
  return mx::array(x.shape(), x.dtype(), std::make_shared<Renorm>(s, params),
                   {row_contiguous(x, s), row_contiguous(values, s)});
}

bool Renorm::is_equivalent(const mx::Primitive& other) const {
  const RenormParams& o = static_cast<const Renorm&>(other).params_;
  return params_.batch == o.batch && params_.vocab == o.vocab && params_.dtype == o.dtype &&
         params_.kind == o.kind;
}

}  // namespace mlxcel

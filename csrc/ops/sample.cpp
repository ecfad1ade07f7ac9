#include "ops/sample.h"

#include "common/check.h"
#include "common/layout.h"
#include "mlx/ops.h"
#include "ops/vocab.h"

namespace mlxcel {

Arrays sample(const mx::array& logits, const mx::array& rows, SampleWork work, bool joint,
              bool temperature_last, mx::StreamOrDevice s_) {
  constexpr const char* op = "sample";
  check_ndim(op, "logits", logits, 2, "[batch, vocab]");
  const FloatType dtype = float_type(op, "logits", logits);
  const int batch = logits.shape(0), vocab = logits.shape(1);
  check_vocab(op, "logits", vocab);
  check_shape(op, "rows", rows, {batch, static_cast<int>(sizeof(SampleRow) / 4)});
  check_dtype(op, "rows", rows, mx::uint32);

  const mx::Stream s = mx::to_stream(s_);
  const SampleParams params{batch, vocab, dtype, work, joint, temperature_last};
  return mx::array::make_arrays({{batch}, {batch}, {batch}}, {mx::int32, mx::bool_, mx::int32},
                                std::make_shared<Sample>(s, params),
                                {row_contiguous(logits, s), row_contiguous(rows, s)});
}

bool Sample::is_equivalent(const mx::Primitive& other) const {
  const SampleParams& o = static_cast<const Sample&>(other).params_;
  return params_.batch == o.batch && params_.vocab == o.vocab && params_.dtype == o.dtype &&
         params_.work == o.work && params_.joint == o.joint &&
         params_.temperature_last == o.temperature_last;
}

}  // namespace mlxcel

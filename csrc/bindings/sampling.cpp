#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "ops/sample.h"
#include "ops/sample_chain.h"
#include "ops/sample_edit.h"
#include "ops/sample_logprobs.h"
#include "ops/sample_renorm.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxcel {

void bind_sampling(nb::module_& m) {
  nb::enum_<SampleWork>(m, "SampleWork", "The most that any row of a launch asks for.")
      .value("greedy", SampleWork::greedy)
      .value("temperature", SampleWork::temperature)
      .value("top_k", SampleWork::top_k)
      .value("filters", SampleWork::filters);
  nb::enum_<RenormKind>(m, "RenormKind", "Which filter renorm applies.")
      .value("top_k_probs", RenormKind::top_k_probs)
      .value("top_p_probs", RenormKind::top_p_probs)
      .value("min_p_probs", RenormKind::min_p_probs)
      .value("top_k_mask", RenormKind::top_k_mask);

  m.def("sample", &sample, "logits"_a, "rows"_a, "work"_a, "joint"_a, "temperature_last"_a,
        nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def sample(logits: mlx.core.array, rows: mlx.core.array, work: SampleWork, "
                "joint: bool, temperature_last: bool, *, stream: mlx.core.StreamOrDevice = None) "
                "-> list[mlx.core.array]"),
        "One token a row; see mlxcel_ext.sample.");
  m.def("edit_logits", &edit_logits, "logits"_a, "rows"_a, "bias_ids"_a, "bias_values"_a,
        "counts"_a, "masks"_a, nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def edit_logits(logits: mlx.core.array, rows: mlx.core.array, bias_ids: "
                "mlx.core.array, bias_values: mlx.core.array, counts: mlx.core.array, masks: "
                "mlx.core.array, *, stream: mlx.core.StreamOrDevice = None) -> mlx.core.array"),
        "Mask, bias and penalties; see mlxcel_ext.edit_logits.");
  m.def("count_tokens", &count_tokens, "counts"_a, "rows"_a, "ids"_a, "reset"_a, nb::kw_only(),
        "stream"_a = nb::none(),
        nb::sig("def count_tokens(counts: mlx.core.array, rows: mlx.core.array, ids: "
                "mlx.core.array, reset: bool, *, stream: mlx.core.StreamOrDevice = None) -> "
                "mlx.core.array"),
        "Counts of tokens, in place; see mlxcel_ext.count_tokens.");
  m.def("token_logprobs", &token_logprobs, "logits"_a, "ids"_a, "num_top"_a, nb::kw_only(),
        "stream"_a = nb::none(),
        nb::sig("def token_logprobs(logits: mlx.core.array, ids: mlx.core.array, num_top: int, *, "
                "stream: mlx.core.StreamOrDevice = None) -> list[mlx.core.array]"),
        "Log-probabilities of tokens; see mlxcel_ext.token_logprobs.");
  m.def("renorm", &renorm, "kind"_a, "x"_a, "values"_a, nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def renorm(kind: RenormKind, x: mlx.core.array, values: mlx.core.array, *, "
                "stream: mlx.core.StreamOrDevice = None) -> mlx.core.array"),
        "Filtered distributions; see mlxcel_ext.top_k_renorm and its siblings.");
  m.def("chain_speculative_sample", &chain_speculative_sample, "draft_ids"_a, "draft_probs"_a,
        "target_probs"_a, "rows"_a, nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def chain_speculative_sample(draft_ids: mlx.core.array, draft_probs: "
                "mlx.core.array, target_probs: mlx.core.array, rows: mlx.core.array, *, stream: "
                "mlx.core.StreamOrDevice = None) -> list[mlx.core.array]"),
        "Speculative sampling; see mlxcel_ext.chain_speculative_sample.");
}

}  // namespace mlxcel

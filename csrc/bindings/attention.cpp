#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include "bindings/bindings.h"
#include "ops/merge_states.h"
#include "ops/paged_attention.h"
#include "plan/attention_plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxcel {
namespace {

using Pointers = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

/// A read-only numpy view of a plan's int32 data; the plan lives as long as the view.
template <class... Shape>
nb::object view(nb::handle owner, const void* data, Shape... shape) {
  return nb::ndarray<nb::numpy, const int32_t>(data, {static_cast<size_t>(shape)...}, owner).cast();
}

plan::AttentionPlan make_plan(const Pointers& kv_indptr, const std::optional<Pointers>& qo_indptr,
                              int page_size, int num_kv_heads, int group_size, int window_left,
                              bool causal, bool batch_invariant, bool partial,
                              const plan::PlanTarget& target) {
  return plan::plan_attention(
      {kv_indptr.data(), qo_indptr ? qo_indptr->data() : nullptr,
       static_cast<int32_t>(kv_indptr.shape(0)) - 1, page_size, num_kv_heads, group_size,
       window_left, causal, batch_invariant, partial},
      target);
}

void bind_plan(nb::module_& m) {
  using plan::AttentionPlan;
  using plan::PlanTarget;
  nb::class_<PlanTarget>(m, "PlanTarget", "What the planner knows of a machine.")
      .def(nb::init<int, int, int, int, int, int, int>(), "slots"_a, "tile_rows"_a,
           "rows_per_token"_a, "min_chunk_tokens"_a, "tile_overhead"_a, "max_waves"_a,
           "invariant_chunk_tokens"_a)
      .def_ro("slots", &PlanTarget::slots)
      .def_ro("tile_rows", &PlanTarget::tile_rows)
      .def_ro("rows_per_token", &PlanTarget::rows_per_token)
      .def_ro("min_chunk_tokens", &PlanTarget::min_chunk_tokens)
      .def_ro("tile_overhead", &PlanTarget::tile_overhead)
      .def_ro("max_waves", &PlanTarget::max_waves)
      .def_ro("invariant_chunk_tokens", &PlanTarget::invariant_chunk_tokens);
  nb::class_<AttentionPlan>(m, "AttentionPlan", "Tiles and merges of an attention launch.")
      .def_prop_ro("tiles",
                   [](nb::handle_t<AttentionPlan> self) {
                     const auto& p = nb::cast<const AttentionPlan&>(self);
                     return view(self, p.tiles.data(), p.tiles.size(), 8);
                   })
      .def_prop_ro("merge_indptr",
                   [](nb::handle_t<AttentionPlan> self) {
                     const auto& p = nb::cast<const AttentionPlan&>(self);
                     return view(self, p.merge_indptr.data(), p.merge_indptr.size());
                   })
      .def_ro("num_partials", &AttentionPlan::num_partials)
      .def_ro("num_groups", &AttentionPlan::num_groups)
      .def_ro("max_q_len", &AttentionPlan::max_q_len)
      .def_ro("max_chunks", &AttentionPlan::max_chunks)
      .def_ro("chunk_tokens", &AttentionPlan::chunk_tokens);
  m.def("plan_attention", &make_plan, "kv_indptr"_a, "qo_indptr"_a.none(), "page_size"_a,
        "num_kv_heads"_a, "group_size"_a, "window_left"_a, "causal"_a, "batch_invariant"_a,
        "partial"_a, "target"_a, "Plan a launch; see mlxcel_ext.plan_attention.");
}

}  // namespace

void bind_attention(nb::module_& m) {
  bind_plan(m);
  nb::class_<AttentionTable>(m, "AttentionTable", "Device arrays of a page table.")
      .def(nb::init<mx::array, mx::array, mx::array, std::optional<mx::array>,
                    std::optional<mx::array>>(),
           "kv_indptr"_a, "kv_indices"_a, "kv_last_page_len"_a, "qo_indptr"_a.none(),
           "first_page_offset"_a.none());
  nb::class_<AttentionTiles>(m, "AttentionTiles", "Device arrays of a plan.")
      .def(nb::init<mx::array, mx::array, std::optional<mx::array>, int, bool, int, int>(),
           "tiles"_a, "merge_indptr"_a, "token_order"_a.none(), "num_partials"_a, "batch_invariant"_a,
           "max_q_len"_a, "max_chunks"_a);
  nb::class_<AttentionOptions>(m, "AttentionOptions", "Scalar options of paged_attention.")
      .def(nb::init<bool, float, int, float, std::string>(), "causal"_a, "sm_scale"_a,
           "window_left"_a, "logits_soft_cap"_a, "kv_layout"_a);
  m.def("paged_attention", &paged_attention, "q"_a, "k_pages"_a, "v_pages"_a, "table"_a, "tiles"_a,
        "sinks"_a.none(), "options"_a, nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def paged_attention(q: mlx.core.array, k_pages: mlx.core.array, v_pages: "
                "mlx.core.array, table: AttentionTable, tiles: AttentionTiles, sinks: "
                "mlx.core.array | None, options: AttentionOptions, *, stream: "
                "mlx.core.StreamOrDevice = None) -> tuple[mlx.core.array, mlx.core.array]"),
        "Attention over pages; see mlxcel_ext.paged_attention.");
  m.def("paged_attention_partial", &paged_attention_partial, "q"_a, "k_pages"_a, "v_pages"_a,
        "table"_a, "tiles"_a, "options"_a, nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def paged_attention_partial(q: mlx.core.array, k_pages: mlx.core.array, v_pages: "
                "mlx.core.array, table: AttentionTable, tiles: AttentionTiles, options: "
                "AttentionOptions, *, stream: mlx.core.StreamOrDevice = None) -> "
                "tuple[mlx.core.array, mlx.core.array]"),
        "Unmerged attention states; see mlxcel_ext.paged_attention_partial.");
  m.def("merge_states", &merge_states, "v_in"_a, "lse_in"_a, "o_indptr"_a, nb::kw_only(),
        "stream"_a = nb::none(),
        nb::sig("def merge_states(v_in: mlx.core.array, lse_in: mlx.core.array, o_indptr: "
                "mlx.core.array, *, stream: mlx.core.StreamOrDevice = None) -> "
                "tuple[mlx.core.array, mlx.core.array]"),
        "Merge attention states; see mlxcel_ext.merge_states.");
}

}  // namespace mlxcel

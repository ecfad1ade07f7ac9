#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include "bindings/bindings.h"
#include "ops/merge_states.h"
#include "ops/paged_attention.h"
#include "plan/attention_plan.h"
#include "plan/cascade.h"
#include "plan/shared_prefix.h"

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

const int32_t* data_or_null(const std::optional<Pointers>& a) {
  return a ? a->data() : nullptr;
}

plan::AttentionPlan make_plan(const Pointers& kv_indptr, const std::optional<Pointers>& qo_indptr,
                              int page_size, int num_kv_heads, int group_size, int window_left,
                              bool causal, bool batch_invariant, bool partial,
                              const plan::PlanTarget& target, const plan::SharedPrefixTree* tree,
                              const plan::CascadeCosts* costs, const plan::CascadeFloors* floors) {
  const plan::AttentionProblem problem{kv_indptr.data(),
                                       data_or_null(qo_indptr),
                                       static_cast<int32_t>(kv_indptr.shape(0)) - 1,
                                       page_size,
                                       num_kv_heads,
                                       group_size,
                                       window_left,
                                       causal,
                                       batch_invariant,
                                       partial};
  if (tree == nullptr || costs == nullptr || floors == nullptr)
    return plan::plan_attention(problem, target);
  return plan::plan_attention(problem, target,
                              plan::choose_levels(*tree, problem, target, *costs, *floors));
}

plan::PageRows page_rows(const Pointers& kv_indptr, const Pointers& kv_indices,
                         const std::optional<Pointers>& first_page_offset,
                         const std::optional<Pointers>& qo_indptr, int page_size, bool causal) {
  return {kv_indptr.data(),
          kv_indices.data(),
          data_or_null(first_page_offset),
          data_or_null(qo_indptr),
          static_cast<int32_t>(kv_indptr.shape(0)) - 1,
          page_size,
          causal};
}

void bind_cascade(nb::module_& m) {
  using plan::CascadeCosts;
  using plan::CascadeFloors;
  using plan::PrefixNode;
  using plan::SharedPrefixTree;
  nb::class_<CascadeCosts>(m, "CascadeCosts", "What sharing costs on a machine.")
      .def(nb::init<float, float, float, float, float, float>(), "reread"_a, "row"_a, "tile"_a,
           "merge"_a, "launch"_a, "other"_a = 1.0f)
      .def_ro("reread", &CascadeCosts::reread)
      .def_ro("row", &CascadeCosts::row)
      .def_ro("tile", &CascadeCosts::tile)
      .def_ro("merge", &CascadeCosts::merge)
      .def_ro("launch", &CascadeCosts::launch)
      .def_ro("other", &CascadeCosts::other);
  nb::class_<CascadeFloors>(m, "CascadeFloors", "Least pages and members of shared spans.")
      .def(nb::init<int, int>(), "min_pages"_a, "min_members"_a)
      .def_ro("min_pages", &CascadeFloors::min_pages)
      .def_ro("min_members", &CascadeFloors::min_members);
  nb::class_<SharedPrefixTree>(m, "SharedPrefixTree", "Common prefixes of page rows.")
      .def(
          "__init__",
          [](SharedPrefixTree* self, const Pointers& kv_indptr, const Pointers& kv_indices,
             const std::optional<Pointers>& first_page_offset,
             const std::optional<Pointers>& qo_indptr, int page_size, bool causal) {
            new (self) SharedPrefixTree(
                page_rows(kv_indptr, kv_indices, first_page_offset, qo_indptr, page_size, causal));
          },
          "kv_indptr"_a, "kv_indices"_a, "first_page_offset"_a.none(), "qo_indptr"_a.none(),
          "page_size"_a, "causal"_a)
      .def(
          "holds_for",
          [](const SharedPrefixTree& self, const Pointers& kv_indptr, const Pointers& kv_indices,
             const std::optional<Pointers>& first_page_offset,
             const std::optional<Pointers>& qo_indptr, int page_size, bool causal) {
            return self.holds_for(
                page_rows(kv_indptr, kv_indices, first_page_offset, qo_indptr, page_size, causal));
          },
          "kv_indptr"_a, "kv_indices"_a, "first_page_offset"_a.none(), "qo_indptr"_a.none(),
          "page_size"_a, "causal"_a)
      .def_prop_ro("order",
                   [](nb::handle_t<SharedPrefixTree> self) {
                     const auto& order = nb::cast<const SharedPrefixTree&>(self).order();
                     return view(self, order.data(), order.size());
                   })
      .def_prop_ro("nodes", [](nb::handle_t<SharedPrefixTree> self) {
        static_assert(sizeof(PrefixNode) == 5 * sizeof(int32_t));
        const auto& nodes = nb::cast<const SharedPrefixTree&>(self).nodes();
        return view(self, nodes.data(), nodes.size(), 5);
      });
}

void bind_plan(nb::module_& m) {
  using plan::AttentionPlan;
  using plan::PlanTarget;
  nb::class_<PlanTarget>(m, "PlanTarget", "What the planner knows of a machine.")
      .def(nb::init<int, int, int, int, int, int, int, int, int, int, int, bool>(), "slots"_a,
           "tile_rows"_a, "rows_per_token"_a, "min_chunk_tokens"_a, "tile_overhead"_a,
           "max_waves"_a, "invariant_chunk_tokens"_a, "small_rows"_a = 0, "large_slots"_a = 0,
           "mixed_rows"_a = 0, "max_cluster"_a = 0, "takes_turns"_a = false)
      .def_ro("slots", &PlanTarget::slots)
      .def_ro("tile_rows", &PlanTarget::tile_rows)
      .def_ro("rows_per_token", &PlanTarget::rows_per_token)
      .def_ro("min_chunk_tokens", &PlanTarget::min_chunk_tokens)
      .def_ro("tile_overhead", &PlanTarget::tile_overhead)
      .def_ro("max_waves", &PlanTarget::max_waves)
      .def_ro("invariant_chunk_tokens", &PlanTarget::invariant_chunk_tokens)
      .def_ro("small_rows", &PlanTarget::small_rows)
      .def_ro("large_slots", &PlanTarget::large_slots)
      .def_ro("mixed_rows", &PlanTarget::mixed_rows)
      .def_ro("max_cluster", &PlanTarget::max_cluster)
      .def_ro("takes_turns", &PlanTarget::takes_turns);
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
      .def_prop_ro("token_order",
                   [](nb::handle_t<AttentionPlan> self) {
                     const auto& p = nb::cast<const AttentionPlan&>(self);
                     return view(self, p.token_order.data(), p.token_order.size());
                   })
      .def_ro("num_members", &AttentionPlan::num_members)
      .def_ro("num_levels", &AttentionPlan::num_levels)
      .def_ro("shared_pages", &AttentionPlan::shared_pages)
      .def_ro("shared_chunks", &AttentionPlan::shared_chunks)
      .def_ro("num_partials", &AttentionPlan::num_partials)
      .def_ro("num_groups", &AttentionPlan::num_groups)
      .def_ro("max_q_len", &AttentionPlan::max_q_len)
      .def_ro("num_large", &AttentionPlan::num_large)
      .def_ro("max_chunks", &AttentionPlan::max_chunks)
      .def_ro("chunks_each", &AttentionPlan::chunks_each)
      .def_ro("chunk_tokens", &AttentionPlan::chunk_tokens);
  m.def("plan_attention", &make_plan, "kv_indptr"_a, "qo_indptr"_a.none(), "page_size"_a,
        "num_kv_heads"_a, "group_size"_a, "window_left"_a, "causal"_a, "batch_invariant"_a,
        "partial"_a, "target"_a, "tree"_a.none() = nb::none(), "costs"_a.none() = nb::none(),
        "floors"_a.none() = nb::none(), "Plan a launch; see mlxcel_ext.plan_attention.");
}

}  // namespace

void bind_attention(nb::module_& m) {
  bind_plan(m);
  bind_cascade(m);
  nb::class_<AttentionTable>(m, "AttentionTable", "Device arrays of a page table.")
      .def(nb::init<mx::array, mx::array, mx::array, std::optional<mx::array>,
                    std::optional<mx::array>>(),
           "kv_indptr"_a, "kv_indices"_a, "kv_last_page_len"_a, "qo_indptr"_a.none(),
           "first_page_offset"_a.none());
  nb::class_<AttentionTiles>(m, "AttentionTiles", "Device arrays of a plan.")
      .def(nb::init<mx::array, mx::array, std::optional<mx::array>, int, bool, int, int, int>(),
           "tiles"_a, "merge_indptr"_a, "token_order"_a.none(), "num_partials"_a,
           "batch_invariant"_a, "max_q_len"_a, "chunks_each"_a, "num_large"_a);
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

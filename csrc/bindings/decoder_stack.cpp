#include "ops/decoder_stack.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxcel {

void bind_decoder_stack(nb::module_& m) {
  nb::class_<StackLinear>(m, "StackLinear", "A linear layer of a DecoderStack.")
      .def(nb::init<Arrays, PackedLinear, std::optional<mx::array>, bool>(), "arrays"_a, "layout"_a,
           "bias"_a.none(), "packed"_a);
  using Parts = std::vector<StackLinear>;
  nb::class_<DecoderLayer>(m, "DecoderLayer", "Weights of one layer of a llama-like decoder.")
      .def(nb::init<Parts, Parts, Parts, Parts, mx::array, mx::array, std::optional<mx::array>,
                    std::optional<mx::array>, int>(),
           nb::kw_only(), "qkv"_a, "output"_a, "gate_up"_a, "down"_a, "input_norm"_a, "post_norm"_a,
           "q_norm"_a.none(), "k_norm"_a.none(), "window_left"_a);
  nb::class_<DecoderShape>(m, "DecoderShape", "What the layers of a decoder have in common.")
      .def(nb::init<int, int, int, float, float>(), nb::kw_only(), "num_qo_heads"_a,
           "num_kv_heads"_a, "head_dim"_a, "norm_eps"_a, "rope_scale"_a);
  nb::class_<DecoderStack>(m, "DecoderStack",
                           "All layers of a llama-like decoder as one primitive.")
      .def(nb::init<std::vector<DecoderLayer>, const mx::array&, const mx::array&,
                    const DecoderShape&>(),
           "layers"_a, "final_norm"_a, "inv_freq"_a, "shape"_a)
      .def("runs_on_gpu", &DecoderStack::runs_on_gpu, "tokens"_a,
           "Whether a GPU has kernels for steps of so many tokens, all of which have logits.")
      .def("__call__", &DecoderStack::operator(), "hidden"_a, "k_pages"_a, "v_pages"_a, "slots"_a,
           "positions"_a, "table"_a, "tiles"_a, "logit_rows"_a.none(), nb::kw_only(),
           "kv_layout"_a = "NHD", "stream"_a = nb::none(),
           nb::sig("def __call__(self, hidden: mlx.core.array, k_pages: list[mlx.core.array], "
                   "v_pages: list[mlx.core.array], slots: mlx.core.array, positions: "
                   "mlx.core.array, table: AttentionTable, tiles: AttentionTiles, logit_rows: "
                   "mlx.core.array | None, *, kv_layout: str = 'NHD', stream: "
                   "mlx.core.StreamOrDevice = None) -> "
                   "list[mlx.core.array]"));
}

}  // namespace mlxcel

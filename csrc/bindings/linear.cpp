#include "ops/linear.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>

#include "bindings/bindings.h"
#include "ops/swiglu.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxcel {

void bind_linear(nb::module_& m) {
  m.def("linear", &linear, "x"_a, "weight"_a, "bias"_a = nb::none(), nb::kw_only(),
        "stream"_a = nb::none(),
        nb::sig("def linear(x: mlx.core.array, weight: mlx.core.array, bias: mlx.core.array | None "
                "= None, *, stream: mlx.core.StreamOrDevice = None) -> mlx.core.array"),
        "Linear layer with dense weights on CPU; see mlxcel_ext.linear.");
  m.def("quantized_linear", &quantized_linear, "x"_a, "weight"_a, "scales"_a, "biases"_a,
        "bias"_a = nb::none(), "group_size"_a = 64, "bits"_a = 4, nb::kw_only(),
        "stream"_a = nb::none(),
        nb::sig("def quantized_linear(x: mlx.core.array, weight: mlx.core.array, scales: "
                "mlx.core.array, biases: mlx.core.array, bias: mlx.core.array | None = None, "
                "group_size: int = 64, bits: int = 4, *, stream: mlx.core.StreamOrDevice = None) "
                "-> mlx.core.array"),
        "Linear layer with affine quantized weights on CPU; see mlxcel_ext.quantized_linear.");
  m.def("swiglu", &swiglu, "gate"_a, "up"_a = nb::none(), nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def swiglu(gate: mlx.core.array, up: mlx.core.array | None = None, *, stream: "
                "mlx.core.StreamOrDevice = None) -> mlx.core.array"),
        "silu(gate) * up on CPU; see mlxcel_ext.swiglu.");
}

}  // namespace mlxcel

#include "ops/linear.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

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
  nb::class_<PackedLinear>(m, "PackedLinear", "Layout of a packed weight.")
      .def(nb::init<int, int, std::string, int>(), "out_features"_a, "in_features"_a, "format"_a,
           "group_size"_a)
      .def_ro("out_features", &PackedLinear::out_features)
      .def_ro("in_features", &PackedLinear::in_features)
      .def_ro("format", &PackedLinear::format)
      .def_ro("group_size", &PackedLinear::group_size);
  m.def("pack_linear", &pack_linear, "weight"_a, "scales"_a = nb::none(), "biases"_a = nb::none(),
        "group_size"_a = 0, "bits"_a = 0, nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def pack_linear(weight: mlx.core.array, scales: mlx.core.array | None = None, "
                "biases: mlx.core.array | None = None, group_size: int = 0, bits: int = 0, *, "
                "stream: mlx.core.StreamOrDevice = None) -> list[mlx.core.array]"),
        "A weight in the layout of the CPU kernels; see mlxcel_ext.ops.linear.PackedWeight.");
  m.def("packed_linear", &packed_linear, "x"_a, "packed"_a, "layout"_a, "bias"_a = nb::none(),
        nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def packed_linear(x: mlx.core.array, packed: list[mlx.core.array], layout: "
                "PackedLinear, bias: mlx.core.array | None = None, *, stream: "
                "mlx.core.StreamOrDevice = None) -> mlx.core.array"),
        "Linear layer with a packed weight; see mlxcel_ext.ops.linear.PackedWeight.");
  m.def("packed_rows", &packed_rows, "ids"_a, "packed"_a, "layout"_a, "dtype"_a, nb::kw_only(),
        "stream"_a = nb::none(),
        nb::sig("def packed_rows(ids: mlx.core.array, packed: list[mlx.core.array], layout: "
                "PackedLinear, dtype: mlx.core.Dtype, *, stream: mlx.core.StreamOrDevice = None) "
                "-> mlx.core.array"),
        "Rows of a packed weight; see mlxcel_ext.ops.linear.PackedWeight.");
  m.def("swiglu", &swiglu, "gate"_a, "up"_a = nb::none(), nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def swiglu(gate: mlx.core.array, up: mlx.core.array | None = None, *, stream: "
                "mlx.core.StreamOrDevice = None) -> mlx.core.array"),
        "silu(gate) * up on CPU; see mlxcel_ext.swiglu.");
}

}  // namespace mlxcel

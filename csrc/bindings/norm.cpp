#include <nanobind/stl/pair.h>
#include <nanobind/stl/variant.h>

#include "bindings/bindings.h"
#include "ops/add_rms_norm.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxcel {

void bind_norm(nb::module_& m) {
  m.def("add_rms_norm", &add_rms_norm, "x"_a, "residual"_a, "weight"_a, "eps"_a,
        "weight_bias"_a = 0.0f, nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def add_rms_norm(x: mlx.core.array, residual: mlx.core.array, weight: "
                "mlx.core.array, eps: float, weight_bias: float = 0.0, *, stream: "
                "mlx.core.StreamOrDevice = None) -> tuple[mlx.core.array, mlx.core.array]"),
        "Residual addition and RMS normalisation; see mlxcel_ext.add_rms_norm.");
}

}  // namespace mlxcel

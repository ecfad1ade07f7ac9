#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "ops/sample.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxcel {

void bind_sampling(nb::module_& m) {
  nb::enum_<SampleWork>(m, "SampleWork", "The most that any row of a launch asks for.")
      .value("greedy", SampleWork::greedy)
      .value("temperature", SampleWork::temperature)
      .value("filters", SampleWork::filters);
  m.def("sample", &sample, "logits"_a, "rows"_a, "work"_a, "joint"_a, "temperature_last"_a,
        nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def sample(logits: mlx.core.array, rows: mlx.core.array, work: SampleWork, "
                "joint: bool, temperature_last: bool, *, stream: mlx.core.StreamOrDevice = None) "
                "-> list[mlx.core.array]"),
        "One token a row; see mlxcel_ext.sample.");
}

}  // namespace mlxcel

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include "bindings/bindings.h"
#include "ops/rope_append.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxcel {

void bind_kvcache(nb::module_& m) {
  m.def(
      "rope_append", &rope_append, "q"_a, "k"_a, "v"_a, "k_pages"_a, "v_pages"_a, "slots"_a,
      "positions"_a, "inv_freq"_a, "interleaved"_a = false, "scale"_a = 1.0f, "kv_layout"_a = "NHD",
      nb::kw_only(), "stream"_a = nb::none(),
      nb::sig("def rope_append(q: mlx.core.array, k: mlx.core.array, v: mlx.core.array, k_pages: "
              "mlx.core.array, v_pages: mlx.core.array, slots: mlx.core.array, positions: "
              "mlx.core.array, inv_freq: mlx.core.array, interleaved: bool = False, scale: float = "
              "1.0, kv_layout: str = 'NHD', *, stream: mlx.core.StreamOrDevice = None) -> "
              "tuple[mlx.core.array, mlx.core.array, mlx.core.array]"),
      "RoPE and KV append; see mlxcel_ext.rope_append.");
  m.def(
      "buffer_address",
      [](const mx::array& a) {
        return reinterpret_cast<uintptr_t>(a.data_shared_ptr() ? a.buffer().ptr() : nullptr);
      },
      "array"_a, "Identity of an evaluated array's buffer (0 before evaluation), for tests.");
}

}  // namespace mlxcel

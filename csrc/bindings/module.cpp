#include <nanobind/nanobind.h>

#include "bindings/bindings.h"
#include "mlx/array.h"
#include "mlx/version.h"

namespace nb = nanobind;

NB_MODULE(_ext, m) {
  nb::module_::import_("mlx.core");  // registers mx.array and its casters
  if (!nb::type<mlx::core::array>().is_valid()) {
    throw nb::import_error(
        "mlxcel_ext was built with another nanobind ABI than mlx.core. Reinstall both: "
        "pip install --force-reinstall --no-cache-dir mlxcel-ext");
  }
  m.attr("MLX_BUILD_VERSION") = MLX_VERSION_NUMERIC;
  mlxcel::bind_runtime(m);
  mlxcel::bind_linear(m);
  mlxcel::bind_norm(m);
  mlxcel::bind_attention(m);
  mlxcel::bind_kvcache(m);
  mlxcel::bind_sampling(m);
  mlxcel::bind_decoder_stack(m);
}

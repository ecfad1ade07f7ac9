#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <nanobind/stl/vector.h>
#include <memory>

#include <cstring>

#include "backend.h"
#include "bindings/bindings.h"
#include "common/cpu_features.h"
#include "common/huge_pages.h"
#include "common/parallel.h"
#include "mlx/allocator.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxcel {

namespace {

mx::array to_device(const nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>& host) {
  mx::Shape shape;
  for (size_t i = 0; i < host.ndim(); ++i) shape.push_back(static_cast<int>(host.shape(i)));
  const auto make = [&](auto zero, mx::Dtype dtype) {
    const auto* data = static_cast<const decltype(zero)*>(host.data());
    const mx::Device device = mx::default_device();
    if (device == mx::Device::gpu && gpu_backend() != nullptr && gpu_backend()->upload != nullptr &&
        host.size() > 0) {
      return gpu_backend()->upload(data, shape, dtype, mx::default_stream(device));
    }
    return mx::array(data, shape, dtype);
  };
  if (host.dtype() == nb::dtype<int32_t>()) return make(int32_t{}, mx::int32);
  if (host.dtype() == nb::dtype<uint32_t>()) return make(uint32_t{}, mx::uint32);
  if (host.dtype() == nb::dtype<float>()) return make(float{}, mx::float32);
  throw std::invalid_argument("[to_device] host must be int32, uint32 or float32.");
}

/// A list of what the array holds.
nb::object to_list(mx::array& a) {
  {
    nb::gil_scoped_release release;
    a.eval();
  }
  const GpuBackend* backend = gpu_backend();
  const bool copies = backend != nullptr && backend->download != nullptr &&
                      a.flags().row_contiguous && a.ndim() == 1 && a.size() > 0 &&
                      (a.dtype() == mx::int32 || a.dtype() == mx::bool_);
  if (!copies) return nb::cast(a).attr("tolist")();
  nb::list out;
  const auto fill = [&](auto zero) {
    const auto values = std::make_unique<decltype(zero)[]>(a.size());
    backend->download(a, values.get());
    for (size_t i = 0; i < a.size(); ++i) out.append(nb::cast(values[i]));
  };
  if (a.dtype() == mx::int32)
    fill(int32_t{});
  else
    fill(bool{});
  return out;
}

}  // namespace

void bind_runtime(nb::module_& m) {
  m.def("load_gpu_backend", &load_gpu_backend, "path"_a, "Load a GPU backend library.");
  m.def("to_device", &to_device, "host"_a,
        "mx.array of int32, uint32 or float32 data; in device memory where the GPU backend asks.");
  m.def("to_list", &to_list, "array"_a,
        "array.tolist(); a GPU backend copies the ids and flags of a step instead of moving them.");
  m.def("set_gpu_backend_missing", &set_gpu_backend_missing, "reason"_a,
        "Record why there is no GPU backend.");
  m.def(
      "gpu_backend_name", [] { return std::string(gpu_backend() ? gpu_backend()->name : ""); },
      "Name of the GPU backend in use, or an empty string.");
  m.def(
      "throw_no_gpu_backend", [](const std::string& op) { throw_no_gpu_backend(op.c_str()); },
      "op"_a, "Raise what evaluating an op raises on a GPU that lacks its kernel; for tests.");
  m.def("num_threads", &num_threads, "Threads of the CPU kernels.");
  m.def("set_num_threads", &set_num_threads, "n"_a, "Set the threads of the CPU kernels (1..64).");
  m.def(
      "collapse_into_huge_pages",
      [](const Arrays& arrays) {
        std::vector<MemoryRange> ranges;
        for (mx::array a : arrays) ranges.push_back({a.data<void>(), a.nbytes()});
        collapse_into_huge_pages(ranges);
      },
      "arrays"_a, "See mlxcel_ext.ops.memory; the arrays are evaluated ones of the CPU.");
  m.def(
      "zeros_in_huge_pages",
      [](const std::vector<int>& shape, mx::Dtype dtype) {
        mx::array a(mx::Shape(shape.begin(), shape.end()), dtype, nullptr, {});
        a.set_data(mx::allocator::malloc(a.nbytes()));
        const MemoryRange range{a.data<void>(), a.nbytes()};
        prefer_huge_pages(range);
        if (mx::is_available(mx::Device::gpu)) {  // then MLX's memory may not come from malloc
          std::memset(range.begin, 0, range.bytes);
        } else {
          zero_lazily(range);
        }
        a.set_status(mx::array::Status::available);
        return a;
      },
      "shape"_a, "dtype"_a, "See mlxcel_ext.ops.memory.");
  m.def(
      "cpu_features",
      [] {
        nb::dict d;
        d["avx2"] = cpu_features().avx2;
        d["avx512"] = cpu_features().avx512;
        d["neon"] = cpu_features().neon;
        return d;
      },
      "Instruction sets that the CPU kernels may use here.");
}

}  // namespace mlxcel

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

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

void bind_runtime(nb::module_& m) {
  m.def("load_gpu_backend", &load_gpu_backend, "path"_a, "Load a GPU backend library.");
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
        for (const mx::array& a : arrays) ranges.push_back({a.data<void>(), a.nbytes()});
        collapse_into_huge_pages(ranges);
      },
      "arrays"_a, "See mlxcel_ext.ops.memory; the arrays are evaluated ones of the CPU.");
  m.def(
      "zeros_in_huge_pages",
      [](const std::vector<int>& shape, mx::Dtype dtype) {
        mx::array a(mx::Shape(shape.begin(), shape.end()), dtype, nullptr, {});
        a.set_data(mx::allocator::malloc(a.nbytes()));
        prefer_huge_pages({a.data<void>(), a.nbytes()});
        std::memset(a.data<void>(), 0, a.nbytes());
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

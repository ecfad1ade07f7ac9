#include "library.h"

#ifdef MLXCEL_METALLIB
#include <dlfcn.h>

#include <filesystem>
#endif

#include <algorithm>

#include "mlx/allocator.h"

namespace mlxcel::metal {
namespace {

struct TypeNames {
  const char* msl;
  const char* name;
};

TypeNames type_names(FloatType type) {
  switch (type) {
    case FloatType::f32:
      return {"float", "f32"};
    case FloatType::f16:
      return {"half", "f16"};
    case FloatType::bf16:
      return {"bfloat", "bf16"};
  }
  throw std::invalid_argument("unknown FloatType");
}

#ifdef MLXCEL_METALLIB
/// The folder of this module, where the metallib was installed.
std::string module_folder() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&module_folder), &info) == 0) return "";
  return std::filesystem::path(info.dli_fname).parent_path().string();
}

MTL::Library* library(mx::metal::Device& device, const KernelSource&, const std::string&,
                      const std::string&) {
  return device.get_library("mlxcel_ext", module_folder());
}
#else
// One library an instance: only what runs is compiled, some tens of instances of hundreds.
MTL::Library* library(mx::metal::Device& device, const KernelSource& source,
                      const std::string& name, const std::string& instance) {
  const std::string key = std::string("mlxcel_") + source.hash + "_" + name;
  return device.get_library(key, [&] {
    if (instance.empty()) return std::string(source.text);
    return std::string(source.text) + "\ntemplate [[host_name(\"" + name +
           "\")]] [[kernel]] decltype(" + instance + ") " + instance + ";\n";
  });
}
#endif

}  // namespace

TemplateArgument::TemplateArgument(FloatType type)
    : msl(type_names(type).msl), name(type_names(type).name) {}

TemplateArgument::TemplateArgument(int value)
    : msl(std::to_string(value)), name(std::to_string(value)) {}

MTL::ComputePipelineState* kernel(const mx::Stream& stream, const KernelSource& source,
                                  const std::string& function,
                                  const std::vector<TemplateArgument>& arguments,
                                  const std::vector<bool>& flags) {
  std::string name = function;
  std::string instance;
  for (const TemplateArgument& argument : arguments) {
    name += "_" + argument.name;
    instance += (instance.empty() ? "mlxcel::" + function + "<" : ", ") + argument.msl;
  }
  if (!arguments.empty()) instance += ">";

  // MLX caches pipelines by this name: without the flags in it, the first specialisation would
  // serve all.
  std::string specialised = name;
  if (!flags.empty()) specialised += "_";
  mx::metal::MTLFCList constants;
  static constexpr bool kValues[] = {false, true};  // the list holds pointers
  for (size_t i = 0; i < flags.size(); ++i) {
    specialised += flags[i] ? '1' : '0';
    constants.emplace_back(&kValues[flags[i]], MTL::DataTypeBool, i);
  }
  auto& device = mx::metal::device(stream.device);
  return device.get_kernel(name, library(device, source, name, instance), specialised, constants);
}

void allocate(mx::array& out) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
}

mx::array workspace(mx::Shape shape, mx::Dtype dtype, const mx::Stream& stream) {
  for (auto& n : shape) n = std::max(n, 1);
  mx::array a(std::move(shape), dtype, nullptr, {});
  allocate(a);
  mx::metal::get_command_encoder(stream).add_temporary(a);
  return a;
}

size_t threadgroup_size(const MTL::ComputePipelineState* kernel, size_t items) {
  const size_t most = kernel->maxTotalThreadsPerThreadgroup() / kSimdWidth * kSimdWidth;
  return std::clamp(ceil_div(items, kSimdWidth) * kSimdWidth, kSimdWidth, most);
}

size_t row_threads(const MTL::ComputePipelineState* kernel, int vocab) {
  constexpr int kMostRowThreads = 512;  // as in kernels/sample_select.h
  return threadgroup_size(kernel, std::min(vocab, kMostRowThreads));
}

}  // namespace mlxcel::metal

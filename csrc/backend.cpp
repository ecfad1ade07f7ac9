#include "backend.h"

#include <dlfcn.h>

#include <stdexcept>

namespace mlxcel {
namespace {

const GpuBackend* current = nullptr;
std::string missing_reason = "no GPU backend was loaded";

}  // namespace

const GpuBackend* gpu_backend() {
  return current;
}

void load_gpu_backend(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  auto entry = reinterpret_cast<const GpuBackend* (*)()>(dlsym(library, "mlxcel_gpu_backend"));
  if (entry == nullptr) throw std::runtime_error(path + " does not export mlxcel_gpu_backend");
  current = entry();
}

void use_gpu_backend(const GpuBackend* backend) {
  current = backend;
}

void set_gpu_backend_missing(const std::string& reason) {
  missing_reason = reason;
}

void throw_no_gpu_backend(const char* op) {
  if (current != nullptr) {
    throw std::runtime_error(std::string("[") + op + "] has no " + current->name +
                             " kernel; run it with stream=mx.cpu.");
  }
  throw std::runtime_error(std::string("[") + op + "] cannot run on the GPU: " + missing_reason +
                           ". Run it with stream=mx.cpu, or install the GPU backend "
                           "(`python -m mlxcel_ext info` says what is missing).");
}

}  // namespace mlxcel

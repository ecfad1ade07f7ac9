// A stand-in for metal-cpp: the types that mlx/backend/metal/device.h and our host code touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace NS {

using UInteger = std::size_t;
struct AutoreleasePool {};

/// Never frees: a test process holds few objects.
template <class T>
class SharedPtr {
 public:
  SharedPtr() = default;
  explicit SharedPtr(T* p) : p_(p) {}
  T* get() const { return p_; }
  T* operator->() const { return p_; }
  explicit operator bool() const { return p_ != nullptr; }

 private:
  T* p_ = nullptr;
};

template <class T>
SharedPtr<T> TransferPtr(T* p) {
  return SharedPtr<T>(p);
}

}  // namespace NS

namespace MTL {

struct Size {
  Size() = default;
  Size(NS::UInteger w, NS::UInteger h, NS::UInteger d) : width(w), height(h), depth(d) {}
  NS::UInteger width = 0, height = 0, depth = 0;
};

enum DataType : NS::UInteger {
  DataTypeFloat = 3,
  DataTypeInt = 29,
  DataTypeUInt = 33,
  DataTypeBool = 53
};

struct Resource {};
struct Allocation {};
struct Buffer : Resource {};
struct Device {};
struct Fence {};
struct Event {};
struct SharedEvent {};
struct CommandQueue {};
struct CommandBuffer {};
struct Function {};
struct LinkedFunctions {};
struct ResidencySet {};

struct Library {
  void* handle;
  std::string kernels;  // the table that build.py wrote
};

struct ComputePipelineState {
  std::string name;
  void* function = nullptr;
  std::vector<int> buffers;                         // that the kernel takes
  std::vector<std::pair<int, uint64_t>> constants;  // function constants by index
  NS::UInteger max_threads = 1024;

  NS::UInteger maxTotalThreadsPerThreadgroup() const { return max_threads; }
  NS::UInteger threadExecutionWidth() const { return 32; }
};

struct Binding {
  enum class Kind { kNone, kBytes, kInput, kOutput, kInOut };
  Kind kind = Kind::kNone;
  std::string bytes;  // of setBytes
  char* address = nullptr;
  std::size_t size = 0;
  char* allocation = nullptr;  // where the array's buffer begins
};

/// The state that Metal keeps from one dispatch to the next.
struct ComputeCommandEncoder {
  static constexpr int kBuffers = 31;
  ComputePipelineState* pipeline = nullptr;
  Binding bindings[kBuffers];
  NS::UInteger threadgroup_memory[kBuffers] = {};

  void setComputePipelineState(ComputePipelineState* p) { pipeline = p; }
  void setBytes(const void* p, NS::UInteger n, NS::UInteger i) {
    bindings[i] = {Binding::Kind::kBytes, std::string(static_cast<const char*>(p), n), nullptr, n,
                   nullptr};
  }
  void setThreadgroupMemoryLength(NS::UInteger n, NS::UInteger i) { threadgroup_memory[i] = n; }
};

}  // namespace MTL

#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace mlxcel::cuda {

inline void check(const char* what, cudaError_t status) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("[cuda] ") + what +
                             " failed: " + cudaGetErrorString(status));
  }
}
#define MLXCEL_CUDA_CHECK(call) ::mlxcel::cuda::check(#call, (call))

/// Properties of a device that launchers decide by.
struct DeviceInfo {
  int num_sms;
  int arch;              // 10 * major + minor
  int max_cluster;       // blocks of a cluster; 1: there are none, or MLXCEL_EXT_FORCE=sample:block
  int max_shared_bytes;  // that a block may ask for
  int l2_bytes;
};

/// Of the current device, read once.
const DeviceInfo& device_info();

/// What MLXCEL_EXT_FORCE=<op>:<kernel>,... asks for, or an empty string.
std::string forced_kernel(const std::string& op);

/// Where a launcher sends its kernels: a stream, or the graph that MLX is building. Launchers are
/// plain functions over pointers and params, so that larger primitives can call them in a row.
class Launch {
 public:
  virtual ~Launch() = default;

  /// Enqueues kernel<<<grid, block, shared_bytes>>>(args...). Arguments are converted to the
  /// kernel's parameter types.
  template <class... Params, class... Args>
  void operator()(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                  Args&&... args) {
    in_clusters(0, kernel, grid, block, shared_bytes, std::forward<Args>(args)...);
  }

  /// The same in clusters of `cluster` neighbouring blocks; 0: as the kernel is declared.
  template <class... Params, class... Args>
  void in_clusters(int cluster, void (*kernel)(Params...), dim3 grid, dim3 block,
                   size_t shared_bytes, Args&&... args) {
    static_assert(sizeof...(Params) == sizeof...(Args));
    std::tuple<Params...> values(std::forward<Args>(args)...);
    std::apply(
        [&](auto&... value) {
          void* pointers[] = {const_cast<void*>(static_cast<const void*>(&value))...};
          submit(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, cluster,
                 pointers);
        },
        values);
  }

 protected:
  virtual void submit(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, int cluster,
                      void** params) = 0;
};

/// Raises the kernel's limit of dynamic shared memory where it needs more than the default 48 KB.
void allow_shared_bytes(const void* kernel, size_t shared_bytes);

/// Lets a kernel that is not declared for it have clusters of more than 8 blocks.
void allow_large_clusters(const void* kernel);

/// Clusters of that size that the device holds at once; 0: it cannot run them.
int resident_clusters(const void* kernel, int cluster, int threads, size_t shared_bytes);

/// Launches on a stream at once.
class StreamLaunch final : public Launch {
 public:
  explicit StreamLaunch(cudaStream_t stream) : stream_(stream) {}

 protected:
  void submit(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, int cluster,
              void** params) override;

 private:
  cudaStream_t stream_;
};

}  // namespace mlxcel::cuda

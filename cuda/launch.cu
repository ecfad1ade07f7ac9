#include "launch.h"

#include <mutex>
#include <unordered_map>

namespace mlxcel::cuda {

const DeviceInfo& device_info() {
  thread_local std::unordered_map<int, DeviceInfo> known;
  int device = 0;
  MLXCEL_CUDA_CHECK(cudaGetDevice(&device));
  auto [it, is_new] = known.try_emplace(device);
  if (is_new) {
    auto attribute = [device](cudaDeviceAttr which) {
      int value = 0;
      MLXCEL_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
      return value;
    };
    it->second = {attribute(cudaDevAttrMultiProcessorCount),
                  10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                      attribute(cudaDevAttrComputeCapabilityMinor),
                  attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                  attribute(cudaDevAttrL2CacheSize)};
  }
  return it->second;
}

void allow_shared_bytes(const void* kernel, size_t shared_bytes) {
  constexpr size_t kDefaultLimit = 48 << 10;
  if (shared_bytes <= kDefaultLimit) return;
  static std::mutex mutex;
  static std::unordered_map<const void*, size_t> limits;
  std::lock_guard lock(mutex);
  size_t& limit = limits[kernel];
  if (shared_bytes <= limit) return;
  MLXCEL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(shared_bytes)));
  limit = shared_bytes;
}

}  // namespace mlxcel::cuda

#include "launch.h"

#include <cstdlib>
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
    const int arch = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                     attribute(cudaDevAttrComputeCapabilityMinor);
    // More than 8 are there on data centre GPUs alone, where a kernel allows it.
    int max_cluster = arch < 90 ? 1 : arch < 110 ? 16 : 8;
    if (const std::string forced = forced_kernel("sample"); forced == "block") {
      max_cluster = 1;
    } else if (!forced.empty()) {
      throw std::runtime_error("[sample] MLXCEL_EXT_FORCE asks for '" + forced +
                               "'; 'block' is all there is.");
    }
    it->second = {attribute(cudaDevAttrMultiProcessorCount), arch, max_cluster,
                  attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                  attribute(cudaDevAttrL2CacheSize)};
  }
  return it->second;
}

std::string forced_kernel(const std::string& op) {
  const char* text = std::getenv("MLXCEL_EXT_FORCE");
  const std::string all = text == nullptr ? "" : text, key = op + ":";
  const size_t at = all.find(key);
  if (at == std::string::npos) return "";
  const size_t begin = at + key.size();
  return all.substr(begin, all.find(',', begin) - begin);
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

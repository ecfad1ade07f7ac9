#include "launch.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>

namespace mlxcel::cuda {

namespace {

/// Configuration of a launch, in clusters where `cluster` is above 0.
struct ClusterLaunch {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  ClusterLaunch(int cluster, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = cluster > 0 ? 1 : 0;
  }
};

}  // namespace

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

void allow_large_clusters(const void* kernel) {
  MLXCEL_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
}

int resident_clusters(const void* kernel, int cluster, int threads, size_t shared_bytes) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, int, size_t>, int> known;
  std::lock_guard lock(mutex);
  auto [it, is_new] = known.try_emplace({kernel, cluster, threads, shared_bytes});
  if (is_new) {
    allow_shared_bytes(kernel, shared_bytes);
    if (cluster > 8) allow_large_clusters(kernel);
    ClusterLaunch launch(cluster, static_cast<unsigned>(cluster), static_cast<unsigned>(threads),
                         shared_bytes, nullptr);
    // What the device cannot run is an error of the query, which says 0.
    if (cudaOccupancyMaxActiveClusters(&it->second, kernel, &launch.config) != cudaSuccess) {
      cudaGetLastError();
      it->second = 0;
    }
  }
  return it->second;
}

void StreamLaunch::submit(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes,
                          int cluster, void** params) {
  allow_shared_bytes(kernel, shared_bytes);
  ClusterLaunch launch(cluster, grid, block, shared_bytes, stream_);
  MLXCEL_CUDA_CHECK(cudaLaunchKernelExC(&launch.config, kernel, params));
}

}  // namespace mlxcel::cuda

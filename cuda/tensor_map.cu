#include "tensor_map.h"

#include <algorithm>
#include <string>

#include "launch.h"

namespace mlxcel::cuda {

CUtensorMap pool_map(const PagedAttentionParams& params, const void* pool) {
  // By the runtime, so that the library does not link to the driver.
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    MLXCEL_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                       cudaEnableDefault, &found));
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  constexpr int kBytes = 2;
  // Page ids are checked by the page table; the pool's own count is not known here.
  const cuuint64_t size[] = {static_cast<cuuint64_t>(params.head_dim),
                             static_cast<cuuint64_t>(params.page_size),
                             static_cast<cuuint64_t>(params.num_kv_heads), cuuint64_t{1} << 31};
  const cuuint64_t stride[] = {static_cast<cuuint64_t>(params.stride_token) * kBytes,
                               static_cast<cuuint64_t>(params.stride_head) * kBytes,
                               static_cast<cuuint64_t>(params.stride_page) * kBytes};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(std::min(params.page_size, 64)), 1, 1};
  const cuuint32_t step[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(pool), size, stride, box,
             step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("[cuda] cuTensorMapEncodeTiled failed: error " +
                             std::to_string(static_cast<int>(status)) + ".");
  }
  return map;
}

}  // namespace mlxcel::cuda

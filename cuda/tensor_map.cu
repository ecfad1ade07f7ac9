#include "tensor_map.h"

#include <algorithm>
#include <string>

#include "launch.h"

namespace mlxcel::cuda {

CUtensorMap pool_map(const PagedAttentionParams& params, const void* pool,
                     CUtensorMapL2promotion promotion) {
  // By the runtime, so that the library does not link to the driver.
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    MLXCEL_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                       cudaEnableDefault, &found));
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  constexpr cuuint64_t kBytes = 2;
  const auto token = static_cast<cuuint64_t>(params.stride_token) * kBytes;
  const auto head = static_cast<cuuint64_t>(params.stride_head) * kBytes;
  const auto blocks = static_cast<cuuint32_t>(params.head_dim / 64);  // of 64 columns
  const auto groups = static_cast<cuuint32_t>(std::min(params.page_size, 16) / 8);
  // Page ids are checked by the page table; the pool's own count is not known here.
  const cuuint64_t size[] = {64, 8, blocks, static_cast<cuuint64_t>(params.num_kv_heads),
                             cuuint64_t{1} << 31};
  const cuuint64_t stride[] = {token, 64 * kBytes, head, 8 * token};
  const cuuint32_t box[] = {64, 8, blocks, 1, groups};
  const cuuint32_t step[] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 5, const_cast<void*>(pool), size, stride, box,
             step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("[cuda] cuTensorMapEncodeTiled failed: error " +
                             std::to_string(static_cast<int>(status)) + ".");
  }
  return map;
}

}  // namespace mlxcel::cuda

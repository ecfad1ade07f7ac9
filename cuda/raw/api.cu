// The kernels alone behind a C interface, for timing and checking them without MLX
// (benchmarks/cuda_raw.py). Built with -DMLXCEL_CUDA_RAW_API=ON.

#include <cstdio>
#include <exception>

#include "launchers.h"

namespace {

using namespace mlxcel;
using namespace mlxcel::cuda;

/// Runs f with a launch on the stream; 0, or 1 with the reason on stderr.
template <class F>
int on_stream(void* stream, F&& f) {
  try {
    StreamLaunch launch(static_cast<cudaStream_t>(stream));
    f(launch);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

__global__ void empty_kernel() {}

}  // namespace

#define MLXCEL_RAW extern "C" __attribute__((visibility("default")))

MLXCEL_RAW int mlxcel_raw_empty(void* stream) {
  return on_stream(stream, [&](Launch& launch) { launch(empty_kernel, 1, 32, 0); });
}

MLXCEL_RAW int mlxcel_raw_add_rms_norm(const AddRmsNormParams* params, const void* x,
                                       const void* residual, const void* weight, void* normed,
                                       void* new_residual, void* stream) {
  return on_stream(stream, [&](Launch& launch) {
    launch_add_rms_norm(*params, x, residual, weight, normed, new_residual, launch);
  });
}

MLXCEL_RAW int mlxcel_raw_rope_append(const RopeAppendParams* params, const void* q, const void* k,
                                      const void* v, const int32_t* slots, const int32_t* positions,
                                      const float* inv_freq, void* q_rot, void* k_pages,
                                      void* v_pages, void* stream) {
  return on_stream(stream, [&](Launch& launch) {
    const int64_t dim = params->head_dim;
    launch_rope_append(*params,
                       {q, k, v, params->num_qo_heads * dim, params->num_kv_heads * dim, slots,
                        positions, inv_freq, q_rot, k_pages, v_pages},
                       launch);
  });
}

MLXCEL_RAW int mlxcel_raw_merge_states(const MergeStatesParams* params, const void* v_in,
                                       const float* lse_in, const int32_t* o_indptr, void* v_out,
                                       float* lse_out, void* stream) {
  return on_stream(stream, [&](Launch& launch) {
    launch_merge_states(*params, v_in, lse_in, o_indptr, v_out, lse_out, launch);
  });
}

MLXCEL_RAW int mlxcel_raw_paged_attention(const PagedAttentionParams* params,
                                          const AttentionArrays* arrays, void* stream) {
  return on_stream(stream,
                   [&](Launch& launch) { launch_paged_attention(*params, *arrays, launch); });
}

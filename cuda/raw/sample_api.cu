// The sampling kernels behind a C interface, for benchmarks/cuda_sampling_raw.py: device pointers
// in, on a stream, no MLX. Each returns 0, or -1 and an error text.

#include <string>

#include "launchers.h"

namespace {

thread_local std::string error_text;

template <class F>
int guarded(F&& f) {
  try {
    f();
    const cudaError_t status = cudaGetLastError();
    if (status == cudaSuccess) return 0;
    error_text = cudaGetErrorString(status);
  } catch (const std::exception& e) {
    error_text = e.what();
  }
  return -1;
}

}  // namespace

#define MLXCEL_EXPORT extern "C" __attribute__((visibility("default")))

MLXCEL_EXPORT const char* mlxcel_raw_error() {
  return error_text.c_str();
}

MLXCEL_EXPORT int mlxcel_raw_sample(const mlxcel::SampleParams* params, const void* logits,
                                    const void* rows, int32_t* ids, bool* valid, int32_t* rounds,
                                    int cluster, void* stream) {
  return guarded([&] {
    mlxcel::cuda::StreamLaunch launch(static_cast<cudaStream_t>(stream));
    mlxcel::cuda::launch_sample(*params, logits, static_cast<const mlxcel::SampleRow*>(rows), ids,
                                valid, rounds, launch, cluster);
  });
}

MLXCEL_EXPORT int mlxcel_raw_chain(const mlxcel::ChainParams* params, const int32_t* draft_ids,
                                   const float* draft_probs, const float* target_probs,
                                   const void* rows, int32_t* ids, int32_t* num_accepted,
                                   int cluster, void* stream) {
  return guarded([&] {
    mlxcel::cuda::StreamLaunch launch(static_cast<cudaStream_t>(stream));
    mlxcel::cuda::launch_chain_speculative_sample(*params, draft_ids, draft_probs, target_probs,
                                                  static_cast<const mlxcel::ChainRow*>(rows), ids,
                                                  num_accepted, launch, cluster);
  });
}

MLXCEL_EXPORT int mlxcel_raw_renorm(const mlxcel::RenormParams* params, const void* x,
                                    const void* values, void* out, void* stream) {
  return guarded([&] {
    mlxcel::cuda::StreamLaunch launch(static_cast<cudaStream_t>(stream));
    mlxcel::cuda::launch_renorm(*params, x, static_cast<const mlxcel::RenormValue*>(values), out,
                                launch);
  });
}

MLXCEL_EXPORT int mlxcel_raw_logprobs(const mlxcel::TokenLogprobsParams* params, const void* logits,
                                      const int32_t* ids, float* logprobs, int32_t* ranks,
                                      int32_t* top_ids, float* top_logprobs, void* stream) {
  return guarded([&] {
    mlxcel::cuda::StreamLaunch launch(static_cast<cudaStream_t>(stream));
    mlxcel::cuda::launch_token_logprobs(*params, logits, ids, logprobs, ranks, top_ids,
                                        top_logprobs, launch);
  });
}

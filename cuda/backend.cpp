#include "backend.h"

#include "glue.h"

extern "C" __attribute__((visibility("default"))) const mlxcel::GpuBackend* mlxcel_gpu_backend() {
  static const mlxcel::GpuBackend table{
      .name = "cuda",
      .add_rms_norm = mlxcel::cuda::add_rms_norm,
      .merge_states = mlxcel::cuda::merge_states,
      .rope_append = mlxcel::cuda::rope_append,
  };
  return &table;
}

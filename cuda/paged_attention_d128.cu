#include "kernels/paged_attention_launch.cuh"

namespace mlxcel::cuda {
MLXCEL_ATTENTION_HEAD_DIM(128)
}  // namespace mlxcel::cuda

#include "kernels/paged_attention_launch.cuh"

namespace mlxcel::cuda {
MLXCEL_ATTENTION_HEAD_DIM(256)
}  // namespace mlxcel::cuda

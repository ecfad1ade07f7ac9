#include "encoder.h"

#include <string>
#include <unordered_map>

namespace mlxcel::cuda {

EncoderLaunch::EncoderLaunch(const mx::Stream& stream)
    : encoder_(mx::cu::get_command_encoder(stream)) {
  encoder_.device().make_current();
}

void EncoderLaunch::declare(const Arrays& inputs, Arrays& outputs, const mx::Stream& stream) {
  for (const mx::array& a : inputs) reads(a);
  for (mx::array& a : outputs) {
    allocate_output(a, stream);
    writes(a);
  }
}

void EncoderLaunch::submit(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes,
                           void** params) {
  struct Function {
    CUfunction handle = nullptr;
    int cluster = 0;  // its __cluster_dims__ (1 too is a cluster), or 0
  };
  thread_local std::unordered_map<const void*, Function> functions;
  Function& function = functions[kernel];
  if (function.handle == nullptr) {
    cudaFuncAttributes attributes;
    MLXCEL_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    function.cluster = attributes.requiredClusterWidth;
    // libmlx has a CUDA runtime of its own, which does not know our kernels' symbols. A CUfunction
    // is known to both.
    MLXCEL_CUDA_CHECK(cudaGetFuncBySymbol(&function.handle, kernel));
  }
  allow_shared_bytes(kernel, shared_bytes);
  for (const mx::array& a : reads_) encoder_.set_input_array(a);
  for (const mx::array& a : writes_) encoder_.set_output_array(a);
  if (function.cluster > 0) {
    submit_cluster(kernel, function.cluster, grid, block, shared_bytes, params);
  } else {
    encoder_.add_kernel_node_raw(function.handle, grid, block, {},
                                 static_cast<uint32_t>(shared_bytes), params);
  }
}

void EncoderLaunch::submit_cluster(const void* kernel, int cluster, dim3 grid, dim3 block,
                                   size_t shared_bytes, void** params) {
  // MLX updates an instantiated graph to one with the same key, and CUDA leaves a node its cluster
  // size in an update: a kernel without clusters that comes to such a node is dropped where its
  // grid does not divide, without an error. MLX's key of a kernel node says nothing of clusters.
  // That of a child graph is ours, so these nodes meet only their like.
  cudaGraph_t child;
  MLXCEL_CUDA_CHECK(cudaGraphCreate(&child, 0));
  cudaKernelNodeParams node_params{};
  node_params.func = const_cast<void*>(kernel);
  node_params.gridDim = grid;
  node_params.blockDim = block;
  node_params.sharedMemBytes = static_cast<unsigned>(shared_bytes);
  node_params.kernelParams = params;
  cudaGraphNode_t node;
  MLXCEL_CUDA_CHECK(cudaGraphAddKernelNode(&node, child, nullptr, 0, &node_params));
  encoder_.add_graph_node(child, "(K" + std::to_string(cluster) + ")", true);
  MLXCEL_CUDA_CHECK(cudaGraphDestroy(child));
}

}  // namespace mlxcel::cuda

#include "encoder.h"

#include <unordered_map>

namespace mlxcel::cuda {
namespace {

/// The cluster size of a launch: the one asked for, else the kernel's __cluster_dims__ (1 too is a
/// cluster), or 0.
int cluster_size(const void* kernel, int asked) {
  if (asked > 0) return asked;
  thread_local std::unordered_map<const void*, int> sizes;
  auto [it, is_new] = sizes.try_emplace(kernel);
  if (is_new) {
    cudaFuncAttributes attributes;
    MLXCEL_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    it->second = attributes.requiredClusterWidth;
  }
  return it->second;
}

/// Of a kernel's node in the key of a child graph: MLX updates an instantiated graph to one with
/// the same key, and CUDA leaves a node its cluster size in an update. A kernel without clusters
/// that comes to such a node is dropped where its grid does not divide, without an error.
std::string node_key(int cluster) {
  std::string key = "K";
  if (cluster > 0) key += std::to_string(cluster);
  return key;
}

cudaGraphNode_t add_kernel(cudaGraph_t graph, const void* kernel, dim3 grid, dim3 block,
                           size_t shared_bytes, int cluster, void** params) {
  allow_shared_bytes(kernel, shared_bytes);
  cudaKernelNodeParams node_params{};
  node_params.func = const_cast<void*>(kernel);
  node_params.gridDim = grid;
  node_params.blockDim = block;
  node_params.sharedMemBytes = static_cast<unsigned>(shared_bytes);
  node_params.kernelParams = params;
  cudaGraphNode_t node;
  MLXCEL_CUDA_CHECK(cudaGraphAddKernelNode(&node, graph, nullptr, 0, &node_params));
  if (cluster > 0) {
    cudaLaunchAttributeValue value{};
    value.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    MLXCEL_CUDA_CHECK(
        cudaGraphKernelNodeSetAttribute(node, cudaLaunchAttributeClusterDimension, &value));
  }
  return node;
}

mx::cu::CommandEncoder& encoder_of(const mx::Stream& stream) {
  mx::cu::CommandEncoder& encoder = mx::cu::get_command_encoder(stream);
  encoder.device().make_current();
  return encoder;
}

}  // namespace

ChainLaunch::ChainLaunch(const mx::Stream& stream) : encoder_(encoder_of(stream)) {
  MLXCEL_CUDA_CHECK(cudaGraphCreate(&graph_, 0));
}

ChainLaunch::~ChainLaunch() {
  cudaGraphDestroy(graph_);
}

void ChainLaunch::submit(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes,
                         int cluster, void** params) {
  const cudaGraphNode_t node =
      add_kernel(graph_, kernel, grid, block, shared_bytes, cluster, params);
  if (last_ != nullptr) {
    MLXCEL_CUDA_CHECK(cudaGraphAddDependencies(graph_, &last_, &node, nullptr, 1));
  }
  key_ += node_key(cluster_size(kernel, cluster));
  last_ = node;
}

void ChainLaunch::commit(const Arrays& inputs, const Arrays& outputs) {
  for (const mx::array& a : inputs) encoder_.set_input_array(a);
  for (const mx::array& a : outputs) encoder_.set_output_array(a);
  encoder_.add_graph_node(graph_, key_ + ")", true);
}

EncoderLaunch::EncoderLaunch(const mx::Stream& stream) : encoder_(encoder_of(stream)) {}

void EncoderLaunch::declare(const Arrays& inputs, Arrays& outputs, const mx::Stream& stream) {
  for (const mx::array& a : inputs) reads(a);
  for (mx::array& a : outputs) {
    allocate_output(a, stream);
    writes(a);
  }
}

void EncoderLaunch::submit(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes,
                           int cluster, void** params) {
  for (const mx::array& a : reads_) encoder_.set_input_array(a);
  for (const mx::array& a : writes_) encoder_.set_output_array(a);
  if (const int size = cluster_size(kernel, cluster)) {
    cudaGraph_t child;
    MLXCEL_CUDA_CHECK(cudaGraphCreate(&child, 0));
    add_kernel(child, kernel, grid, block, shared_bytes, cluster, params);
    std::string key = "(";
    key += node_key(size);
    key += ')';
    encoder_.add_graph_node(child, key, true);
    MLXCEL_CUDA_CHECK(cudaGraphDestroy(child));
    return;
  }
  // libmlx has a CUDA runtime of its own, which does not know our kernels' symbols. A CUfunction is
  // known to both.
  thread_local std::unordered_map<const void*, CUfunction> functions;
  CUfunction& function = functions[kernel];
  if (function == nullptr) MLXCEL_CUDA_CHECK(cudaGetFuncBySymbol(&function, kernel));
  allow_shared_bytes(kernel, shared_bytes);
  encoder_.add_kernel_node_raw(function, grid, block, {}, static_cast<uint32_t>(shared_bytes),
                               params);
}

}  // namespace mlxcel::cuda

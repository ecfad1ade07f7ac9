#pragma once

#include <cuda.h>

#include <string>

#include "backend.h"
#include "launch.h"
#include "mlx/backend/cuda/device.h"

namespace mlxcel::cuda {

/// Device memory for outputs and workspaces, from a stream-ordered pool of our own: MLX exports
/// only its managed allocator. The buffer returns to the stream's free list with its last array.
mx::allocator::Data allocate(size_t bytes, const mx::Stream& stream);

/// Gives an output that has no buffer yet a row-contiguous one.
void allocate_output(mx::array& out, const mx::Stream& stream);

/// An uninitialised array that lives until the work encoded so far has finished.
mx::array workspace(mx::Shape shape, mx::Dtype dtype, const mx::Stream& stream);

/// A copy of host data, in device memory.
mx::array upload(const void* data, const mx::Shape& shape, mx::Dtype dtype,
                 const mx::Stream& stream);

/// Copies an evaluated array to the host, and leaves it where it is.
void download(const mx::array& a, void* data);

/// A zeroed int32 counter array of at least `count` elements that belongs to the stream. Kernels
/// must leave it zeroed, and callers declare it as an output, so that launches that share it run
/// one after the other.
mx::array stream_counters(int count, const mx::Stream& stream);

/// Device pointer of an array; nullptr for an empty one.
template <class T>
T* device_ptr(const mx::array& a) {
  if (a.size() == 0) return nullptr;
  auto* buffer = static_cast<const mx::cu::CudaBuffer*>(a.buffer().ptr());
  return reinterpret_cast<T*>(static_cast<char*>(buffer->data) + a.offset());
}

/// Kernels that run one after the other, as one node of the graph that MLX is building: one costs
/// the host less than as a node of its own.
class ChainLaunch final : public Launch {
 public:
  explicit ChainLaunch(const mx::Stream& stream);
  ~ChainLaunch() override;

  /// Adds the chain to MLX's graph, behind those who wrote the inputs.
  void commit(const Arrays& inputs, const Arrays& outputs);

 protected:
  void submit(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, int cluster,
              void** params) override;

 private:
  mx::cu::CommandEncoder& encoder_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphNode_t last_ = nullptr;
  std::string key_ = "(";
};

/// The graph that MLX is building for a stream. MLX orders the kernels of a graph by the arrays
/// that each is declared to read and write, and by nothing else.
class EncoderLaunch final : public Launch {
 public:
  explicit EncoderLaunch(const mx::Stream& stream);

  /// Arrays of every kernel launched from here on. Kernels that share an output run in order.
  void reads(const mx::array& a) { reads_.push_back(a); }
  void writes(const mx::array& a) { writes_.push_back(a); }

  /// Declares all inputs and outputs, allocating outputs that have no buffer.
  void declare(const Arrays& inputs, Arrays& outputs, const mx::Stream& stream);

 protected:
  void submit(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, int cluster,
              void** params) override;

 private:
  mx::cu::CommandEncoder& encoder_;
  Arrays reads_;
  Arrays writes_;
};

}  // namespace mlxcel::cuda

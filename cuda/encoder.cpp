#include "encoder.h"

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
  // libmlx has a CUDA runtime of its own, which does not know our kernels' symbols. A CUfunction
  // is known to both.
  thread_local std::unordered_map<const void*, CUfunction> functions;
  CUfunction& function = functions[kernel];
  if (function == nullptr) {
    MLXCEL_CUDA_CHECK(cudaGetFuncBySymbol(&function, kernel));
  }
  allow_shared_bytes(kernel, shared_bytes);
  encoder_.add_kernel_node_raw(function, grid, block, {}, static_cast<uint32_t>(shared_bytes),
                               params);
}

}  // namespace mlxcel::cuda

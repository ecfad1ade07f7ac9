#pragma once

#include <utility>

#include "backend.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlxcel {

inline Arrays weak_copies(const Arrays& arrays) {
  Arrays copies;
  copies.reserve(arrays.size());
  for (const mx::array& a : arrays) copies.push_back(mx::array::unsafe_weak_copy(a));
  return copies;
}

/// Allocates the outputs that have no buffer yet, declares all arrays to the stream's encoder, and
/// has its thread call kernel(inputs, outputs). Pointers are to be taken in there: asking for one
/// moves a buffer that a GPU made to host memory, which must not happen before the stream has
/// waited for that GPU.
template <class Kernel>
void cpu_dispatch(const mx::Stream& stream, const Arrays& inputs, Arrays& outputs, Kernel kernel) {
  auto& encoder = mx::cpu::get_command_encoder(stream);
  for (const mx::array& a : inputs) encoder.set_input_array(a);
  for (mx::array& a : outputs) {
    if (a.data_shared_ptr() == nullptr) a.set_data(mx::allocator::malloc(a.nbytes()));
    encoder.set_output_array(a);
  }
  encoder.dispatch([in = weak_copies(inputs), out = weak_copies(outputs),
                    kernel = std::move(kernel)]() mutable { kernel(in, out); });
}

}  // namespace mlxcel

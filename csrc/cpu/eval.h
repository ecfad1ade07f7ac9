#pragma once

#include "backend.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlxcel {

/// Allocates the outputs that have no buffer yet and declares all arrays to the stream's encoder.
inline mx::cpu::CommandEncoder& cpu_encode(const mx::Stream& stream, const Arrays& inputs,
                                           Arrays& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream);
  for (const mx::array& a : inputs) encoder.set_input_array(a);
  for (mx::array& a : outputs) {
    if (a.data_shared_ptr() == nullptr) a.set_data(mx::allocator::malloc(a.nbytes()));
    encoder.set_output_array(a);
  }
  return encoder;
}

}  // namespace mlxcel

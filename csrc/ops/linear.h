#pragma once

#include <optional>
#include <string>

#include "backend.h"
#include "common/primitive.h"
#include "mlx/ops.h"
#include "mlx/utils.h"
#include "params/linear.h"

namespace mlxcel {

/// out = x @ weight.T + bias. On a GPU stream our kernel runs where gpu_linear takes the layer,
/// else MLX's ops.
///
/// x      (..., k)  f32|f16|bf16, any strides
/// weight (n, k)    f32|f16|bf16, a type of its own
/// bias   (n)       f32|f16|bf16, optional
/// Returns (..., n) of the dtype of x. Weights are widened to f32 on the fly, never as a whole;
/// sums are f32; on the CPU in an order that depends on k alone: a row of x gives the same bits in
/// any batch.
/// Throws std::invalid_argument on a shape or dtype mismatch.
mx::array linear(const mx::array& x, const mx::array& weight,
                 const std::optional<mx::array>& bias = std::nullopt, mx::StreamOrDevice s = {});

/// The same with MLX's affine quantized weight: w = scales * q + biases per group along k.
///
/// weight         (n, k * bits / 32)   uint32, values little-endian in each word
/// scales, biases (n, k / group_size)  f32|f16|bf16, both alike
/// group_size     32, 64 or 128; bits 4 or 8
mx::array quantized_linear(const mx::array& x, const mx::array& weight, const mx::array& scales,
                           const mx::array& biases,
                           const std::optional<mx::array>& bias = std::nullopt, int group_size = 64,
                           int bits = 4, mx::StreamOrDevice s = {});

/// A weight in the layout that the CPU kernels read fastest: 64 rows interleaved
/// (params/linear.h has the shapes). Bytes are those of the row-major weight, but for padding of n
/// to 64.
///
/// format        one of "float32", "float16", "bfloat16", "q4", "q8"
/// group_size    32, 64 or 128; 0 where dense
struct PackedLinear {
  int out_features;
  int in_features;
  std::string format;
  int group_size;
};

/// Packs a dense weight, or a quantized one with its scales and biases, as linear() and
/// quantized_linear() take them. Returns (weight), or (weight, scales, biases).
Arrays pack_linear(const mx::array& weight, const std::optional<mx::array>& scales,
                   const std::optional<mx::array>& biases, int group_size, int bits,
                   mx::StreamOrDevice s = {});

/// linear() or quantized_linear() of packed arrays: the same bits.
mx::array packed_linear(const mx::array& x, const Arrays& packed, const PackedLinear& layout,
                        const std::optional<mx::array>& bias = std::nullopt,
                        mx::StreamOrDevice s = {});

/// Parameters of packed_linear(), checked, for primitives that multiply among other things; of x
/// only shape and dtype are read.
LinearParams packed_linear_params(const char* op, const mx::array& x, const Arrays& packed,
                                  const PackedLinear& layout, const std::optional<mx::array>& bias);

/// The same of a layer whose arrays are as linear() or quantized_linear() take them.
LinearParams stored_linear_params(const char* op, const mx::array& x, const Arrays& stored,
                                  const PackedLinear& layout, const std::optional<mx::array>& bias);

/// Rows `ids` (any shape, int32) of a packed weight: (..., in_features) of `dtype`. An id outside
/// [0, out_features) gives a row of NaN.
mx::array packed_rows(const mx::array& ids, const Arrays& packed, const PackedLinear& layout,
                      mx::Dtype dtype, mx::StreamOrDevice s = {});

class Linear : public InferencePrimitive {
 public:
  Linear(mx::Stream stream, const char* op, const LinearParams& params)
      : InferencePrimitive(stream, op), params_(params) {}

  /// Inputs: x, weight, then scales and biases where quantized, then bias where there is one.
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override;
  bool is_equivalent(const mx::Primitive& other) const override;

 private:
  LinearParams params_;
};

/// Inputs: weight, then scales and biases where quantized; outputs alike.
class PackLinear : public InferencePrimitive {
 public:
  PackLinear(mx::Stream stream, const LinearParams& params)
      : InferencePrimitive(stream, "pack_linear"), params_(params) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override;
  bool is_equivalent(const mx::Primitive& other) const override;

 private:
  LinearParams params_;
};

/// Inputs: ids, weight, then scales and biases where quantized.
class PackedRows : public InferencePrimitive {
 public:
  PackedRows(mx::Stream stream, const LinearParams& params)
      : InferencePrimitive(stream, "packed_rows"), params_(params) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override;
  bool is_equivalent(const mx::Primitive& other) const override;

 private:
  LinearParams params_;
};

}  // namespace mlxcel

#pragma once

#include <string>
#include <vector>

#include "mlx/primitives.h"

namespace mlxcel {

namespace mx = mlx::core;

/// Base of all our primitives: inference only, so the transformations of MLX refuse with one text.
/// (The texts of MLX's own base class say "not implemented", which reads like a bug.)
class InferencePrimitive : public mx::Primitive {
 public:
  /// `op` is the public name of the op, for error texts.
  InferencePrimitive(mx::Stream stream, const char* op) : mx::Primitive(stream), op_(op) {}

  std::vector<mx::array> vjp(const std::vector<mx::array>&, const std::vector<mx::array>&,
                             const std::vector<int>&, const std::vector<mx::array>&) override {
    refuse("gradients");
  }
  std::vector<mx::array> jvp(const std::vector<mx::array>&, const std::vector<mx::array>&,
                             const std::vector<int>&) override {
    refuse("gradients");
  }
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>&,
                                                           const std::vector<int>&) override {
    refuse("vmap");
  }

  const char* name() const override { return op_; }

 protected:
  const char* op_;

 private:
  [[noreturn]] void refuse(const char* what) const {
    throw std::invalid_argument(std::string("[") + op_ + "] is for inference and has no " + what +
                                ".");
  }
};

}  // namespace mlxcel

#pragma once

#include <string>
#include <vector>

#include "backend.h"
#include "mlx/backend/metal/device.h"

namespace mlxcel::metal {

/// One file of metal/kernels, flattened by embed_kernels.py.
struct KernelSource {
  const char* name;
  const char* hash;  // of the text: MLX caches libraries by name alone
  const char* text;
};

namespace sources {
extern const KernelSource k_add_rms_norm;
extern const KernelSource k_merge_states;
extern const KernelSource k_paged_attention;
extern const KernelSource k_paged_attention_matrix;
extern const KernelSource k_paged_attention_merge;
extern const KernelSource k_rope_append;
extern const KernelSource k_sample;
extern const KernelSource k_sample_chain;
extern const KernelSource k_sample_edit;
extern const KernelSource k_sample_logprobs;
extern const KernelSource k_sample_renorm;
}  // namespace sources

/// An argument of a kernel template: as MSL spells it, and as it appears in the kernel's name.
struct TemplateArgument {
  TemplateArgument(
      FloatType type);          // NOLINT: implicit, so that calls read like the template's list
  TemplateArgument(int value);  // NOLINT
  std::string msl;
  std::string name;
};

/// The pipeline of `function<arguments...>`, called "function_f16_128" for example; compiled at its
/// first use. A kernel that is no template has no arguments and lies outside the namespace. `flags`
/// are the values of function constants 0, 1, 2 (all bool).
MTL::ComputePipelineState* kernel(const mx::Stream& stream, const KernelSource& source,
                                  const std::string& function,
                                  const std::vector<TemplateArgument>& arguments = {},
                                  const std::vector<bool>& flags = {});

/// Gives `out` a buffer of its own.
void allocate(mx::array& out);

/// An array that lives as long as the command buffer. At least one element: Metal binds no empty
/// ones.
mx::array workspace(mx::Shape shape, mx::Dtype dtype, const mx::Stream& stream);

/// Threads for one item a thread: a multiple of the simdgroup, within the pipeline's limit.
size_t threadgroup_size(const MTL::ComputePipelineState* kernel, size_t items);

/// Threads of the kernels that give a threadgroup a row of the vocabulary.
size_t row_threads(const MTL::ComputePipelineState* kernel, int vocab);

constexpr size_t kSimdWidth = 32;

constexpr size_t ceil_div(size_t a, size_t b) {
  return (a + b - 1) / b;
}

}  // namespace mlxcel::metal

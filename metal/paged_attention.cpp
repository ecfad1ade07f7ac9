#include <algorithm>

#include "launchers.h"
#include "library.h"

namespace mlxcel::metal {
namespace {

// As in kernels/attention_tile.h and kernels/paged_attention*.h.
constexpr int kMatrixRows = 16;
constexpr int kMatrixBlockRows = 32;
constexpr int kMatrixThreads = 128;
constexpr int kVectorThreads = 256;

/// The inputs by name; what a launch does not have is bound to something it has and not read.
struct Bindings {
  Bindings(const PagedAttentionParams& params, const Arrays& inputs) {
    for (int i = 0; i < 7; ++i) common[i] = &inputs[i];
    merge_indptr = &inputs[7];
    size_t next = 8;
    const auto optional = [&](int32_t present) {
      return present != 0 ? &inputs[next++] : &inputs[3];
    };
    common[7] = optional(params.has_qo_indptr);
    common[8] = optional(params.has_first_page_offset);
    sinks = common[9] = optional(params.has_sinks);
    token_order = optional(params.has_token_order);
  }
  const mx::array* common[10];  // buffers 0 to 9 of both attention kernels
  const mx::array* merge_indptr;
  const mx::array* sinks;
  const mx::array* token_order;
};

std::vector<bool> flags_of(const PagedAttentionParams& p) {
  return {p.has_qo_indptr != 0, p.has_first_page_offset != 0, p.has_sinks != 0,
          p.logits_soft_cap > 0.0f, p.has_token_order != 0};
}

struct Outputs {
  mx::array* partial_v;
  mx::array* partial_lse;
  mx::array* out;
  mx::array* lse;
};

void run_tiles(MTL::ComputePipelineState* pipeline, const PagedAttentionParams& params,
               const Bindings& in, const Outputs& out, int rows_per_group, int threads,
               const mx::Stream& stream) {
  auto& encoder = mx::metal::get_command_encoder(stream);
  encoder.set_compute_pipeline_state(pipeline);
  for (int i = 0; i < 10; ++i) encoder.set_input_array(*in.common[i], i);
  encoder.set_output_array(*out.partial_v, 10);
  encoder.set_output_array(*out.partial_lse, 11);
  encoder.set_output_array(*out.out, 12);
  encoder.set_output_array(*out.lse, 13);
  encoder.set_bytes(params, 14);
  encoder.set_input_array(*in.merge_indptr, 15);
  encoder.set_input_array(*in.token_order, 16);
  const int rows = params.max_q_len * (params.num_qo_heads / params.num_kv_heads);
  encoder.dispatch_threadgroups(
      MTL::Size(params.num_kv_heads, ceil_div(rows, rows_per_group), params.num_tiles),
      MTL::Size(threads, 1, 1));
}

/// One launch of each kernel that has tiles; a tile's rows decide which takes it.
void attend(const PagedAttentionParams& params, const Bindings& in, const Outputs& out,
            const mx::Stream& stream) {
  const int group_size = params.num_qo_heads / params.num_kv_heads;
  const int most_rows = params.max_q_len * group_size;
  const bool one_kernel = params.batch_invariant != 0;  // whose bits would differ from the other's
  if (one_kernel || group_size < kMatrixRows) {
    // Rows of its grid: those of the largest tile that it takes.
    PagedAttentionParams vector = params;
    if (!one_kernel) vector.max_q_len = std::min(params.max_q_len, (kMatrixRows - 1) / group_size);
    const int rows = vector.max_q_len * group_size;
    const int block = rows <= 1 ? 1 : rows <= 2 ? 2 : rows <= 4 ? 4 : 8;
    run_tiles(kernel(stream, sources::k_paged_attention, "paged_attention",
                     {params.dtype, params.head_dim, block}, flags_of(params)),
              vector, in, out, block, kVectorThreads, stream);
  }
  if (!one_kernel && most_rows >= kMatrixRows) {
    run_tiles(kernel(stream, sources::k_paged_attention_matrix, "paged_attention_matrix",
                     {params.dtype, params.head_dim}, flags_of(params)),
              params, in, out, kMatrixBlockRows, kMatrixThreads, stream);
  }
}

void merge(const PagedAttentionParams& params, const Bindings& in, const Outputs& out,
           const mx::Stream& stream) {
  auto* pipeline = kernel(stream, sources::k_paged_attention_merge, "paged_attention_merge",
                          {params.dtype}, flags_of(params));
  auto& encoder = mx::metal::get_command_encoder(stream);
  encoder.set_compute_pipeline_state(pipeline);
  encoder.set_input_array(*out.partial_v, 0);
  encoder.set_input_array(*out.partial_lse, 1);
  encoder.set_input_array(*in.merge_indptr, 2);
  encoder.set_input_array(*in.sinks, 3);
  encoder.set_output_array(*out.out, 4);
  encoder.set_output_array(*out.lse, 5);
  encoder.set_bytes(params, 6);
  const size_t width = threadgroup_size(pipeline, params.head_dim);
  encoder.dispatch_threads(MTL::Size(params.head_dim, params.num_qo_heads, params.num_q),
                           MTL::Size(width, 1, 1));
}

}  // namespace

void paged_attention(const PagedAttentionParams& params, const Arrays& inputs, Arrays& outputs,
                     const mx::Stream& stream) {
  for (mx::array& out : outputs) allocate(out);
  if (params.num_tiles == 0) return;
  const Bindings in(params, inputs);
  mx::array v =
      workspace({params.num_partials, params.num_qo_heads, params.head_dim}, mx::float32, stream);
  mx::array lse = workspace({params.num_partials, params.num_qo_heads}, mx::float32, stream);
  const Outputs out{&v, &lse, &outputs[0], &outputs[1]};
  attend(params, in, out, stream);
  if (params.num_partials > 0) merge(params, in, out, stream);
}

void paged_attention_partial(const PagedAttentionParams& params, const Arrays& inputs,
                             Arrays& outputs, const mx::Stream& stream) {
  for (mx::array& out : outputs) allocate(out);
  if (params.num_tiles == 0) return;
  const Bindings in(params, inputs);
  mx::array unused_out = workspace({1}, inputs[0].dtype(), stream);
  mx::array unused_lse = workspace({1}, mx::float32, stream);
  attend(params, in, {&outputs[0], &outputs[1], &unused_out, &unused_lse}, stream);
}

}  // namespace mlxcel::metal

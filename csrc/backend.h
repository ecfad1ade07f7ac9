#pragma once

#include <string>
#include <vector>

#include "mlx/array.h"
#include "mlx/stream.h"
#include "params/add_rms_norm.h"
#include "params/linear.h"
#include "params/merge_states.h"
#include "params/paged_attention.h"
#include "params/rope_append.h"
#include "params/sample.h"
#include "params/sample_chain.h"
#include "params/sample_edit.h"
#include "params/sample_logprobs.h"
#include "params/sample_renorm.h"

namespace mlxcel {

namespace mx = mlx::core;

using Arrays = std::vector<mx::array>;

/// Evaluates one primitive on a GPU stream: allocates the outputs' buffers and encodes the kernels.
/// Inputs are row-contiguous unless the op's header says otherwise.
template <class Params>
using Launcher = void (*)(const Params& params, const Arrays& inputs, Arrays& outputs,
                          const mx::Stream& stream);

struct DecoderStackParams;  // ops/decoder_stack.h

/// The one seam between ops and a GPU backend: cuda/ (a second library, loaded at import) or metal/
/// (linked in) fills one such table. A null entry means that the backend lacks the op.
struct GpuBackend {
  const char* name;  // "cuda" or "metal"

  /// An array on the device with a copy of host data, made in the stream's order; null: arrays of
  /// the host are as good.
  mx::array (*upload)(const void* data, const mx::Shape& shape, mx::Dtype dtype,
                      const mx::Stream& stream) = nullptr;

  /// Copies an evaluated, row-contiguous array to the host without moving it there; null: the host
  /// may as well read the array.
  void (*download)(const mx::array& a, void* data) = nullptr;

  /// x, residual, weight -> normed, new_residual
  Launcher<AddRmsNormParams> add_rms_norm = nullptr;

  /// q [num_q, Hq, D], k_pages, v_pages, kv_indptr [B+1], kv_indices, kv_last_page_len [B], tiles
  /// [num_tiles, 8], merge_indptr [num_q+1], then those present of qo_indptr [B+1],
  /// first_page_offset [B], sinks [Hq] f32, token_order
  /// -> out [num_q, Hq, D] of the dtype, lse [num_q, Hq] f32 log2
  Launcher<PagedAttentionParams> paged_attention = nullptr;

  /// The same inputs -> v [num_partials, Hq, D] f32 normalised, lse [num_partials, Hq] f32 log2,
  /// not merged.
  Launcher<PagedAttentionParams> paged_attention_partial = nullptr;

  /// v_in [N, H, D], lse_in [N, H], o_indptr [M+1] -> v [M, H, D], lse [M, H]
  Launcher<MergeStatesParams> merge_states = nullptr;

  /// q [nnz, Hq, D], k, v [nnz, Hkv, D], k_pages, v_pages, slots [nnz] int32 (page * page_size +
  /// offset, or -1: not written), positions [nnz] int32, inv_freq [rotary_dim / 2] f32 -> q_rot,
  /// k_pages, v_pages, where the pools are the inputs' buffers (outputs take them by
  /// copy_shared_buffer)
  Launcher<RopeAppendParams> rope_append = nullptr;

  /// x [..., k], weight, then scales and offsets where quantized, then the bias where there is one
  /// ->
  /// [..., n]; for layers that gpu_linear takes
  Launcher<LinearParams> linear = nullptr;

  /// Inputs and outputs of RunDecoderStack; for those that DecoderStack::runs takes
  Launcher<DecoderStackParams> decoder_stack = nullptr;

  /// logits [B, V], rows [B, 8] u32 -> ids [B] i32, valid [B] bool, rounds [B] i32
  Launcher<SampleParams> sample = nullptr;

  /// logits [B, V], rows [B, 8] u32, bias_ids [nnz] i32, bias_values [nnz] f32, counts [S, V] u32,
  /// masks [M, words] u32 -> [B, V] f32
  Launcher<EditLogitsParams> edit_logits = nullptr;

  /// counts [S, V] u32, rows [n] i32, ids [n] i32 -> counts, on the input's buffer
  Launcher<CountTokensParams> count_tokens = nullptr;

  /// logits [B, V], ids [B] i32 -> logprobs [B] f32, ranks [B] i32, top_ids [B, n] i32,
  /// top_logprobs [B, n] f32
  Launcher<TokenLogprobsParams> token_logprobs = nullptr;

  /// x [B, V], values [B] (i32 for top-k, else f32) -> [B, V] of the dtype
  Launcher<RenormParams> renorm = nullptr;

  /// draft_ids [B, n] i32, draft_probs [B, n, V] f32, target_probs [B, n + 1, V] f32, rows [B, 4]
  /// u32 -> ids [B, n + 1] i32, num_accepted [B] i32
  Launcher<ChainParams> chain_speculative_sample = nullptr;
};

/// The table in use, or nullptr.
const GpuBackend* gpu_backend();

/// Loads a backend library and takes its table from the exported function
/// `extern "C" const mlxcel::GpuBackend* mlxcel_gpu_backend()`. Throws std::runtime_error with the
/// reason.
void load_gpu_backend(const std::string& path);

/// Puts a linked-in backend's table in use.
void use_gpu_backend(const GpuBackend* backend);

/// Why there is no GPU backend; what eval_gpu says when an op is not there.
void set_gpu_backend_missing(const std::string& reason);

[[noreturn]] void throw_no_gpu_backend(const char* op);

/// The launcher of an op, or std::runtime_error naming the op and the remedy.
template <class Params>
Launcher<Params> gpu_launcher(const char* op, Launcher<Params> GpuBackend::* entry) {
  const GpuBackend* backend = gpu_backend();
  if (backend == nullptr || backend->*entry == nullptr) throw_no_gpu_backend(op);
  return backend->*entry;
}

}  // namespace mlxcel

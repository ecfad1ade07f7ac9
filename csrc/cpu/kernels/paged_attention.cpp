#include "cpu/kernels/paged_attention.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "common/cpu_features.h"
#include "common/parallel.h"
#include "cpu/kernels/paged_attention_impl.h"

namespace mlxcel::cpu {

#if defined(__x86_64__)
extern decltype(&attention_code) const attention_code_avx2;
extern decltype(&attention_code) const attention_code_avx512;
#endif

namespace {

const AttentionCode& code_of(const PagedAttentionParams& params) {
  auto code = &attention_code;
#if defined(__x86_64__)
  if (cpu_features().avx2) code = attention_code_avx2;
  if (cpu_features().avx512) code = attention_code_avx512;
#endif
  return code(params.dtype, params.kv_dtype);
}

/// Runs all tiles, and done(tile, kv_head) after each.
template <class Done>
void run_tiles(const AttentionCode& code, const PagedAttentionParams& params,
               const AttentionInputs& in, const TileOutput& out, const Done& done) {
  const size_t pairs = static_cast<size_t>(params.num_tiles) * params.num_kv_heads;
  const size_t workers = std::min<size_t>(num_threads(), pairs);
  // A stacked tile takes as long as many others, and comes before them. The others take about as
  // long as each other, so that threads take turns.
  parallel_tasks(pairs, [&](size_t begin, size_t end) {
    for (size_t pair = begin; pair < end; ++pair) {
      code.tile(params, in, out, pair, end - begin == 1 ? pair + workers : pair + 1);
      done(in.tiles[pair / params.num_kv_heads], static_cast<int>(pair % params.num_kv_heads));
    }
  });
}

}  // namespace

float* attention_scratch(size_t n) {
  constexpr size_t kLine = 64;
  static thread_local std::vector<float> memory;
  if (memory.size() < n + kLine / sizeof(float)) memory.resize(n + kLine / sizeof(float));
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<float*>((address + kLine - 1) / kLine * kLine);
}

void paged_attention(const PagedAttentionParams& params, const AttentionInputs& in, void* out,
                     float* lse) {
  // Kept between calls: fresh pages would cost more than the merge.
  static thread_local std::vector<float> partials;
  const size_t rows = static_cast<size_t>(params.num_partials) * params.num_qo_heads;
  if (partials.size() < rows * (params.head_dim + 1)) partials.resize(rows * (params.head_dim + 1));
  const TileOutput output{out, lse, partials.data(), partials.data() + rows * params.head_dim};
  const AttentionCode& code = code_of(params);
  if (params.num_partials == 0) return run_tiles(code, params, in, output, [](auto&, int) {});
  // Where the last part of a query token is written, its parts are merged: threads that had gone to
  // sleep would take longer to wake up than a decode step's parts to merge.
  static thread_local std::vector<std::atomic<int32_t>> parts_left;  // by token and KV head
  const size_t heads = params.num_kv_heads, merges = params.num_q * heads;
  if (parts_left.size() < merges) parts_left = std::vector<std::atomic<int32_t>>(merges);
  for (int32_t token = 0; token < params.num_q; ++token) {
    const int32_t parts = in.merge_indptr[token + 1] - in.merge_indptr[token];
    for (size_t i = 0; parts > 0 && i < heads; ++i) {
      parts_left[token * heads + i].store(parts, std::memory_order_relaxed);
    }
  }
  // The caller's: workers that named the variable would find their own.
  std::atomic<int32_t>* const left = parts_left.data();
  run_tiles(code, params, in, output, [&, left](const AttentionTile& tile, int kv_head) {
    if (tile.chunk < 0) return;
    for (int i = tile.q_begin; i < tile.q_begin + tile.q_len; ++i) {
      const int token = tile.shared != 0 ? in.token_order[i] : i;
      if (left[token * heads + kv_head].fetch_sub(1, std::memory_order_acq_rel) == 1) {
        code.merge(params, in, output, token, kv_head);
      }
    }
  });
}

void paged_attention_partial(const PagedAttentionParams& params, const AttentionInputs& in,
                             float* v, float* lse) {
  run_tiles(code_of(params), params, in, {nullptr, nullptr, v, lse}, [](auto&, int) {});
}

}  // namespace mlxcel::cpu

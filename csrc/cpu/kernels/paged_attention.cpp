#include "cpu/kernels/paged_attention.h"

#include <algorithm>
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

void run_tiles(const PagedAttentionParams& params, const AttentionInputs& in,
               const TileOutput& out) {
  const AttentionCode& code = code_of(params);
  const size_t pairs = static_cast<size_t>(params.num_tiles) * params.num_kv_heads;
  const size_t workers = std::min<size_t>(num_threads(), pairs);
  // A stacked tile takes as long as many others, and comes before them. The others take about as
  // long as each other, so that threads take turns.
  parallel_tasks(pairs, [&](size_t begin, size_t end) {
    for (size_t pair = begin; pair < end; ++pair) {
      code.tile(params, in, out, pair, end - begin == 1 ? pair + workers : pair + 1);
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
  run_tiles(params, in, output);
  if (params.num_partials == 0) return;
  const AttentionCode& code = code_of(params);
  parallel_for(params.num_q, 4,
               [&](size_t begin, size_t end) { code.merge(params, in, output, begin, end); });
}

void paged_attention_partial(const PagedAttentionParams& params, const AttentionInputs& in,
                             float* v, float* lse) {
  run_tiles(params, in, {nullptr, nullptr, v, lse});
}

}  // namespace mlxcel::cpu

#include "cpu/kernels/sample_logprobs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/kernels/sample_row.h"
#include "cpu/kernels/sample_select.h"

namespace mlxcel::cpu {

void token_logprobs(const TokenLogprobsParams& params, const void* logits, const int32_t* ids,
                    float* logprobs, int32_t* ranks, int32_t* top_ids, float* top_logprobs) {
  const int32_t n = params.vocab, num_top = params.num_top;
  for_rows(params.batch, n, [&](size_t b) {
    thread_local TokenRow tokens;
    thread_local std::vector<Candidate> list;
    tokens.read(params.dtype, logits, b, n);
    const float max = tokens.x()[tokens.argmax()];
    const double lse = max + std::log(tokens.mass(max, 1.0, std::numeric_limits<float>::lowest()));
    const auto logprob = [&](float v) { return static_cast<float>(v - lse); };

    const bool in_range = ids[b] >= 0 && ids[b] < n;
    const float drawn = in_range ? tokens.x()[ids[b]] : -std::numeric_limits<float>::infinity();
    logprobs[b] = logprob(drawn);
    ranks[b] = static_cast<int32_t>(
        std::count_if(tokens.x(), tokens.x() + n, [drawn](float v) { return v >= drawn; }));
    if (num_top == 0) return;
    tokens.list_top(num_top, -std::numeric_limits<float>::infinity(), list);
    list.resize(num_top, {-std::numeric_limits<float>::infinity(), 0});  // NaN is not listed
    std::sort(list.begin(), list.end(), ranks_before);                   // at most kMaxTopLogprobs
    for (int32_t i = 0; i < num_top; ++i) {
      top_ids[b * num_top + i] = list[i].index;
      top_logprobs[b * num_top + i] = logprob(list[i].value);
    }
  });
}

}  // namespace mlxcel::cpu

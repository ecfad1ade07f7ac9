#pragma once

#include "cpu/kernels/merge_states.h"
#include "cpu/kernels/softmax_states.h"

namespace mlxcel::cpu {
namespace {

template <class T>
void merge_states_rows(const MergeStatesParams& params, int64_t begin, int64_t end, const T* v_in,
                       const float* lse_in, const int32_t* o_indptr, T* v_out, float* lse_out) {
  const int64_t heads = params.num_heads, dim = params.head_dim;
  float sum[kMaxMergeDim];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = i / heads, head = i % heads;
    const int64_t from = std::clamp(o_indptr[row], 0, params.num_in);
    const int64_t to = std::clamp<int64_t>(o_indptr[row + 1], from, params.num_in);
    const int64_t at = from * heads + head;
    lse_out[i] = merge<T>({v_in + at * dim, heads * dim, lse_in + at, heads, to - from},
                          params.head_dim, sum);
    store_row(v_out + i * dim, sum, params.head_dim);
  }
}

void merge_states_range(const MergeStatesParams& params, int64_t begin, int64_t end,
                        const void* v_in, const float* lse_in, const int32_t* o_indptr, void* v_out,
                        float* lse_out) {
  const auto run = [&]<class T>(T*) {
    merge_states_rows(params, begin, end, static_cast<const T*>(v_in), lse_in, o_indptr,
                      static_cast<T*>(v_out), lse_out);
  };
  switch (params.dtype) {
    case FloatType::f32:
      return run(static_cast<float*>(nullptr));
    case FloatType::f16:
      return run(static_cast<f16*>(nullptr));
    case FloatType::bf16:
      return run(static_cast<bf16*>(nullptr));
  }
}

}  // namespace
}  // namespace mlxcel::cpu

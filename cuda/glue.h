#pragma once

#include "backend.h"

namespace mlxcel::cuda {

// One function per entry of GpuBackend: allocates outputs, declares arrays, calls the launcher.

mx::array upload(const void* data, const mx::Shape& shape, mx::Dtype dtype,
                 const mx::Stream& stream);

void add_rms_norm(const AddRmsNormParams& params, const Arrays& inputs, Arrays& outputs,
                  const mx::Stream& stream);

void merge_states(const MergeStatesParams& params, const Arrays& inputs, Arrays& outputs,
                  const mx::Stream& stream);

void paged_attention(const PagedAttentionParams& params, const Arrays& inputs, Arrays& outputs,
                     const mx::Stream& stream);

void paged_attention_partial(const PagedAttentionParams& params, const Arrays& inputs,
                             Arrays& outputs, const mx::Stream& stream);

void rope_append(const RopeAppendParams& params, const Arrays& inputs, Arrays& outputs,
                 const mx::Stream& stream);

void linear(const LinearParams& params, const Arrays& inputs, Arrays& outputs,
            const mx::Stream& stream);

void decoder_stack(const DecoderStackParams& params, const Arrays& inputs, Arrays& outputs,
                   const mx::Stream& stream);

void sample(const SampleParams& params, const Arrays& inputs, Arrays& outputs,
            const mx::Stream& stream);

void edit_logits(const EditLogitsParams& params, const Arrays& inputs, Arrays& outputs,
                 const mx::Stream& stream);

void count_tokens(const CountTokensParams& params, const Arrays& inputs, Arrays& outputs,
                  const mx::Stream& stream);

void token_logprobs(const TokenLogprobsParams& params, const Arrays& inputs, Arrays& outputs,
                    const mx::Stream& stream);

void renorm(const RenormParams& params, const Arrays& inputs, Arrays& outputs,
            const mx::Stream& stream);

void chain_speculative_sample(const ChainParams& params, const Arrays& inputs, Arrays& outputs,
                              const mx::Stream& stream);

}  // namespace mlxcel::cuda

"""The ops: compiled MLX primitives with CPU, CUDA and Metal kernels behind one Python signature each."""

from .kvcache import rope_append
from .norm import add_rms_norm
from .sampling import (
    SampleResult,
    SamplingBatch,
    TokenLogprobs,
    chain_speculative_sample,
    count_tokens,
    edit_logits,
    min_p_renorm,
    sample,
    token_logprobs,
    top_k_mask,
    top_k_renorm,
    top_p_renorm,
)

__all__ = [
    "SampleResult",
    "SamplingBatch",
    "TokenLogprobs",
    "add_rms_norm",
    "chain_speculative_sample",
    "count_tokens",
    "edit_logits",
    "min_p_renorm",
    "rope_append",
    "sample",
    "token_logprobs",
    "top_k_mask",
    "top_k_renorm",
    "top_p_renorm",
]

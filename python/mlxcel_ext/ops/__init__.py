"""The ops: compiled MLX primitives with CPU, CUDA and Metal kernels behind one Python signature each."""

from .attention import lse_to_natural, merge_states, paged_attention, paged_attention_partial
from .attention_plan import AttentionPlan, PlanTarget, cpu_target, cuda_target, metal_target, plan_attention
from .cascade import (
    CascadeCosts,
    CascadeFloors,
    SharedPrefixTree,
    cascade_attention,
    detect_shared_prefix,
    plan_cascade,
)
from .kvcache import rope_append
from .linear import PackedWeight, linear, quantized_linear, swiglu
from .norm import add_rms_norm
from .page_table import PageTable
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

# All of these are public names of the package.
__all__ = [
    "AttentionPlan",
    "CascadeCosts",
    "CascadeFloors",
    "PackedWeight",
    "PageTable",
    "PlanTarget",
    "SampleResult",
    "SamplingBatch",
    "SharedPrefixTree",
    "TokenLogprobs",
    "add_rms_norm",
    "cascade_attention",
    "chain_speculative_sample",
    "count_tokens",
    "cpu_target",
    "cuda_target",
    "detect_shared_prefix",
    "edit_logits",
    "linear",
    "lse_to_natural",
    "merge_states",
    "metal_target",
    "min_p_renorm",
    "paged_attention",
    "paged_attention_partial",
    "plan_attention",
    "plan_cascade",
    "quantized_linear",
    "rope_append",
    "sample",
    "swiglu",
    "token_logprobs",
    "top_k_mask",
    "top_k_renorm",
    "top_p_renorm",
]

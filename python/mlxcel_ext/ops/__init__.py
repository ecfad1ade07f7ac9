"""The ops: compiled MLX primitives with CPU, CUDA and Metal kernels behind one Python signature each."""

from .attention import lse_to_natural, merge_states, paged_attention, paged_attention_partial
from .attention_plan import AttentionPlan, PlanTarget, cpu_target, cuda_target, plan_attention
from .kvcache import rope_append
from .linear import linear, quantized_linear, swiglu
from .norm import add_rms_norm
from .page_table import PageTable
from .sampling import SampleResult, SamplingBatch, sample

# All of these are public names of the package.
__all__ = [
    "AttentionPlan",
    "PageTable",
    "PlanTarget",
    "SampleResult",
    "SamplingBatch",
    "add_rms_norm",
    "cpu_target",
    "cuda_target",
    "linear",
    "lse_to_natural",
    "merge_states",
    "paged_attention",
    "paged_attention_partial",
    "plan_attention",
    "quantized_linear",
    "rope_append",
    "sample",
    "swiglu",
]

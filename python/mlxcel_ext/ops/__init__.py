"""The ops: compiled MLX primitives with CPU, CUDA and Metal kernels behind one Python signature each."""

from .kvcache import rope_append
from .linear import linear, quantized_linear, swiglu
from .norm import add_rms_norm
from .sampling import SampleResult, SamplingBatch, sample

# All of these are public names of the package.
__all__ = [
    "SampleResult",
    "SamplingBatch",
    "add_rms_norm",
    "linear",
    "quantized_linear",
    "rope_append",
    "sample",
    "swiglu",
]

"""The ops: compiled MLX primitives with CPU, CUDA and Metal kernels behind one Python signature each."""

from .kvcache import rope_append
from .linear import linear, quantized_linear, swiglu
from .norm import add_rms_norm

__all__ = ["add_rms_norm", "linear", "quantized_linear", "rope_append", "swiglu"]

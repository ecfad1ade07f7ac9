"""The ops: compiled MLX primitives with CPU, CUDA and Metal kernels behind one Python signature each."""

from .kvcache import rope_append
from .norm import add_rms_norm

__all__ = ["add_rms_norm", "rope_append"]

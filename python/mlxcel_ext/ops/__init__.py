"""The ops: compiled MLX primitives with CPU, CUDA and Metal kernels behind one Python signature each."""

from .norm import add_rms_norm

__all__ = ["add_rms_norm"]

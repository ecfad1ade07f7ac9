"""Normalisation ops."""

from __future__ import annotations

import mlx.core as mx

from .. import _ext
from .arguments import argument_errors


@argument_errors("add_rms_norm")
def add_rms_norm(
    x: mx.array,
    residual: mx.array,
    weight: mx.array,
    eps: float,
    weight_bias: float = 0.0,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array]:
    """Add a residual and RMS-normalise the sum in one pass.

    ``new_residual = x + residual`` and ``normed = rms_norm(new_residual) * (weight + weight_bias)``.
    The sum is rounded to the dtype before it is squared, so the result equals
    ``mx.fast.rms_norm(x + residual, weight, eps)``. Accumulates in f32.

    Parameters
    ----------
    x, residual : mx.array
        ``[..., hidden]``, float32, float16 or bfloat16, same shape and dtype, any strides.
    weight : mx.array
        ``[hidden]``, dtype of ``x``.
    eps : float
        Added to the mean square.
    weight_bias : float
        0, or 1 for Gemma's weights.

    Returns
    -------
    normed, new_residual : mx.array
        Both like ``x``.

    Raises
    ------
    ValueError
        On a shape or dtype mismatch.

    Notes
    -----
    Traffic: reads ``x`` and ``residual`` once, writes both outputs once.
    """
    return _ext.add_rms_norm(x, residual, weight, eps, weight_bias, stream=stream)

"""The semantics of every op in numpy float64: slow, obvious, and what the tests compare with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def add_rms_norm(
    x: npt.ArrayLike, residual: npt.ArrayLike, weight: npt.ArrayLike, eps: float, weight_bias: float = 0.0
) -> tuple[Array, Array]:
    """``(normed, new_residual)`` of unrounded sums."""
    total = np.asarray(x, np.float64) + np.asarray(residual, np.float64)
    scale = 1.0 / np.sqrt(np.mean(total**2, axis=-1, keepdims=True) + eps)
    return total * scale * (np.asarray(weight, np.float64) + weight_bias), total


def rope(
    x: npt.ArrayLike,
    positions: npt.ArrayLike,
    inv_freq: npt.ArrayLike,
    *,
    interleaved: bool = False,
    scale: float = 1.0,
) -> Array:
    """Rotary embedding of ``x`` [nnz, heads, head_dim] at ``positions`` [nnz]."""
    out = np.array(x, np.float64)
    half = len(np.asarray(inv_freq))
    angle = np.asarray(positions, np.float64)[:, None, None] * np.asarray(inv_freq, np.float64)
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    if interleaved:
        first, second = np.s_[..., 0 : 2 * half : 2], np.s_[..., 1 : 2 * half : 2]
    else:
        first, second = np.s_[..., :half], np.s_[..., half : 2 * half]
    a, b = out[first].copy(), out[second].copy()
    out[first] = a * cos - b * sin
    out[second] = a * sin + b * cos
    return out

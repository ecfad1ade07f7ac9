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

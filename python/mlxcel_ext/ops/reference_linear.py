"""The semantics of the linear ops in numpy float64: slow, obvious, and what the tests compare with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def dequantize(
    weight: npt.NDArray[np.uint32], scales: npt.ArrayLike, biases: npt.ArrayLike, group_size: int, bits: int
) -> Array:
    """``[n, k]`` weights of MLX's packed words: the lowest bits of a word are the first value."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    q = (weight[..., None] >> shifts) & np.uint32(2**bits - 1)
    q = q.reshape(weight.shape[0], -1, group_size).astype(np.float64)
    w = q * np.asarray(scales, np.float64)[..., None] + np.asarray(biases, np.float64)[..., None]
    return w.reshape(weight.shape[0], -1)


def linear(x: npt.ArrayLike, weight: npt.ArrayLike, bias: npt.ArrayLike | None = None) -> Array:
    """``x @ weight.T + bias``."""
    out = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    return out if bias is None else out + np.asarray(bias, np.float64)


def swiglu(gate: npt.ArrayLike, up: npt.ArrayLike | None = None) -> Array:
    """``silu(gate) * up``."""
    g = np.asarray(gate, np.float64)
    if up is None:
        g, up = np.split(g, 2, axis=-1)
    with np.errstate(over="ignore"):
        return g / (1.0 + np.exp(-g)) * np.asarray(up, np.float64)

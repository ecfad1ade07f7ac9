"""Comparison with tolerances that come from the arithmetic."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

# Relative spacing at 1.0.
SPACING = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


def to_numpy(a: mx.array) -> npt.NDArray[np.float64]:
    """Any floating-point mx.array as float64."""
    return np.asarray(a.astype(mx.float32), dtype=np.float64)


def assert_close(got: mx.array, want: npt.ArrayLike, *, ulps: float, scale: float | None = None) -> None:
    """Compare with a float64 reference: |got - want| <= ulps * spacing(dtype) * max(|want|, scale).

    `scale` is the size of the terms that were summed up (default: the root mean square of `want`), below
    which cancellation makes a relative error meaningless. NaN and infinities must sit in equal places.
    """
    a, b = to_numpy(got), np.asarray(want, np.float64)
    assert a.shape == b.shape, f"shape {a.shape}, want {b.shape}"
    special = ~np.isfinite(b)
    np.testing.assert_array_equal(np.where(special, a, 0.0), np.where(special, b, 0.0))
    a, b = a[~special], b[~special]
    if b.size == 0:
        return
    floor = np.sqrt(np.mean(b**2)) if scale is None else scale
    bound = ulps * SPACING[got.dtype] * np.maximum(np.abs(b), floor)
    excess = np.abs(a - b) / np.maximum(bound, np.finfo(np.float64).tiny)
    excess = np.where(np.isnan(excess), np.inf, excess)
    worst = int(np.argmax(excess))
    assert excess[worst] <= 1.0, (
        f"{np.count_nonzero(excess > 1)} of {b.size} differ; worst: got {a[worst]!r}, want {b[worst]!r}, "
        f"{excess[worst] * ulps:.1f} ulps of {got.dtype}"
    )

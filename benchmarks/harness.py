"""Interleaved timing of alternatives that compute the same thing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Timing:
    """Microseconds of one arm."""

    median: float
    p10: float
    p90: float

    def __str__(self) -> str:
        return f"{self.median:.1f} us [{self.p10:.1f}, {self.p90:.1f}]"


def interleaved(
    arms: dict[str, Callable[[], object]], *, rounds: int = 15, warmup: int = 2, pause: float = 0.0
) -> dict[str, Timing]:
    """Time each arm once a round, so that a busy or throttled machine slows all of them alike.

    An arm returns mx.arrays, which are evaluated inside its time. The order turns from round to round. `pause`:
    seconds before each arm, where the threads of another spin for a while after its work.
    """
    names = list(arms)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            time.sleep(pause)
            begin = time.perf_counter()
            mx.eval(arms[name]())
            mx.synchronize()
            if turn >= warmup:
                samples[name].append((time.perf_counter() - begin) * 1e6)
    return {name: Timing(*(float(np.percentile(s, q)) for q in (50, 10, 90))) for name, s in samples.items()}


def check_equal(got: mx.array, want: npt.ArrayLike, tolerance: float) -> None:
    """AssertionError unless the arms compute the same: a fast wrong answer is no result."""
    error = float(np.abs(np.asarray(got.astype(mx.float32)) - np.asarray(want)).max())
    assert error <= tolerance, f"arms differ by {error}, more than {tolerance}"

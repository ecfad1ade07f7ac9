"""A weight as it is stored: dense, or a quantized triple; and what rows of them can be joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Weight:
    """One matrix [rows, cols] (or vector) in stored precision.

    Dense: `weight` alone. Quantized: `weight` uint32 [rows, cols * bits / 32], `scales` and, in affine mode,
    `biases` [rows, cols / group_size].
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 0
    group_size: int = 0
    mode: str = "affine"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense matrix that it stands for."""
        if self.scales is None:
            return tuple(self.weight.shape)
        return (self.weight.shape[0], self.weight.shape[1] * 32 // self.bits)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return tuple(a for a in (self.weight, self.scales, self.biases) if a is not None)

    @property
    def format(self) -> tuple[object, ...]:
        """What two weights must share to be joined by rows."""
        dtypes = tuple(a.dtype for a in self.arrays)
        return (dtypes, self.bits, self.group_size, self.mode, self.shape[1:])


def join_rows(weights: Sequence[Weight]) -> list[Weight]:
    """Neighbours of one format joined by rows, so that each run is one matrix multiplication."""
    runs: list[list[Weight]] = []
    for weight in weights:
        if runs and runs[-1][0].format == weight.format:
            runs[-1].append(weight)
        else:
            runs.append([weight])
    return [_join(run) if len(run) > 1 else run[0] for run in runs]


def _join(run: list[Weight]) -> Weight:
    first = run[0]
    joined = [mx.concatenate(parts) for parts in zip(*(w.arrays for w in run), strict=True)]
    scales, biases = (joined[1:] + [None, None])[:2]
    return Weight(joined[0], scales, biases, bits=first.bits, group_size=first.group_size, mode=first.mode)

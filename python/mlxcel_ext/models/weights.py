"""A tensor as a file stores it: dense, or a quantized triple."""

from __future__ import annotations

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
    group_size: int = 0
    bits: int = 0
    mode: str = "affine"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense matrix that it stands for."""
        if self.scales is None:
            return tuple(self.weight.shape)
        return (self.weight.shape[0], self.weight.shape[1] * 32 // self.bits)

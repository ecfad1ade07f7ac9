"""Linear layers and embeddings over weights as they are stored: dense, or MLX's quantized triples."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..ops.linear import PackedWeight, linear, on_cpu

#: Quantized formats that the CPU kernels know; others run on mx.quantized_matmul.
_COMPILED_BITS = (4, 8)
_COMPILED_GROUP_SIZES = (32, 64, 128)


class Linear:
    """``x @ w.T + bias``, by the compiled kernels on CPU and by MLX's on a GPU.

    Where the default device is the CPU, the weight is packed (see `PackedWeight`) when the layer is made and the
    arrays given are let go, so that no second copy stays.

    Parameters
    ----------
    weight : mx.array
        ``[n, k]`` dense, or ``[n, k * bits / 32]`` uint32.
    scales, biases : mx.array, optional
        ``[n, k / group_size]`` where quantized; ``biases`` in affine mode only.
    bias : mx.array, optional
        ``[n]``.
    group_size, bits, mode : int, int, str
        As in ``mx.quantize``; not used where dense.
    """

    def __init__(
        self,
        weight: mx.array,
        scales: mx.array | None = None,
        biases: mx.array | None = None,
        bias: mx.array | None = None,
        group_size: int = 0,
        bits: int = 0,
        mode: str = "affine",
    ) -> None:
        self.out_features = weight.shape[0]
        self.in_features = weight.shape[1] if scales is None else weight.shape[1] * 32 // bits
        self.bias = bias
        self._quantization = {"group_size": group_size, "bits": bits, "mode": mode}
        compiled = mode == "affine" and bits in _COMPILED_BITS and group_size in _COMPILED_GROUP_SIZES
        self._packed: PackedWeight | None = None
        self._stored: tuple[mx.array, mx.array | None, mx.array | None] | None = None
        if on_cpu(None) and (scales is None or compiled):
            self._packed = PackedWeight(weight, scales, biases, group_size, bits)
        else:
            self._stored = (weight, scales, biases)

    @property
    def arrays(self) -> list[mx.array]:
        """What the layer holds, to evaluate when it is loaded."""
        held = self._packed.arrays if self._packed is not None else self._stored
        assert held is not None
        return [a for a in (*held, self.bias) if a is not None]

    @property
    def nbytes(self) -> int:
        """Bytes that one step reads."""
        return sum(a.nbytes for a in self.arrays)

    def __call__(self, x: mx.array) -> mx.array:
        if self._packed is not None:
            return self._packed(x, self.bias)
        assert self._stored is not None
        weight, scales, biases = self._stored
        if scales is None:
            return linear(x, weight, self.bias)
        if self._quantization["mode"] == "affine":
            scales, biases = scales.astype(x.dtype), biases.astype(x.dtype)
        out = mx.quantized_matmul(x, weight, scales, biases, True, **self._quantization)
        return out if self.bias is None else out + self.bias.astype(out.dtype)


class Embedding(Linear):
    """A table of rows by token id, over the same storage; calling it applies it as a tied head."""

    def rows(self, ids: mx.array, dtype: mx.Dtype) -> mx.array:
        """``[..., k]`` rows of ``ids`` (int32) in ``dtype``; only these rows are dequantized."""
        if self._packed is not None:
            return self._packed.rows(ids, dtype)
        assert self._stored is not None
        weight, scales, biases = (None if a is None else a[ids] for a in self._stored)
        if scales is None:
            return weight.astype(dtype)
        return mx.dequantize(weight, scales, biases, **self._quantization).astype(dtype)


def join_rows(layers: Sequence[tuple[mx.array | None, ...]]) -> tuple[mx.array | None, ...]:
    """Arrays (weight, scales, biases, bias) of one layer whose output is the outputs of several in a row.

    The layers must have the same format and in_features, and all or none a bias.
    """
    return tuple(
        None if parts[0] is None else mx.concatenate(list(parts)) for parts in zip(*layers, strict=True)
    )

"""Linear layers and embeddings over weights as they are stored: dense, or MLX's quantized triples."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..ops.linear import linear, quantized_linear

#: Quantized formats that `quantized_linear` has kernels for; others run on mx.quantized_matmul.
_COMPILED_BITS = (4, 8)
_COMPILED_GROUP_SIZES = (32, 64, 128)


class Linear:
    """``x @ w.T + bias``, by the compiled kernels on CPU and by MLX's on a GPU.

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
        self.weight, self.scales, self.biases, self.bias = weight, scales, biases, bias
        self.group_size, self.bits, self.mode = group_size, bits, mode
        self._compiled = mode == "affine" and bits in _COMPILED_BITS and group_size in _COMPILED_GROUP_SIZES

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1] if self.scales is None else self.weight.shape[1] * 32 // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of the weight as stored, which one token's step reads."""
        return sum(a.nbytes for a in (self.weight, self.scales, self.biases) if a is not None)

    def __call__(self, x: mx.array) -> mx.array:
        if self.scales is None:
            return linear(x, self.weight, self.bias)
        if self._compiled:
            assert self.biases is not None
            return quantized_linear(
                x, self.weight, self.scales, self.biases, self.bias, self.group_size, self.bits
            )
        out = mx.quantized_matmul(
            x, self.weight, self.scales, self.biases, True, self.group_size, self.bits, mode=self.mode
        )
        return out if self.bias is None else out + self.bias.astype(out.dtype)

    @staticmethod
    def join(layers: Sequence[Linear]) -> Linear:
        """One layer whose output is the outputs of ``layers`` in a row: one call instead of several.

        The layers must agree in all but their rows (see :meth:`can_join`), or ValueError.
        """
        if not Linear.can_join(layers):
            raise ValueError(
                "[Linear.join] layers must share in_features, format, dtypes and whether they have a bias."
            )
        first = layers[0]
        weight, scales, biases, bias = (
            None
            if getattr(first, name) is None
            else mx.concatenate([getattr(layer, name) for layer in layers])
            for name in ("weight", "scales", "biases", "bias")
        )
        return Linear(weight, scales, biases, bias, first.group_size, first.bits, first.mode)

    @staticmethod
    def can_join(layers: Sequence[Linear]) -> bool:
        """Whether :meth:`join` takes these layers."""

        def key(layer: Linear) -> tuple[object, ...]:
            arrays = (layer.weight, layer.scales, layer.biases, layer.bias)
            dtypes = tuple(None if a is None else a.dtype for a in arrays)
            return (dtypes, layer.in_features, layer.group_size, layer.bits, layer.mode)

        return len({key(layer) for layer in layers}) == 1


class Embedding(Linear):
    """A table of rows by token id, over the same storage; calling it applies it as a tied head."""

    def rows(self, ids: mx.array, dtype: mx.Dtype) -> mx.array:
        """``[..., k]`` rows of ``ids`` in ``dtype``; only these rows are dequantized."""
        if self.scales is None:
            return self.weight[ids].astype(dtype)
        scales = self.scales[ids]
        biases = None if self.biases is None else self.biases[ids]
        if self.mode == "affine":
            # f32: MLX's CPU kernels emulate half precision, some fifty times slower.
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        flat = self.weight[ids]
        return mx.dequantize(flat, scales, biases, self.group_size, self.bits, mode=self.mode).astype(dtype)

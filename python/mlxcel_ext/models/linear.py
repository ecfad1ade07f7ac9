"""Linear layers and embeddings over weights as they are stored: dense, or MLX's quantized triples."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..ops.decoder_stack import PackedLinear, StackLinear
from ..ops.device import on_cpu
from ..ops.linear import PackedWeight, linear, quantized_linear

#: Quantized formats that the CPU kernels know; others run on mx.quantized_matmul.
_COMPILED_BITS = (4, 8)
_COMPILED_GROUP_SIZES = (32, 64, 128)


class Linear:
    """``x @ w.T + bias``.

    On CPU the weight is packed (see `PackedWeight`) at the first use of the layer or of `arrays`, and the arrays
    given are let go, so that no second copy stays.

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
        self._stored: tuple[mx.array, mx.array | None, mx.array | None] | None = (weight, scales, biases)
        self._packed: PackedWeight | None = None
        self._quantization = (group_size, bits, mode)
        self._compiled = scales is None or (
            mode == "affine" and bits in _COMPILED_BITS and group_size in _COMPILED_GROUP_SIZES
        )

    def _pack(self) -> PackedWeight | None:
        """The packed weight, where this layer runs on the CPU kernels."""
        if self._packed is None and self._compiled and on_cpu(None):
            assert self._stored is not None
            self._packed = PackedWeight(*self._stored, *self._quantization[:2])
            self._stored = None
        return self._packed

    def stack_layer(self) -> StackLinear | None:
        """The layer as DecoderStack takes it; None where our kernels do not know its format."""
        packed = self._pack()
        if packed is not None:
            return StackLinear(packed.arrays, packed.layout, self.bias, packed=True)
        if not self._compiled:
            return None
        weight, scales, _ = self._rows_stored()
        group_size, bits, _ = self._quantization
        form = str(weight.dtype).removeprefix("mlx.core.") if scales is None else f"q{bits}"
        layout = PackedLinear(self.out_features, self.in_features, form, group_size)
        held = [a for a in self._rows_stored() if a is not None]
        return StackLinear(held, layout, self.bias, packed=False)

    @property
    def arrays(self) -> list[mx.array]:
        """What the layer holds, to be evaluated when it is loaded."""
        packed = self._pack()
        held = self._stored if packed is None else packed.arrays
        assert held is not None
        return [a for a in (*held, self.bias) if a is not None]

    @property
    def nbytes(self) -> int:
        """Bytes that one step reads."""
        return sum(a.nbytes for a in self.arrays)

    def __call__(self, x: mx.array) -> mx.array:
        packed = self._pack()
        if packed is not None:
            return packed(x, self.bias)
        weight, scales, biases = self._rows_stored()
        if scales is None:
            return linear(x, weight, self.bias)
        group_size, bits, mode = self._quantization
        if self._compiled:
            assert biases is not None
            return quantized_linear(x, weight, scales, biases, self.bias, group_size, bits)
        if mode == "affine":
            assert biases is not None
            scales, biases = scales.astype(x.dtype), biases.astype(x.dtype)
        out = mx.quantized_matmul(x, weight, scales, biases, True, group_size, bits, mode)
        return out if self.bias is None else out + self.bias.astype(out.dtype)

    def _rows_stored(self) -> tuple[mx.array, mx.array | None, mx.array | None]:
        assert self._stored is not None
        return self._stored

    @staticmethod
    def can_join(layers: Sequence[Linear]) -> bool:
        """Whether `join` takes these layers: equal in all but their rows, and none in use yet."""

        def key(layer: Linear) -> tuple[object, ...]:
            dtypes = tuple(None if a is None else a.dtype for a in (*layer._rows_stored(), layer.bias))
            return (dtypes, layer.in_features, layer._quantization)

        return all(layer._stored is not None for layer in layers) and len({key(a) for a in layers}) == 1

    @staticmethod
    def join(layers: Sequence[Linear]) -> Linear:
        """One layer whose output is the outputs of `layers` in a row: one call instead of several."""
        if not Linear.can_join(layers):
            raise ValueError(
                "[Linear.join] layers must share in_features, format, dtypes and whether they have a bias, and must "
                "not have been used yet."
            )
        weight, scales, biases, bias = (
            None if parts[0] is None else mx.concatenate(list(parts))
            for parts in zip(*((*layer._rows_stored(), layer.bias) for layer in layers), strict=True)
        )
        assert weight is not None
        return Linear(weight, scales, biases, bias, *layers[0]._quantization)


class Embedding(Linear):
    """A table of rows by token id, over the same storage; calling it applies it as a tied head."""

    def rows(self, ids: mx.array, dtype: mx.Dtype) -> mx.array:
        """``[..., k]`` rows of ``ids`` (int32) in ``dtype``; only these rows are dequantized."""
        packed = self._pack()
        if packed is not None:
            return packed.rows(ids, dtype)
        weight, scales, biases = (None if a is None else a[ids] for a in self._rows_stored())
        assert weight is not None
        if scales is None:
            return weight.astype(dtype)
        group_size, bits, mode = self._quantization
        if mode == "affine":
            assert biases is not None
            # f32: MLX's CPU kernels emulate half precision, some fifty times slower.
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(weight, scales, biases, group_size, bits, mode).astype(dtype)

"""Linear layers: dense and affine quantized weights, and the gated activation between two of them."""

from __future__ import annotations

import mlx.core as mx

from .. import _ext
from .arguments import argument_errors
from .device import Stream, on_cpu


@argument_errors("linear")
def linear(x: mx.array, weight: mx.array, bias: mx.array | None = None, *, stream: Stream = None) -> mx.array:
    """``x @ weight.T + bias``.

    On CPU and for up to 64 rows on CUDA a compiled kernel runs, which reads 16-bit weights as they are; other
    products on a GPU are MLX's matmul.

    Parameters
    ----------
    x : mx.array
        ``[..., k]``, float32, float16 or bfloat16, any strides.
    weight : mx.array
        ``[n, k]``, float32, float16 or bfloat16; it need not have the dtype of ``x``.
    bias : mx.array, optional
        ``[n]``.

    Returns
    -------
    mx.array
        ``[..., n]`` of the dtype of ``x``.

    Raises
    ------
    ValueError
        On a shape or dtype mismatch.

    Notes
    -----
    Sums are f32, in an order that depends on ``k`` alone, so a row of ``x`` gives the same bits in any batch that
    the same kernel takes, and with any number of threads. Each weight is read once for up to 384 rows of ``x``.
    """
    return _ext.linear(x, weight, bias, stream=stream)


@argument_errors("quantized_linear")
def quantized_linear(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    bias: mx.array | None = None,
    group_size: int = 64,
    bits: int = 4,
    *,
    stream: Stream = None,
) -> mx.array:
    """``x @ w.T + bias`` with MLX's affine quantized weight, ``w = scales * q + biases`` for every group.

    On CPU and for up to 64 rows, 4 bits and groups of 64 or 128 on CUDA a compiled kernel runs; the rest on a GPU is
    ``mx.quantized_matmul``.

    Parameters
    ----------
    x : mx.array
        ``[..., k]``, float32, float16 or bfloat16, any strides.
    weight : mx.array
        ``[n, k * bits / 32]`` uint32, as ``mx.quantize`` writes it.
    scales, biases : mx.array
        ``[n, k / group_size]``, float32, float16 or bfloat16; they need not have the dtype of ``x``.
    bias : mx.array, optional
        ``[n]``, the layer's bias vector.
    group_size : int
        32, 64 or 128.
    bits : int
        4 or 8.

    Returns
    -------
    mx.array
        ``[..., n]`` of the dtype of ``x``.

    Raises
    ------
    ValueError
        On a shape, dtype or value that does not fit.

    Notes
    -----
    CPU: weights are dequantized to f32 in registers or in a 64 KB panel, never as a whole; the order of sums
    is that of :func:`linear`.
    """
    return _ext.quantized_linear(x, weight, scales, biases, bias, group_size, bits, stream=stream)


class PackedWeight:
    """A weight in the layout that the CPU kernels read fastest: 64 rows interleaved.

    Packing copies the weight once; it takes as many bytes as before, but for padding of ``n`` to 64.
    ``packed(x)`` gives the same bits as :func:`linear` or :func:`quantized_linear` of the weight, in less time,
    since memory is read front to back. CPU only.

    Parameters
    ----------
    weight, scales, biases, group_size, bits
        As :func:`quantized_linear` takes them, or a dense ``weight`` alone, as :func:`linear` takes it.

    Raises
    ------
    ValueError
        On a shape, dtype or value that does not fit.
    """

    __slots__ = ("arrays", "layout")

    @argument_errors("pack_linear")
    def __init__(
        self,
        weight: mx.array,
        scales: mx.array | None = None,
        biases: mx.array | None = None,
        group_size: int = 0,
        bits: int = 0,
        *,
        stream: Stream | mx.DeviceType = mx.cpu,
    ) -> None:
        self.arrays: list[mx.array] = _ext.pack_linear(
            weight, scales, biases, group_size, bits, stream=stream
        )
        if scales is None:
            form, k, group_size = str(weight.dtype).removeprefix("mlx.core."), weight.shape[1], 0
        else:
            form, k = f"q{bits}", weight.shape[1] * 32 // bits
        self.layout = _ext.PackedLinear(weight.shape[0], k, form, group_size)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    @argument_errors("packed_linear")
    def __call__(
        self, x: mx.array, bias: mx.array | None = None, *, stream: Stream | mx.DeviceType = mx.cpu
    ) -> mx.array:
        """``x @ w.T + bias``; ``x`` and ``bias`` as :func:`linear` takes them."""
        return _ext.packed_linear(x, self.arrays, self.layout, bias, stream=stream)

    @argument_errors("packed_rows")
    def rows(self, ids: mx.array, dtype: mx.Dtype, *, stream: Stream | mx.DeviceType = mx.cpu) -> mx.array:
        """Rows ``ids`` (int32, any shape) as ``[..., k]`` of ``dtype``; NaN for ids outside of the table."""
        return _ext.packed_rows(ids, self.arrays, self.layout, dtype, stream=stream)


@argument_errors("swiglu")
def swiglu(gate: mx.array, up: mx.array | None = None, *, stream: Stream = None) -> mx.array:
    """``silu(gate) * up`` in one pass.

    Parameters
    ----------
    gate : mx.array
        ``[..., features]``; without ``up`` it is ``[..., 2 * features]`` and holds gate and up, in this order,
        as one merged projection gives them.
    up : mx.array, optional
        Like ``gate``.

    Returns
    -------
    mx.array
        ``[..., features]`` of the dtype of ``gate``.

    Raises
    ------
    ValueError
        On a shape or dtype mismatch.
    """
    if on_cpu(stream):
        return _ext.swiglu(gate, up, stream=stream)
    if up is None:
        gate, up = mx.split(gate, 2, axis=-1, stream=stream)
    sigmoid = mx.sigmoid(gate, stream=stream)
    return mx.multiply(mx.multiply(gate, sigmoid, stream=stream), up, stream=stream)

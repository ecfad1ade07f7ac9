"""Where ops run, and arrays of the host on that device."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy.typing as npt

from .. import _ext

Stream = mx.Stream | mx.Device | mx.DeviceType | None


def on_cpu(stream: Stream = None) -> bool:
    """Whether an op with this ``stream`` argument (default: MLX's default device) runs on the CPU."""
    if stream is None:
        stream = mx.default_device()
    device = stream.device if isinstance(stream, mx.Stream) else stream
    return bool(device == mx.cpu)


def to_device(host: npt.NDArray[Any], stream: Stream = None) -> mx.array:
    """``mx.array(host)`` of int32, uint32 or float32, for small arrays that every step makes, read by ops on ``stream``.

    On CUDA it lies in device memory: MLX's arrays of host data are in managed memory, whose pages move when a
    kernel first looks at them. Such an array is for the GPU's ops: the host may read it before it is there.
    """
    if stream is not None and on_cpu(stream):
        return mx.array(host)
    return _ext.to_device(host)


def to_list(array: mx.array) -> list[Any]:
    """``array.tolist()``, for small results that the host reads every step.

    On CUDA they are copied: reading an array through MLX moves it to managed memory first.
    """
    values: list[Any] = _ext.to_list(array)
    return values

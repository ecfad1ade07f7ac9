"""Arrays of the host on the device."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy.typing as npt

from .. import _ext


def to_device(host: npt.NDArray[Any]) -> mx.array:
    """``mx.array(host)`` of int32, uint32 or float32, for small arrays that every step makes.

    On CUDA it lies in device memory: MLX's arrays of host data are in managed memory, whose pages move when a
    kernel first looks at them.
    """
    return _ext.to_device(host)


def to_list(array: mx.array) -> list[Any]:
    """``array.tolist()``, for small results that the host reads every step.

    On CUDA they are copied: reading an array through MLX moves it to managed memory first.
    """
    values: list[Any] = _ext.to_list(array)
    return values

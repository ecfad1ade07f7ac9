"""The device that ops without a stream run on, and what lies there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx


@contextlib.contextmanager
def default_device(device: mx.Device) -> Iterator[None]:
    """The default device, of all threads, until the block ends."""
    before = mx.default_device()
    mx.set_default_device(device)
    try:
        yield
    finally:
        mx.set_default_device(before)


def uploaded(array: mx.array) -> list[Any]:
    """The values of an array of `to_device`: an op reads them in their turn, the host might before they are there."""
    values: list[Any] = (array + 0).tolist()
    return values

"""The device that ops without a stream run on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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

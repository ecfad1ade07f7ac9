"""Huge pages change where arrays lie, never what they hold."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext.ops import memory

pytestmark = pytest.mark.usefixtures("on_each_device")


@pytest.mark.parametrize("shape", [(3,), (0, 4), (700, 1000), (3, 1 << 20)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_zeros(shape, dtype):
    out = memory.zeros(shape, dtype)
    assert out.shape == shape
    assert out.dtype == dtype
    assert mx.array_equal(out, mx.zeros(shape, dtype))


@pytest.mark.parametrize("megabytes", [1, 8, 80])
def test_zeros_of_memory_that_was_used_before(megabytes):
    """Small ones come from malloc's heap, which keeps what it was given back."""
    for _ in range(3):
        out = memory.zeros((megabytes, 1 << 18), mx.float32)
        held = np.array(out, copy=False)
        assert not held.any()
        held[:] = np.nan
        del held, out


@pytest.mark.skipif(
    sys.platform != "linux" or mx.is_available(mx.gpu), reason="pages are mapped lazily by Linux, for the CPU"
)
def test_zeros_take_memory_when_they_are_used():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

    before = resident()
    out = memory.zeros((256, 1 << 18), mx.float32)
    assert resident() - before < 32
    np.array(out, copy=False)[:128] = 1
    assert 128 - 4 <= resident() - before < 128 + 32
    assert np.array(out[128:]).max() == 0


def test_collapsed_arrays_keep_their_contents():
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(n).astype(np.float32) for n in (3, 100_000, 200_000, 3_000_000)]
    arrays = [mx.array(v) for v in values]
    addresses = [np.array(a, copy=False).ctypes.data for a in arrays]
    memory.use_huge_pages(arrays)
    for array, value, address in zip(arrays, values, addresses, strict=True):
        assert np.array(array, copy=False).ctypes.data == address
        np.testing.assert_array_equal(np.array(array), value)

"""Huge pages change where arrays lie, never what they hold."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext.ops import memory


@pytest.mark.parametrize("shape", [(3,), (0, 4), (700, 1000), (3, 1 << 20)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_zeros(shape, dtype):
    out = memory.zeros(shape, dtype)
    assert out.shape == shape
    assert out.dtype == dtype
    assert mx.array_equal(out, mx.zeros(shape, dtype))


def test_collapsed_arrays_keep_their_contents():
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(n).astype(np.float32) for n in (3, 100_000, 200_000, 3_000_000)]
    arrays = [mx.array(v) for v in values]
    addresses = [np.array(a, copy=False).ctypes.data for a in arrays]
    memory.use_huge_pages(arrays)
    for array, value, address in zip(arrays, values, addresses, strict=True):
        assert np.array(array, copy=False).ctypes.data == address
        np.testing.assert_array_equal(np.array(array), value)

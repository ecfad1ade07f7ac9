"""The pool's arrays."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext.kvcache.pool import KVPool


@pytest.mark.parametrize(("layout", "shape"), [("NHD", (6, 4, 3, 16)), ("HND", (6, 3, 4, 16))])
def test_whole_pages_are_copied(layout, shape):
    """All are read before any is written."""
    pool = KVPool(2, 6, 4, 3, 16, mx.float32, layout)
    before = [mx.random.normal(shape) for _ in range(4)]
    pool.k_pages, pool.v_pages = before[:2], before[2:]
    want = [np.array(pages) for pages in before]
    for pages in want:
        pages[[4, 1]] = pages[[1, 2]]
    pool.copy_pages([1, 2], [4, 1])
    for got, expected in zip([*pool.k_pages, *pool.v_pages], want, strict=True):
        assert np.array_equal(np.array(got), expected)

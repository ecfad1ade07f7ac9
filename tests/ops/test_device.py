"""Host arrays to the device and small results back."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext.ops.device import to_device, to_list

pytestmark = pytest.mark.usefixtures("on_each_device")


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.float32])
@pytest.mark.parametrize("shape", [(0,), (1,), (5, 8), (70_000,)])
def test_what_goes_up_comes_down(rng, dtype, shape):
    host = rng.integers(0, 1000, shape).astype(dtype)
    made = to_device(host)
    kept = host.copy()
    host[...] = 0  # a copy was taken
    assert np.array_equal(np.array(made + 0), kept)


def test_what_is_meant_for_the_cpu_can_be_read_at_once(rng):
    for _ in range(50):
        host = rng.integers(0, 1000, 5000).astype(np.uint32)
        for stream in (mx.cpu, mx.default_stream(mx.cpu)):
            assert np.array_equal(np.array(to_device(host, stream)), host)


def test_uploads_follow_each_other(rng):
    """Buffers are handed out again while kernels that read them may still be queued."""
    total, want = mx.zeros((64,), mx.int32), np.zeros(64, np.int32)
    for _ in range(200):
        host = rng.integers(0, 1000, 64).astype(np.int32)
        total, want = total + to_device(host), want + host
        mx.async_eval(total)
    assert np.array_equal(np.array(total), want)


def test_lists():
    x = mx.arange(1000).astype(mx.int32)
    assert to_list(x * 2) == [2 * i for i in range(1000)]
    assert to_list(x[:4] > 1) == [False, False, True, True]
    assert to_list(x[::300]) == [0, 300, 600, 900]
    assert to_list(mx.array([[1.5, 2.0]])) == [[1.5, 2.0]]


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"\[to_device\] host must be int32, uint32 or float32"):
        to_device(np.zeros(3))

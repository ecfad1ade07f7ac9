"""add_rms_norm against the float64 reference and MLX's own two ops."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import add_rms_norm
from mlxcel_ext.ops import reference
from tests.support.compare import assert_close, to_numpy

EPS = 1e-5


def inputs(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[mx.array, ...]:
    x, residual = (mx.array(rng.standard_normal(shape), dtype) for _ in range(2))
    return x, residual, mx.array(rng.standard_normal(shape[-1]), dtype)


@pytest.mark.parametrize("hidden", [1, 7, 8, 64, 576, 1000, 4096])
@pytest.mark.parametrize("rows", [1, 2, 129])
def test_matches_reference(stream, dtype, rng, rows, hidden):
    x, residual, weight = inputs(rng, (rows, hidden), dtype)
    normed, total = add_rms_norm(x, residual, weight, EPS, stream=stream)
    _, want_total = reference.add_rms_norm(to_numpy(x), to_numpy(residual), to_numpy(weight), EPS)
    assert_close(total, want_total, ulps=0.51)
    # The sum is rounded before it is squared, so the second half starts from the rounded sum.
    want, _ = reference.add_rms_norm(to_numpy(total), 0.0, to_numpy(weight), EPS)
    assert_close(normed, want, ulps=4 if dtype == mx.float32 else 1)


def test_equals_mlx(stream, dtype, rng):
    x, residual, weight = inputs(rng, (5, 3, 576), dtype)
    normed, total = add_rms_norm(x, residual, weight, EPS, stream=stream)
    assert mx.array_equal(total, x + residual)
    assert_close(normed, to_numpy(mx.fast.rms_norm(x + residual, weight, EPS, stream=stream)), ulps=16)


def test_weight_bias_is_gemmas(stream, rng):
    x, residual, weight = inputs(rng, (4, 640), mx.float32)
    biased, _ = add_rms_norm(x, residual, weight, EPS, 1.0, stream=stream)
    plain, _ = add_rms_norm(x, residual, weight + 1.0, EPS, stream=stream)
    assert_close(biased, to_numpy(plain), ulps=4)


def test_strided_inputs(stream, dtype, rng):
    x, residual, _ = inputs(rng, (64, 48), dtype)
    weight = mx.array(rng.standard_normal(128), dtype)
    got = add_rms_norm(x.T, residual.T, weight[::2], EPS, stream=stream)
    want = add_rms_norm(*map(mx.contiguous, (x.T, residual.T, weight[::2])), EPS, stream=stream)
    assert mx.array_equal(got[0], want[0])
    assert mx.array_equal(got[1], want[1])


def test_special_rows_stay_in_their_rows(stream, dtype):
    x = mx.ones((4, 64), dtype)
    x[1, 3] = float("nan")
    x[2, 5] = float("inf")
    normed, total = add_rms_norm(x, mx.zeros_like(x), mx.ones(64, dtype), EPS, stream=stream)
    assert np.isnan(to_numpy(normed)[1]).all()
    assert np.isinf(to_numpy(total)[2, 5])
    assert np.isfinite(to_numpy(normed)[[0, 3]]).all()


def test_empty_batch(stream, dtype):
    x = mx.zeros((0, 64), dtype)
    normed, total = add_rms_norm(x, x, mx.ones(64, dtype), EPS, stream=stream)
    assert normed.shape == total.shape == (0, 64)
    mx.eval(normed, total)


def test_runs_are_bitwise_equal(stream, dtype, rng):
    x, residual, weight = inputs(rng, (33, 1000), dtype)
    first, _ = add_rms_norm(x, residual, weight, EPS, stream=stream)
    for _ in range(3):
        again, _ = add_rms_norm(x, residual, weight, EPS, stream=stream)
        assert mx.array_equal(first, again)


def test_compile_merges_equal_nodes_only(stream, rng):
    x, residual, weight = inputs(rng, (3, 64), mx.float32)

    @mx.compile
    def both(x, residual, weight):
        a, _ = add_rms_norm(x, residual, weight, EPS, stream=stream)
        b, _ = add_rms_norm(x, residual, weight, EPS, 1.0, stream=stream)
        c, _ = add_rms_norm(x, residual, weight, 1.0, stream=stream)
        return a, b, c

    a, b, c = both(x, residual, weight)
    assert mx.array_equal(a, add_rms_norm(x, residual, weight, EPS, stream=stream)[0])
    assert not mx.array_equal(a, b)
    assert not mx.array_equal(a, c)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"residual": mx.zeros((2, 5))}, r"\[add_rms_norm\] residual must have shape \(2,4\), got \(2,5\)"),
        ({"weight": mx.zeros((5,))}, r"\[add_rms_norm\] weight must have shape \(4\), got \(5\)"),
        ({"weight": mx.zeros((4,), mx.float16)}, r"\[add_rms_norm\] weight must be float32, got float16"),
        (
            {"x": mx.zeros((2, 4), mx.int32)},
            r"\[add_rms_norm\] x must be float32, float16 or bfloat16, got int32",
        ),
        ({"x": mx.array(1.0)}, r"\[add_rms_norm\] x must have at least one dimension"),
        ({"eps": -1.0}, r"\[add_rms_norm\] eps must be at least 0, got -1"),
        ({"eps": float("nan")}, r"\[add_rms_norm\] eps must be at least 0, got nan"),
    ],
)
def test_bad_input_is_a_value_error(change, text):
    good = {"x": mx.zeros((2, 4)), "residual": mx.zeros((2, 4)), "weight": mx.zeros((4,)), "eps": EPS}
    with pytest.raises(ValueError, match=text):
        add_rms_norm(**(good | change))


def test_gradients_are_refused():
    x = mx.ones((2, 4))
    with pytest.raises(ValueError, match=r"\[add_rms_norm\] is for inference"):
        mx.grad(lambda x: add_rms_norm(x, x, mx.ones(4), EPS, stream=mx.cpu)[0].sum())(x)

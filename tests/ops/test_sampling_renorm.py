"""top_k_renorm, top_p_renorm, min_p_renorm and top_k_mask against float64 sorts."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import min_p_renorm, top_k_mask, top_k_renorm, top_p_renorm
from mlxcel_ext.ops import reference_sampling as reference
from tests.conftest import MANY
from tests.support.compare import assert_close, to_numpy

VOCABS = [1, 2, 65, 1000, 32000]


def probs_of(rng: np.random.Generator, batch: int, vocab: int, dtype: mx.Dtype) -> mx.array:
    """Peaked and flat rows; half of them with many ties and zeros."""
    logits = rng.standard_normal((batch, vocab)) * rng.choice([0.1, 1.0, 5.0], (batch, 1))
    logits[::2] = np.round(logits[::2] * 2) / 2
    logits[::4][rng.random(logits[::4].shape) < 0.3] = -np.inf
    return mx.softmax(mx.array(logits, mx.float32), axis=-1).astype(dtype)


@pytest.mark.parametrize("vocab", VOCABS)
def test_top_k_renorm(stream, dtype, rng, vocab):
    probs = probs_of(rng, 24, vocab, dtype)
    k = rng.choice([0, -1, 1, 2, 7, 50, 600, vocab, vocab + 1], 24)
    got = top_k_renorm(probs, k, stream=stream)
    assert got.dtype == dtype
    want = [reference.top_k_renorm(p, int(n)) for p, n in zip(to_numpy(probs), k, strict=True)]
    np.testing.assert_array_equal(to_numpy(got) > 0, _representable(np.array(want), dtype))
    assert_close(got, want, ulps=4)


@pytest.mark.parametrize("vocab", VOCABS)
def test_top_p_renorm(stream, rng, vocab):
    probs = probs_of(rng, 24, vocab, mx.float32)
    p = rng.choice([0.0, 1e-3, 0.1, 0.5, 0.9, 0.999, 1.0, 2.0], 24)
    got = to_numpy(top_p_renorm(probs, p, stream=stream))
    for row, given, share in zip(got, to_numpy(probs), p, strict=True):
        want = reference.top_p_renorm(given, float(share))
        if np.array_equal(row > 0, want > 0):
            np.testing.assert_allclose(row, want, rtol=1e-5)
            continue
        # One token more or less, where the sums lie within f32 rounding of the share.
        order = np.lexsort((np.arange(vocab), -given))
        before = np.cumsum(given[order]) - given[order]
        gap = np.abs(before / given.sum() - np.float32(share)).min()
        assert gap < 1e-6
        assert np.count_nonzero((row > 0) != (want > 0)) == 1


@pytest.mark.parametrize("vocab", VOCABS)
def test_min_p_renorm(stream, rng, vocab):
    probs = probs_of(rng, 24, vocab, mx.float32)
    p = rng.choice([0.0, 0.01, 0.25, 0.5, 1.0], 24)
    want = [reference.min_p_renorm(row, float(m)) for row, m in zip(to_numpy(probs), p, strict=True)]
    assert_close(min_p_renorm(probs, p, stream=stream), want, ulps=8)


@pytest.mark.parametrize("vocab", VOCABS)
def test_top_k_mask(stream, dtype, rng, vocab):
    logits = mx.array(np.round(rng.standard_normal((24, vocab)) * 4) / 4, dtype)
    k = rng.choice([0, -1, 1, 2, 7, 50, 600, vocab, vocab + 1], 24)
    got = top_k_mask(logits, k, stream=stream)
    assert got.dtype == dtype
    want = [reference.top_k_mask(x, int(n)) for x, n in zip(to_numpy(logits), k, strict=True)]
    np.testing.assert_array_equal(to_numpy(got), want)


def test_large_vocabulary(stream, rng):
    probs = probs_of(rng, 2, 262144, mx.float32)
    for op, want, value in (
        (top_k_renorm, reference.top_k_renorm, 1000),
        (top_p_renorm, reference.top_p_renorm, 0.5),
        (min_p_renorm, reference.min_p_renorm, 0.25),
        (top_k_mask, reference.top_k_mask, 100_000),
    ):
        got = to_numpy(op(probs, value, stream=stream))
        for row, given in zip(got, to_numpy(probs), strict=True):
            kept = want(given, value)
            differ = np.count_nonzero((row > 0) != (kept > 0))
            assert differ <= (op is top_p_renorm)  # where f32 sums lie at the share
            np.testing.assert_allclose(row[kept > 0], kept[kept > 0], rtol=1e-4, atol=differ)


def test_subnormal_probabilities_count(stream):
    tiny = np.float32(1e-42)
    probs = mx.array(np.array([[3, 1, 0, 2, 2]], np.float32) * tiny)
    assert np.flatnonzero(to_numpy(top_k_mask(probs, 2, stream=stream))[0] > 0).tolist() == [0, 3]
    got = to_numpy(top_k_renorm(probs, 2, stream=stream))[0]
    assert np.flatnonzero(got > 0).tolist() in ([0, 3], [])  # 1 / sum may be beyond f32


def test_many_rows(stream, rng):
    """More than the 65,535 blocks that a grid has in its second dimension."""
    batch = min(MANY, 70_000)
    probs = rng.random((batch, 3)).astype(np.float32)
    got = to_numpy(top_k_renorm(mx.array(probs), 1, stream=stream))
    assert np.array_equal(np.argmax(got, axis=1), np.argmax(probs, axis=1))


def test_rows_without_mass_stay_zero(stream):
    probs = mx.zeros((3, 40))
    for op, value in ((top_k_renorm, 5), (top_p_renorm, 0.5), (min_p_renorm, 0.5)):
        assert not to_numpy(op(probs, value, stream=stream)).any()


def test_nan_and_negative_values_have_no_mass(stream):
    probs = mx.array([[float("nan"), -1.0, 0.25, 0.25, 0.5]])
    want = [[0, 0, 0.25, 0.25, 0.5]]
    for op, value in ((top_k_renorm, 4), (top_p_renorm, 0.99), (min_p_renorm, 0.1)):
        np.testing.assert_allclose(to_numpy(op(probs, value, stream=stream)), want, atol=1e-7)


def test_unnormalised_rows_are_normalised(stream, rng):
    weights = mx.array(rng.random((4, 300)) * 50, mx.float32)
    for op, value in ((top_k_renorm, 300), (top_p_renorm, 1.0), (min_p_renorm, 0.0)):
        np.testing.assert_allclose(to_numpy(op(weights, value, stream=stream)).sum(axis=1), 1.0, rtol=1e-5)


def test_empty_batch(stream):
    assert top_k_renorm(mx.zeros((0, 5)), 2, stream=stream).shape == (0, 5)


@pytest.mark.parametrize(
    ("op", "value", "text"),
    [
        (top_k_renorm, 1.5, r"\[top_k_renorm\] top_k must be integers"),
        (top_k_renorm, [1, 2, 3], r"\[top_k_renorm\] top_k must be one value or 2"),
        (top_p_renorm, float("nan"), r"\[top_p_renorm\] top_p must be numbers"),
        (min_p_renorm, [[0.1]], r"\[min_p_renorm\] min_p must be one value or 2"),
        (top_k_mask, 0.5, r"\[top_k_mask\] top_k must be integers"),
    ],
)
def test_bad_values_are_value_errors(op, value, text):
    with pytest.raises(ValueError, match=text):
        op(mx.zeros((2, 8)), value)


def test_bad_probs_are_value_errors():
    with pytest.raises(ValueError, match=r"\[top_p_renorm\] probs must be float32, float16 or bfloat16"):
        top_p_renorm(mx.zeros((2, 8), mx.int32), 0.5)
    with pytest.raises(ValueError, match=r"\[top_k_mask\] the first argument must have 2 dimensions"):
        top_k_mask(mx.zeros((8,)), 1)


def _representable(want: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Where a value is above 0 once rounded to the dtype."""
    return to_numpy(mx.array(want, mx.float32).astype(dtype)) > 0

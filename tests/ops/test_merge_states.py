"""merge_states: the algebra of softmax states."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import lse_to_natural, merge_states
from mlxcel_ext.ops import reference
from tests.support.compare import assert_close, to_numpy


def states(rng, n, heads=3, dim=64, dtype=mx.float32) -> tuple[mx.array, mx.array]:
    v = mx.array(rng.standard_normal((n, heads, dim)), dtype)
    return v, mx.array(rng.standard_normal((n, heads)) * 5, mx.float32)


@pytest.mark.parametrize("dim", [1, 7, 64, 80, 128, 512, 1024])
@pytest.mark.parametrize("heads", [1, 5, 32])
def test_matches_reference(stream, dtype, rng, heads, dim):
    v, lse = states(rng, 11, heads, dim, dtype)
    indptr = [0, 0, 1, 3, 3, 11]
    got, got_lse = merge_states(v, lse, indptr, stream=stream)
    want, want_lse = reference.merge_states(to_numpy(v), to_numpy(lse), indptr)
    assert got.dtype == dtype
    assert_close(got, want, ulps=8 if dtype == mx.float32 else 1, scale=1.0)
    assert_close(got_lse, want_lse, ulps=4, scale=8.0)


def test_a_group_of_one_is_copied_bit_for_bit(stream, dtype, rng):
    v, lse = states(rng, 5, dtype=dtype)
    got, got_lse = merge_states(v, lse, [0, 1, 2, 3, 4, 5], stream=stream)
    assert mx.array_equal(got, v)
    assert mx.array_equal(got_lse, lse)


def test_empty_groups_and_empty_states(stream, dtype, rng):
    v, lse = states(rng, 3, dtype=dtype)
    v[1] = float("nan")  # garbage behind an empty state
    lse[1] = -float("inf")
    got, got_lse = merge_states(v, lse, [0, 0, 3, 3], stream=stream)
    kept = merge_states(
        mx.concatenate([v[:1], v[2:]]), mx.concatenate([lse[:1], lse[2:]]), [0, 2], stream=stream
    )
    assert mx.array_equal(got[1:2], kept[0])
    assert mx.array_equal(got_lse[1:2], kept[1])
    assert (to_numpy(got)[[0, 2]] == 0).all()
    assert (to_numpy(got_lse)[[0, 2]] == -np.inf).all()
    nothing, nothing_lse = merge_states(v[1:2], lse[1:2], [0, 1], stream=stream)
    assert (to_numpy(nothing) == 0).all()
    assert (to_numpy(nothing_lse) == -np.inf).all()


def test_a_nan_state_stays_a_nan(stream, rng):
    v, lse = states(rng, 4)
    lse[1, 2] = float("nan")
    got, got_lse = merge_states(v, lse, [0, 2, 4], stream=stream)
    bad = np.isnan(to_numpy(got_lse))
    assert bad.tolist() == [[False, False, True], [False, False, False]]
    assert np.isnan(to_numpy(got)[0, 2]).all()
    assert np.isfinite(to_numpy(got)[1]).all()


@pytest.mark.parametrize("cuts", [[0, 1, 9], [0, 4, 9], [0, 8, 9], [0, 2, 3, 3, 7, 9], list(range(10))])
def test_regrouping_does_not_matter(stream, rng, cuts):
    v, lse = states(rng, 9)
    lse[4] = -float("inf")
    want, want_lse = merge_states(v, lse, [0, 9], stream=stream)
    half = merge_states(v, lse, cuts, stream=stream)
    got, got_lse = merge_states(*half, [0, len(cuts) - 1], stream=stream)
    assert_close(got, to_numpy(want), ulps=8, scale=1.0)
    assert_close(got_lse, to_numpy(want_lse), ulps=4, scale=8.0)


def test_natural_logarithms_merge_wrongly(stream, rng):
    v, lse = states(rng, 6)
    want, _ = reference.merge_states(to_numpy(v), to_numpy(lse), [0, 6])
    wrong, _ = merge_states(v, lse_to_natural(lse), [0, 6], stream=stream)
    assert np.abs(to_numpy(wrong) - want).max() > 1e-2


def test_lse_to_natural():
    np.testing.assert_allclose(
        to_numpy(lse_to_natural(mx.array([1.0, 10.0]))), np.log([2.0, 1024.0]), rtol=1e-6
    )


def test_huge_and_tiny_denominators(stream):
    v = mx.stack([mx.full((1, 64), float(i)) for i in range(3)])
    lse = mx.array([[1e4], [1e4 + 1], [-1e4]])
    got, got_lse = merge_states(v, lse, [0, 3], stream=stream)
    np.testing.assert_allclose(to_numpy(got), 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(to_numpy(got_lse), 1e4 + np.log2(3), rtol=1e-6)


def test_device_offsets_are_clamped(stream, rng):
    v, lse = states(rng, 4)
    got, got_lse = merge_states(v, lse, mx.array([-5, 2, 99, 3], mx.int32), stream=stream)
    want, want_lse = merge_states(v, lse, [0, 2, 4, 4], stream=stream)
    assert mx.array_equal(got, want)
    assert mx.array_equal(got_lse, want_lse)


def test_strided_and_empty_inputs(stream, dtype, rng):
    v, lse = states(rng, 8, dtype=dtype)
    got = merge_states(v[::2], lse[::2], [0, 1, 4], stream=stream)
    want = merge_states(mx.contiguous(v[::2]), mx.contiguous(lse[::2]), [0, 1, 4], stream=stream)
    assert mx.array_equal(got[0], want[0])
    assert mx.array_equal(got[1], want[1])
    none, none_lse = merge_states(v[:0], lse[:0], [0], stream=stream)
    assert none.shape == (0, 3, 64)
    assert none_lse.shape == (0, 3)


def test_compile_keeps_different_merges_apart(stream, rng):
    v, lse = states(rng, 4)
    one, two = mx.array([0, 4], mx.int32), mx.array([0, 1, 4], mx.int32)
    run = mx.compile(lambda v, lse: [merge_states(v, lse, i, stream=stream)[0] for i in (one, two, one)])
    a, b, c = run(v, lse)
    assert mx.array_equal(a, c)
    assert mx.array_equal(a, merge_states(v, lse, one, stream=stream)[0])
    assert mx.array_equal(b, merge_states(v, lse, two, stream=stream)[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"v_in": mx.zeros((4, 64))}, r"v_in must have 3 dimensions"),
        ({"v_in": mx.zeros((4, 2, 64), mx.int32)}, r"v_in must be float32, float16 or bfloat16, got int32"),
        ({"v_in": mx.zeros((4, 2, 1025))}, r"head_dim must be at most 1024"),
        ({"v_in": mx.zeros((4, 2, 0))}, r"head_dim must be at least 1"),
        ({"lse_in": mx.zeros((4, 3))}, r"lse_in must have shape \(4,2\), got \(4,3\)"),
        ({"lse_in": mx.zeros((4, 2), mx.float16)}, r"lse_in must be float32, got float16"),
        ({"o_indptr": []}, r"o_indptr must have M \+ 1 elements, got none"),
        ({"o_indptr": [0, 5]}, r"o_indptr must not fall and lie in 0\.\.4, got \[0, 5\]"),
        ({"o_indptr": [0, 3, 2]}, r"o_indptr must not fall"),
        ({"o_indptr": [-1, 3]}, r"o_indptr must not fall"),
        ({"o_indptr": mx.zeros((3,))}, r"o_indptr must be int32, got float32"),
    ],
)
def test_bad_input_is_a_value_error(change, text):
    good = {"v_in": mx.zeros((4, 2, 64)), "lse_in": mx.zeros((4, 2)), "o_indptr": [0, 4], "stream": mx.cpu}
    with pytest.raises(ValueError, match=r"^\[merge_states\] " + text):
        merge_states(**(good | change))

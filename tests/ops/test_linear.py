"""linear, quantized_linear, PackedWeight and swiglu against the float64 reference."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import PackedWeight, linear, quantized_linear, set_num_threads, swiglu
from mlxcel_ext import num_threads as get_num_threads
from mlxcel_ext.ops import reference_linear as reference
from tests.conftest import DTYPES
from tests.support.compare import SPACING, to_numpy

ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 24, 25, 49, 129]  # 24, 25: the last row that is unpacked in registers


def quantized(rng: np.random.Generator, n: int, k: int, group_size: int, bits: int, dtype: mx.Dtype):
    """A random weight as (weight, scales, biases), and its float64 values."""
    w, scales, biases = mx.quantize(mx.array(rng.standard_normal((n, k)), mx.float32), group_size, bits)
    scales, biases = scales.astype(dtype), biases.astype(dtype)
    dense = reference.dequantize(np.array(w), to_numpy(scales), to_numpy(biases), group_size, bits)
    return (w, scales, biases), dense


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(rng.standard_normal(shape), mx.float32).astype(dtype)


def assert_product(got: mx.array, x: np.ndarray, w: np.ndarray, terms: float) -> None:
    """|got - x w| within f32 summation of `terms` (the size of |x||w|) and one rounding to the dtype."""
    want = reference.linear(x, w)
    a = to_numpy(got)
    assert a.shape == want.shape
    bound = 0.51 * SPACING[got.dtype] * np.abs(want) + 4 * 2.0**-23 * terms + 2.0**-24
    assert (np.abs(a - want) <= bound).all(), np.max(np.abs(a - want) / bound)


def summed_terms(x: np.ndarray, w: np.ndarray) -> float:
    # Quantized sums run over q, whose products are at most some times larger than those of w.
    return float(3 * np.max(np.abs(x) @ np.abs(w).T)) if x.size else 0.0


@pytest.mark.parametrize("scales", DTYPES)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_matches_reference(dtype, rng, bits, group_size, scales):
    triple, dense = quantized(rng, 37, 3 * 128, group_size, bits, DTYPES[scales])
    for rows in ROWS:
        x = normal(rng, (rows, 384), dtype)
        got = quantized_linear(x, *triple, group_size=group_size, bits=bits, stream=mx.cpu)
        assert got.dtype == dtype
        assert_product(got, to_numpy(x), dense, summed_terms(to_numpy(x), dense))


@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 3), (64, 256), (33, 331), (100, 515)])
def test_dense_matches_reference(dtype, rng, n, k, weights):
    w = normal(rng, (n, k), DTYPES[weights])
    for rows in ROWS:
        x = normal(rng, (rows, k), dtype)
        got = linear(x, w, stream=mx.cpu)
        assert got.dtype == dtype
        assert_product(got, to_numpy(x), to_numpy(w), summed_terms(to_numpy(x), to_numpy(w)))


@pytest.mark.parametrize("n", [1, 8, 31, 32, 33, 65, 200])
def test_columns_of_any_number(rng, n):
    triple, dense = quantized(rng, n, 96, 32, 4, mx.float16)
    for rows in (1, 3, 9):
        x = normal(rng, (rows, 96), mx.float32)
        got = quantized_linear(x, *triple, group_size=32, bits=4, stream=mx.cpu)
        assert_product(got, to_numpy(x), dense, summed_terms(to_numpy(x), dense))


@pytest.mark.parametrize("layout", ["stored", "packed"])
@pytest.mark.parametrize("form", ["q4", "q8", *DTYPES])
def test_a_row_has_the_same_bits_in_any_batch(dtype, rng, form, layout):
    n, k = 70, 640
    if form in DTYPES:
        arrays = (normal(rng, (n, k), DTYPES[form]),)
        packed = PackedWeight(*arrays)
    else:
        arrays, _ = quantized(rng, n, k, 32, int(form[1]), mx.float16)
        packed = PackedWeight(*arrays, 32, int(form[1]))

    def run(x: mx.array) -> mx.array:
        if layout == "packed":
            return packed(x)
        if form in DTYPES:
            return linear(x, *arrays, stream=mx.cpu)
        return quantized_linear(x, *arrays, group_size=32, bits=int(form[1]), stream=mx.cpu)

    x = normal(rng, (800, k), dtype)  # more than one pass of many rows
    whole = run(x)
    for rows, start in itertools.product(ROWS[1:], (0, 5, 671)):
        assert mx.array_equal(run(x[start : start + rows]), whole[start : start + rows]), (rows, start)


@pytest.mark.parametrize("form", ["q4", "q8", *DTYPES])
def test_packed_equals_stored(dtype, rng, form):
    n, k = 77, 352 if form[0] == "q" else 351
    bias = normal(rng, (n,), mx.float32)
    for rows in (1, 2, 4, 6, 50):
        x = normal(rng, (rows, k), dtype)
        if form in DTYPES:
            w = normal(rng, (n, k), DTYPES[form])
            want, packed = linear(x, w, bias, stream=mx.cpu), PackedWeight(w)
        else:
            triple, _ = quantized(rng, n, k, 32, int(form[1]), mx.bfloat16)
            want = quantized_linear(x, *triple, bias, group_size=32, bits=int(form[1]), stream=mx.cpu)
            packed = PackedWeight(*triple, 32, int(form[1]))
        assert mx.array_equal(packed(x, bias), want)


@pytest.mark.parametrize("form", ["q4", "q8", *DTYPES])
def test_rows_of_a_packed_weight(dtype, rng, form):
    n, k = 50, 128
    ids = mx.array([[0, 49], [31, 32]], mx.int32)
    if form in DTYPES:
        w = normal(rng, (n, k), DTYPES[form])
        dense, packed = to_numpy(w), PackedWeight(w)
    else:
        triple, dense = quantized(rng, n, k, 64, int(form[1]), mx.float16)
        packed = PackedWeight(*triple, 64, int(form[1]))
    rows = packed.rows(ids, dtype)
    assert rows.shape == (2, 2, k)
    want = dense[np.array(ids)]
    assert np.all(np.abs(to_numpy(rows) - want) <= 0.51 * SPACING[dtype] * np.abs(want) + 1e-6)
    outside = packed.rows(mx.array([-1, n, 3], mx.int32), dtype)
    assert np.isnan(to_numpy(outside)[:2]).all()
    assert np.isfinite(to_numpy(outside)[2]).all()


def test_a_layout_that_does_not_fit_is_named(rng):
    triple, _ = quantized(rng, 40, 128, 64, 4, mx.float16)
    packed = PackedWeight(*triple, 64, 4)
    packed.layout = type(packed.layout)(40, 127, "q4", 64)
    with pytest.raises(ValueError, match=r"in_features must be a multiple of group_size 64, got 127"):
        packed(normal(rng, (2, 127), mx.float32))


def test_packing_adds_no_bytes_but_padding(rng):
    triple, _ = quantized(rng, 64, 256, 32, 4, mx.float16)
    assert PackedWeight(*triple, 32, 4).nbytes == sum(a.nbytes for a in triple)


def test_bias_is_added_in_f32(dtype, rng):
    triple, dense = quantized(rng, 40, 128, 64, 8, mx.float16)
    bias = normal(rng, (40,), mx.float32)
    for rows in (1, 20):
        x = normal(rng, (rows, 128), dtype)
        got = quantized_linear(x, *triple, bias, group_size=64, bits=8, stream=mx.cpu)
        want = reference.linear(to_numpy(x), dense, to_numpy(bias))
        terms = summed_terms(to_numpy(x), dense)
        assert np.all(np.abs(to_numpy(got) - want) <= 0.51 * SPACING[dtype] * np.abs(want) + 1e-6 * terms)


def test_strided_inputs_and_leading_axes(dtype, rng):
    triple, _ = quantized(rng, 24, 128, 32, 4, mx.float32)
    x = normal(rng, (128, 3, 10), dtype)
    kwargs = {"group_size": 32, "bits": 4, "stream": mx.cpu}
    got = quantized_linear(x.T, *triple, **kwargs)
    want = quantized_linear(mx.contiguous(x.T).reshape(30, 128), *triple, **kwargs)
    assert mx.array_equal(got, want.reshape(10, 3, 24))
    w = normal(rng, (128, 48), dtype)
    assert mx.array_equal(linear(x.T, w.T, stream=mx.cpu), linear(x.T, mx.contiguous(w.T), stream=mx.cpu))


@pytest.mark.parametrize("rows", [3, 12])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_special_values_stay_in_their_row(dtype, rng, rows, bad):
    triple, _ = quantized(rng, 40, 256, 32, 4, mx.float16)
    x = normal(rng, (rows, 256), dtype)
    x[1, 100] = bad
    out = to_numpy(quantized_linear(x, *triple, group_size=32, bits=4, stream=mx.cpu))
    assert not np.isfinite(out[1]).any()
    assert np.isfinite(np.delete(out, 1, axis=0)).all()
    w = mx.ones((40, 256), dtype)
    out = to_numpy(linear(x, w, stream=mx.cpu))
    np.testing.assert_array_equal(out[1], bad)
    assert np.isfinite(np.delete(out, 1, axis=0)).all()


@pytest.mark.parametrize("rows", [1, 40])
def test_threads_do_not_change_a_bit(rng, rows):
    triple, _ = quantized(rng, 1024, 512, 64, 4, mx.float16)
    x = normal(rng, (rows, 512), mx.float32)
    before = get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 3):
            set_num_threads(threads)
            outs.append(quantized_linear(x, *triple, group_size=64, bits=4, stream=mx.cpu))
            mx.eval(outs[-1])
    finally:
        set_num_threads(before)
    assert mx.array_equal(outs[0], outs[1])
    assert mx.array_equal(outs[0], outs[2])


def test_compile_merges_equal_nodes_only(rng):
    triple, _ = quantized(rng, 8, 64, 32, 4, mx.float32)
    x = normal(rng, (3, 64), mx.float32)

    @mx.compile
    def both(x, w, s, b):
        return (
            quantized_linear(x, w, s, b, group_size=32, bits=4, stream=mx.cpu),
            quantized_linear(x, w, s, b, s[:, 0], group_size=32, bits=4, stream=mx.cpu),
        )

    plain, biased = both(x, *triple)
    want = quantized_linear(x, *triple, group_size=32, bits=4, stream=mx.cpu)
    assert mx.array_equal(plain, want)
    assert mx.array_equal(biased, want + triple[1][:, 0])


@pytest.mark.parametrize("shape", [(1, 2), (3, 7), (2, 5, 64), (65, 1536)])
def test_swiglu_matches_reference(dtype, rng, shape):
    gate, up = normal(rng, shape, dtype) * 4, normal(rng, shape, dtype)
    got = swiglu(gate, up, stream=mx.cpu)
    want = reference.swiglu(to_numpy(gate), to_numpy(up))
    bound = 0.51 * SPACING[dtype] * np.abs(want) + 8 * 2.0**-23 * np.abs(want) + 1e-12
    assert np.all(np.abs(to_numpy(got) - want) <= bound + (6e-8 if dtype == mx.float16 else 0))
    merged = swiglu(mx.concatenate([gate, up], axis=-1), stream=mx.cpu)
    assert mx.array_equal(merged, got)


def test_swiglu_at_the_ends_of_exp(dtype):
    gate = mx.array([-1e4, -200.0, 0.0, 200.0, 1e4, float("nan")], mx.float32).astype(dtype)
    out = to_numpy(swiglu(gate, mx.ones(6, dtype), stream=mx.cpu))
    assert (np.abs(out[:3]) < 1e-30).all()  # exp2 ends at 2^127
    np.testing.assert_array_equal(out[3:5], to_numpy(gate)[3:5])
    assert np.isnan(out[5])


W4, S, X = mx.zeros((8, 8), mx.uint32), mx.zeros((8, 2)), mx.zeros((2, 64))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"bits": 3}, r"\[quantized_linear\] bits must be 4 or 8, got 3\."),
        ({"group_size": 16}, r"\[quantized_linear\] group_size must be 32, 64 or 128, got 16\."),
        ({"weight": mx.zeros((8, 8))}, r"\[quantized_linear\] weight must be uint32, got float32\."),
        (
            {"weight": mx.zeros(8, mx.uint32)},
            r"weight must have 2 dimensions \[n, k \* bits / 32\], got shape \(8\)",
        ),
        ({"group_size": 128}, r"weight must hold a multiple of group_size 128 elements a row, got 64\."),
        ({"scales": mx.zeros((8, 3))}, r"\[quantized_linear\] scales must have shape \(8,2\), got \(8,3\)\."),
        ({"biases": mx.zeros((8, 2), mx.float16)}, r"biases must be float32, got float16\."),
        ({"biases": mx.zeros((7, 2))}, r"biases must have shape \(8,2\), got \(7,2\)\."),
        ({"x": mx.zeros((2, 32))}, r"x must have a last dimension of 64 as weight has, got shape \(2,32\)\."),
        ({"x": mx.zeros((2, 64), mx.int32)}, r"x must be float32, float16 or bfloat16, got int32\."),
        ({"x": mx.array(1.0)}, r"x must have at least one dimension, got a scalar\."),
        ({"bias": mx.zeros(7)}, r"\[quantized_linear\] bias must have shape \(8\), got \(7\)\."),
    ],
)
def test_bad_quantized_input_is_a_value_error(change, text):
    good = {"x": X, "weight": W4, "scales": S, "biases": S, "group_size": 32, "bits": 4}
    with pytest.raises(ValueError, match=text):
        quantized_linear(**(good | change), stream=mx.cpu)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: linear(X, mx.zeros((8, 63)), stream=mx.cpu),
            r"\[linear\] x must have a last dimension of 63",
        ),
        (
            lambda: linear(X, W4, stream=mx.cpu),
            r"\[linear\] weight must be float32, float16 or bfloat16, got uint32",
        ),
        (lambda: PackedWeight(W4, S), r"\[pack_linear\] scales and biases must be given together"),
        (
            lambda: PackedWeight(W4, S, S, 32, 4)(mx.zeros((2, 63))),
            r"\[packed_linear\] x must have a last dimension",
        ),
        (lambda: PackedWeight(mx.zeros((8, 8))).rows(S, mx.float32), r"\[packed_rows\] ids must be int32"),
        (
            lambda: swiglu(mx.zeros((2, 3)), stream=mx.cpu),
            r"\[swiglu\] gate must have an even last dimension",
        ),
        (lambda: swiglu(X, S, stream=mx.cpu), r"\[swiglu\] up must have shape \(2,64\), got \(8,2\)"),
    ],
)
def test_bad_input_is_a_value_error(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_gradients_are_refused():
    with pytest.raises(ValueError, match=r"\[linear\] is for inference"):
        mx.grad(lambda x: linear(x, mx.ones((4, 4)), stream=mx.cpu).sum())(mx.ones((2, 4)))


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 31, 64, 65])
@pytest.mark.parametrize(("n", "k"), [(1, 64), (100, 448), (333, 4096)])
def test_few_rows_on_every_device(stream, rng, rows, n, k):
    """What the GPU's own kernels take, and one row more."""
    for dtype in (mx.float16, mx.bfloat16):
        x, bias = normal(rng, (rows, k), dtype), normal(rng, (n,), dtype)
        weight = normal(rng, (n, k), dtype)
        cases = [(linear(x, weight, bias, stream=stream), to_numpy(weight))]
        for group_size in (64, 128):
            if k % group_size == 0:
                triple, dense = quantized(rng, n, k, group_size, 4, dtype)
                got = quantized_linear(x, *triple, bias, group_size, 4, stream=stream)
                cases.append((got, dense))
        for got, dense in cases:
            assert got.dtype == dtype
            want = reference.linear(to_numpy(x), dense) + to_numpy(bias)
            assert np.linalg.norm(to_numpy(got) - want) <= 0.5 * SPACING[dtype] * np.linalg.norm(want)

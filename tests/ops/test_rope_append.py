"""rope_append against the float64 reference: rotation, placement, and that the pool is never copied."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import _ext, rope_append
from mlxcel_ext.ops import reference
from tests.conftest import METAL_EMULATED
from tests.support.compare import assert_close, to_numpy
from tests.support.paged import each_kv_dtype


def frequencies(rotary_dim: int, theta: float = 10000.0) -> mx.array:
    return mx.array(theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim), mx.float32)


class Case:
    """Random q, k, v and pools whose slots are all NaN before."""

    def __init__(
        self, rng, dtype, *, nnz=5, hq=4, hkv=2, dim=64, page_size=4, num_pages=9, layout="NHD", kv_dtype=None
    ):
        def random(*shape):
            return mx.array(rng.standard_normal(shape), dtype)

        self.q, self.k, self.v = random(nnz, hq, dim), random(nnz, hkv, dim), random(nnz, hkv, dim)
        order = (page_size, hkv) if layout == "NHD" else (hkv, page_size)
        self.k_pages, self.v_pages = (
            mx.full((num_pages, *order, dim), float("nan"), kv_dtype or dtype) for _ in "kv"
        )
        mx.eval(self.k_pages, self.v_pages)
        self.slots = rng.permutation(num_pages * page_size)[:nnz].astype(np.int32)
        self.positions = rng.integers(0, 8192, nnz).astype(np.int32)
        self.layout = layout

    def run(self, inv_freq, stream, **options):
        return rope_append(
            self.q,
            self.k,
            self.v,
            self.k_pages,
            self.v_pages,
            mx.array(self.slots),
            mx.array(self.positions),
            inv_freq=inv_freq,
            kv_layout=self.layout,
            stream=stream,
            **options,
        )

    def tokens(self, pages: mx.array) -> np.ndarray:
        """A pool as [slot, head, head_dim]."""
        a = to_numpy(pages)
        if self.layout == "HND":
            a = a.swapaxes(1, 2)
        return a.reshape(-1, *a.shape[2:])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dim", "rotary_dim"), [(64, 64), (80, 80), (96, 32), (112, 112), (128, 128), (256, 64), (64, 0), (6, 6)]
)
@each_kv_dtype
def test_matches_reference(stream, dtype, kv_dtype, rng, dim, rotary_dim, interleaved, layout):
    case = Case(rng, dtype, dim=dim, layout=layout, kv_dtype=kv_dtype)
    inv_freq = frequencies(rotary_dim)
    q_rot, k_pages, v_pages = case.run(inv_freq, stream, interleaved=interleaved, scale=1.25)
    rotate = {"interleaved": interleaved, "scale": 1.25}
    want_q = reference.rope(to_numpy(case.q), case.positions, to_numpy(inv_freq), **rotate)
    want_k = reference.rope(to_numpy(case.k), case.positions, to_numpy(inv_freq), **rotate)
    ulps = 8 if dtype == mx.float32 else 1
    assert_close(q_rot, want_q, ulps=ulps)
    assert (k_pages.dtype, v_pages.dtype) == (kv_dtype, kv_dtype)
    k, v = case.tokens(k_pages), case.tokens(v_pages)
    assert_close(mx.array(k[case.slots], kv_dtype), want_k, ulps=8 if kv_dtype == mx.float32 else 1)
    np.testing.assert_array_equal(v[case.slots], to_numpy(case.v.astype(kv_dtype)))
    untouched = np.setdiff1d(np.arange(len(k)), case.slots)
    assert np.isnan(k[untouched]).all()
    assert np.isnan(v[untouched]).all()


@pytest.mark.skipif(METAL_EMULATED, reason="16-bit pages beside float32 are the CPU's")
@pytest.mark.parametrize("kv_dtype", [mx.float16, mx.bfloat16])
def test_16_bit_pages_hold_the_float32_result_rounded(rng, kv_dtype):
    exact, narrow = (
        Case(np.random.default_rng(3), mx.float32, nnz=40, num_pages=20, kv_dtype=t)
        for t in (mx.float32, kv_dtype)
    )
    want, got = (case.run(frequencies(64), mx.cpu) for case in (exact, narrow))
    assert mx.array_equal(got[0], want[0])
    for a, b in zip(got[1:], want[1:], strict=True):
        assert mx.array_equal(a, b.astype(kv_dtype), equal_nan=True)


@pytest.mark.skipif(METAL_EMULATED, reason="16-bit pages beside float32 are the CPU's")
@pytest.mark.parametrize("rotary_dim", [0, 64])
@pytest.mark.parametrize(
    ("kv_dtype", "largest"), [(mx.float16, 65504.0), (mx.bfloat16, 3.3895313892515355e38)]
)
def test_values_beyond_the_pages_range_stay_finite(rng, kv_dtype, largest, rotary_dim):
    # An infinite key would turn every answer of its request to NaN. What is infinite already stays to be seen.
    case = Case(rng, mx.float32, nnz=1, dim=70 if rotary_dim == 0 else 64, kv_dtype=kv_dtype)
    case.positions[:] = 0
    odd = [largest, 1.001 * largest, -1.001 * largest, np.inf, -np.inf, np.nan, 1.0]
    a = to_numpy(case.v)
    a[0, 0, : len(odd)] = a[0, 1, -len(odd) :] = odd  # in vectors, and behind the last one
    case.k = case.v = mx.array(a, mx.float32)
    _, k_pages, v_pages = case.run(frequencies(rotary_dim), mx.cpu)
    want = np.array([largest, largest, -largest, np.inf, -np.inf, np.nan, 1.0])
    v = case.tokens(v_pages)[case.slots[0]]
    np.testing.assert_array_equal(v[0, : len(odd)], want)
    np.testing.assert_array_equal(v[1, -len(odd) :], want)
    k = case.tokens(k_pages)[case.slots[0]]
    if rotary_dim == 0:
        np.testing.assert_array_equal(k, v)
    else:  # sin 0 * inf is NaN, as in float32 pages
        np.testing.assert_array_equal(k[0, :3], want[:3])
    assert not np.isinf(k[0, :3]).any()


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (7, 1), (32, 8)])
@pytest.mark.parametrize("nnz", [1, 2, 129])
def test_batches_and_heads(stream, rng, nnz, heads):
    case = Case(rng, mx.float32, nnz=nnz, hq=heads[0], hkv=heads[1], num_pages=40)
    inv_freq = frequencies(64)
    q_rot, k_pages, _ = case.run(inv_freq, stream)
    assert_close(q_rot, reference.rope(to_numpy(case.q), case.positions, to_numpy(inv_freq)), ulps=8)
    want_k = reference.rope(to_numpy(case.k), case.positions, to_numpy(inv_freq))
    assert_close(mx.array(case.tokens(k_pages)[case.slots]), want_k, ulps=8)


def test_equals_mlx_rope(stream, rng):
    case = Case(rng, mx.float32, nnz=6)
    case.positions = np.arange(100, 106, dtype=np.int32)
    q_rot, _, _ = case.run(frequencies(64), stream)
    want = mx.fast.rope(case.q.swapaxes(0, 1), 64, traditional=False, base=10000.0, scale=1.0, offset=100)
    # MLX forms its angles in f32: at position 100 that is 100 * 2^-24 radians.
    assert_close(q_rot, to_numpy(want.swapaxes(0, 1)), ulps=256)


def test_far_positions_stay_exact(rng):
    case = Case(rng, mx.float32)
    case.positions = np.array([0, 1, 131_071, 1_000_000, 2**31 - 1], np.int32)
    inv_freq = frequencies(64)
    q_rot, _, _ = case.run(inv_freq, mx.cpu)
    assert_close(q_rot, reference.rope(to_numpy(case.q), case.positions, to_numpy(inv_freq)), ulps=8)


@each_kv_dtype
def test_slot_minus_one_is_rotated_but_not_written(stream, dtype, kv_dtype, rng):
    case = Case(rng, dtype, kv_dtype=kv_dtype)
    kept, case.slots[2] = case.slots[2], -1
    q_rot, k_pages, v_pages = case.run(frequencies(64), stream)
    assert np.isfinite(to_numpy(q_rot)).all()
    assert np.isnan(case.tokens(k_pages)[kept]).all()
    assert np.isnan(case.tokens(v_pages)[kept]).all()


@each_kv_dtype
def test_empty_batch_leaves_the_pool(stream, dtype, kv_dtype, rng):
    case = Case(rng, dtype, nnz=0, kv_dtype=kv_dtype)
    q_rot, k_pages, _ = case.run(frequencies(64), stream)
    assert q_rot.shape == (0, 4, 64)
    assert np.isnan(to_numpy(k_pages)).all()


def test_pool_keeps_its_buffer_over_a_thousand_steps(stream, rng):
    """No step may copy the pool: not its address, not the peak of memory."""
    case = Case(rng, mx.float16, nnz=2, num_pages=4096, page_size=16)
    addresses = [_ext.buffer_address(case.k_pages), _ext.buffer_address(case.v_pages)]
    inv_freq = frequencies(64)
    old_handles = []
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for step in range(1000):
        case.slots = np.array([step, 4096 * 16 - 1 - step], np.int32)
        old_handles.append(case.k_pages)  # an old handle must not force a copy
        _, case.k_pages, case.v_pages = case.run(inv_freq, stream)
        if step % 10 == 9:  # lazy chains of ten steps
            mx.eval(case.k_pages, case.v_pages)
            assert [_ext.buffer_address(case.k_pages), _ext.buffer_address(case.v_pages)] == addresses
    assert mx.get_peak_memory() - before < case.k_pages.nbytes / 4
    buffers = {_ext.buffer_address(handle) for handle in old_handles}
    assert len(buffers) == 1, "buffers that the pool has lived in, over all steps"
    written = ~np.isnan(case.tokens(case.k_pages)).any(axis=(1, 2))
    assert written.sum() == 2000
    np.testing.assert_array_equal(np.flatnonzero(written), np.r_[0:1000, 4096 * 16 - 1000 : 4096 * 16])


def test_a_pool_that_needs_a_copy_is_refused(stream, rng):
    case = Case(rng, mx.float32)
    case.k_pages = mx.full((9, 2, 4, 64), 0.0).swapaxes(1, 2)
    mx.eval(case.k_pages)
    with pytest.raises(
        ValueError, match=r"\[rope_append\] k_pages must be row-contiguous: a pool is never copied"
    ):
        mx.eval(case.run(frequencies(64), stream))


def test_pools_that_share_memory_are_refused(stream, rng):
    case = Case(rng, mx.float32)
    pages, *page = case.k_pages.shape
    both = mx.zeros((2 * pages, *page))
    mx.eval(both)
    case.k_pages, case.v_pages = both[:pages], both[pages:]
    mx.eval(case.run(frequencies(64), stream))  # halves of one buffer are apart
    case.v_pages = case.k_pages
    with pytest.raises(ValueError, match=r"\[rope_append\] k_pages and v_pages must be two pools, got one"):
        case.run(frequencies(64), stream)
    case.k_pages, case.v_pages = both[:pages], both[1 : pages + 1]
    with pytest.raises(ValueError, match=r"\[rope_append\] k_pages and v_pages must not share memory"):
        mx.eval(case.run(frequencies(64), stream))


@each_kv_dtype
def test_strided_inputs(stream, dtype, kv_dtype, rng):
    case = Case(rng, dtype, nnz=6, kv_dtype=kv_dtype)
    inv_freq = frequencies(64)
    want, want_k, _ = case.run(inv_freq, stream)
    want_k = case.tokens(want_k)[case.slots]
    case.q, case.k, case.v = (
        mx.contiguous(a.swapaxes(0, 1)).swapaxes(0, 1) for a in (case.q, case.k, case.v)
    )
    got, got_k, _ = case.run(inv_freq, stream)
    assert mx.array_equal(got, want)
    np.testing.assert_array_equal(case.tokens(got_k)[case.slots], want_k)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"q": mx.zeros((5, 256))},
            r"\[rope_append\] q must have 3 dimensions \[nnz, num_qo_heads, head_dim\], got shape \(5,256\)",
        ),
        (
            {"q": mx.zeros((5, 4, 32))},
            r"\[rope_append\] q must have the pool's head_dim 64, got shape \(5,4,32\)",
        ),
        ({"k": mx.zeros((5, 3, 64))}, r"\[rope_append\] k must have shape \(5,2,64\), got \(5,3,64\)"),
        ({"v": mx.zeros((5, 2, 64), mx.float16)}, r"\[rope_append\] v must be float32, got float16"),
        ({"v_pages": mx.zeros((9, 4, 2, 32))}, r"\[rope_append\] v_pages must have shape"),
        (
            {"k_pages": mx.zeros((9, 3, 2, 64)), "v_pages": mx.zeros((9, 3, 2, 64))},
            r"\[rope_append\] the page size of k_pages must be a power of two from 1 to 256, got 3",
        ),
        ({"q": np.zeros((5, 4, 64))}, r"\[rope_append\] q must be mx\.array, got ndarray"),
        ({"inv_freq": None}, r"\[rope_append\] inv_freq must be mx\.array, got None"),
        ({"table": mx.zeros((4,), mx.int32)}, r"\[rope_append\] slots must have shape \(5\), got \(4\)"),
        ({"positions": mx.zeros((5,), mx.int64)}, r"\[rope_append\] positions must be int32, got int64"),
        (
            {"inv_freq": mx.zeros((33,))},
            r"\[rope_append\] inv_freq must have at most head_dim / 2 = 32 elements, got 33",
        ),
        ({"kv_layout": "NDH"}, r"\[rope_append\] kv_layout must be 'NHD' or 'HND', got 'NDH'"),
    ],
)
def test_bad_input_is_a_value_error(change, text, rng):
    case = Case(rng, mx.float32)
    good = {
        "q": case.q,
        "k": case.k,
        "v": case.v,
        "k_pages": case.k_pages,
        "v_pages": case.v_pages,
        "table": mx.array(case.slots),
        "positions": mx.array(case.positions),
        "inv_freq": frequencies(64),
    }
    with pytest.raises(ValueError, match=text):
        rope_append(**(good | change))


def test_slots_beyond_the_pool_are_not_written(stream, rng):
    case = Case(rng, mx.float32, nnz=3)
    case.slots = np.array([36, 2**31 - 1, 0], np.int32)  # the pool has 36
    _, k_pages, v_pages = case.run(frequencies(64), stream)
    for pages in (k_pages, v_pages):
        assert np.isnan(to_numpy(pages)).sum() == 35 * 2 * 64


def test_more_tokens_than_a_gpu_runs_blocks(stream, rng):
    case = Case(rng, mx.float16, nnz=9000, hq=2, hkv=1, num_pages=2250)
    inv_freq = frequencies(64)
    q_rot, k_pages, v_pages = case.run(inv_freq, stream)
    assert_close(q_rot, reference.rope(to_numpy(case.q), case.positions, to_numpy(inv_freq)), ulps=1)
    want_k = reference.rope(to_numpy(case.k), case.positions, to_numpy(inv_freq))
    assert_close(mx.array(case.tokens(k_pages)[case.slots], mx.float16), want_k, ulps=1)
    np.testing.assert_array_equal(case.tokens(v_pages)[case.slots], to_numpy(case.v))

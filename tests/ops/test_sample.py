"""sample: exact filters, the noise's contract and the distribution of what is drawn."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from mlxcel_ext import SamplingBatch, sample
from mlxcel_ext.ops import reference_sampling as reference
from tests.conftest import MANY, METAL_EMULATED, devices

# Scores and masses are f32 on a GPU: closer than this, another token may win.
NEAR = 1e-5

SPREADS = {"subnormal": 1e-40, "flat": 0.01, "normal": 1.0, "peaked": 6.0}

#: Draws that top-p may turn down before its cut is found exactly, on this machine's GPU.
GPU_TURNS = 4 if mx.cuda.is_available() else 1


def rows_of(rng: np.random.Generator, batch: int, vocab: int) -> dict[str, np.ndarray]:
    """Parameters that mix every kind of row."""
    return {
        "temperature": rng.choice([0.0, 0.3, 0.8, 1.0, 1.7], batch),
        "top_k": rng.choice([0, -1, 1, 2, 5, 50, 200, 700, vocab, vocab + 9], batch),
        "top_p": rng.choice([1.0, 1.5, 0.99, 0.9, 0.5, 0.1, 1e-4, 0.0], batch),
        "min_p": rng.choice([0.0, 0.0, 0.02, 0.3, 1.0], batch),
    }


def check(
    logits: mx.array,
    params: dict[str, np.ndarray],
    seeds: np.ndarray,
    draws: np.ndarray,
    stream: mx.Device,
    **options: bool | str,
) -> None:
    got = sample(logits, SamplingBatch(**params, **options), (seeds, draws), stream=stream)
    ids, valid = np.array(got.ids), np.array(got.valid)
    x = np.array(logits.astype(mx.float32), np.float64)
    for b in range(len(ids)):
        row = {name: values[b].item() for name, values in params.items()}
        want = reference.sample_row(
            x[b],
            **row,
            seed=int(seeds[b]),
            draw=int(draws[b]),
            joint=options.get("order") == "joint",
            temperature_last=options.get("temperature_last", False),
        )
        assert 0 <= ids[b] < x.shape[1]
        assert valid[b] == want.valid
        assert ids[b] == want.id or not want.valid or want.margin < NEAR, f"row {b} {row}: {ids[b]}, {want}"


def keys(rng: np.random.Generator, batch: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.integers(0, 2**64, batch, np.uint64), rng.integers(0, 2**40, batch, np.uint64)


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
@pytest.mark.parametrize("vocab", [1, 2, 3, 63, 64, 65, 111, 512, 1000, 2049, 32000])
def test_equals_the_float64_sort(stream, rng, vocab, spread):
    batch = 64 if vocab < 5000 else 24
    logits = mx.array(rng.standard_normal((batch, vocab)) * spread, mx.float32)
    check(logits, rows_of(rng, batch, vocab), *keys(rng, batch), stream)


@pytest.mark.parametrize("vocab", [7, 64, 1000, 5000])
def test_ties_go_to_the_lower_index(stream, rng, vocab):
    logits = mx.array(np.round(rng.standard_normal((128, vocab)) * 2) / 2, mx.float32)
    check(logits, rows_of(rng, 128, vocab), *keys(rng, 128), stream)


@pytest.mark.parametrize("vocab", [40001, 65536])
def test_short_lists_of_long_rows(stream, rng, vocab):
    """Rows of a small top-k beside rows without a filter: a kernel of their own on a GPU, where the batch is large."""
    batch = 5 if METAL_EMULATED else 40
    x = rng.standard_normal((batch, vocab)).astype(np.float32)
    x[1::4] = np.round(x[1::4] * 4) / 4
    x[2::4].sort(axis=1)
    x[3::4] = -np.sort(-x[3::4], axis=1)
    top_k = np.resize([0, 2, 50, 64, 65, 128, 200, 300, 512], batch)
    params = {
        "temperature": rng.choice([0.7, 1.0, 1.5], batch),
        "top_k": top_k,
        "top_p": np.where(top_k > 0, rng.choice([1.0, 0.9, 0.5], batch), 1.0),
        "min_p": np.where(top_k > 0, rng.choice([0.0, 0.1], batch), 0.0),
    }
    params["temperature"][::7] = 0.0
    check(mx.array(x), params, *keys(rng, batch), stream)
    check(mx.array(x), params, *keys(rng, batch), stream, order="joint")


@pytest.mark.parametrize("options", [{"order": "joint"}, {"temperature_last": True}], ids=str)
def test_other_orders(stream, rng, options):
    logits = mx.array(rng.standard_normal((96, 1500)) * 2, mx.float32)
    check(logits, rows_of(rng, 96, 1500), *keys(rng, 96), stream, **options)


def test_16_bit_logits(stream, dtype, rng):
    logits = mx.array(rng.standard_normal((48, 1003)) * 3, dtype)
    check(logits, rows_of(rng, 48, 1003), *keys(rng, 48), stream)


def test_large_vocabulary(stream, rng):
    logits = mx.array(rng.standard_normal((6, 262144)), mx.float32)
    params = {
        "temperature": np.array([0.0, 1.0, 0.7, 1.0, 1.0, 1.0]),
        "top_k": np.array([0, 0, 50, 1000, 0, 0]),
        "top_p": np.array([1.0, 1.0, 0.9, 0.5, 0.8, 0.999]),
        "min_p": np.array([0.0, 0.0, 0.0, 0.0, 0.1, 0.0]),
    }
    check(logits, params, *keys(rng, 6), stream)


def test_rows_at_the_bound_of_turns_are_exact_and_counted(stream, rng):
    """A flat row of which few tokens are kept turns down most draws."""
    logits = mx.array(rng.standard_normal((64, 2000)) * 0.01, mx.float32)
    params = {"temperature": np.ones(64), "top_k": np.zeros(64, int), "top_p": np.full(64, 1e-3)}
    params["min_p"] = np.zeros(64)
    seeds, draws = keys(rng, 64)
    check(logits, params, seeds, draws, stream)
    rounds = np.array(sample(logits, SamplingBatch(**params), (seeds, draws), stream=stream).rounds)
    bound = 8 if stream == mx.cpu and not METAL_EMULATED else GPU_TURNS
    assert rounds.min() >= 0
    assert rounds.max() == bound
    wide = sample(logits, SamplingBatch(top_p=0.9999), (seeds, draws), stream=stream)
    assert not np.array(wide.rounds).all()


def test_descending_and_clustered_rows(stream, rng):
    """Large values that lie together are the worst case of the block maxima."""
    x = rng.standard_normal((32, 6000))
    x[:16] = -np.sort(-x[:16], axis=1)
    x[16:, 1000:1300] += 5.0
    check(mx.array(x, mx.float32), rows_of(rng, 32, 6000), *keys(rng, 32), stream)


def test_subnormal_probabilities(stream, rng):
    x = rng.standard_normal((32, 300)) * 40
    check(mx.array(x, mx.float32), rows_of(rng, 32, 300), *keys(rng, 32), stream)


@settings(max_examples=60, deadline=None)
@given(
    row=st.lists(st.floats(-30, 30, width=16), min_size=1, max_size=90),
    temperature=st.sampled_from([0.0, 0.25, 1.0, 3.0]),
    top_k=st.integers(-1, 100),
    top_p=st.floats(0.0, 1.0, width=16),
    min_p=st.floats(0.0, 1.0, width=16),
    seed=st.integers(0, 2**64 - 1),
    draw=st.integers(0, 2**64 - 1),
)
@pytest.mark.parametrize("device", devices())
def test_any_row(device, row, temperature, top_k, top_p, min_p, seed, draw):
    params = {
        "temperature": np.array([temperature]),
        "top_k": np.array([top_k]),
        "top_p": np.array([top_p]),
        "min_p": np.array([min_p]),
    }
    check(
        mx.array([row], mx.float32),
        params,
        np.array([seed], np.uint64),
        np.array([draw], np.uint64),
        mx.gpu if device == "gpu" else mx.cpu,
    )


@pytest.mark.parametrize("fill", [-np.inf, np.nan])
def test_a_row_without_a_token_is_invalid_and_alone(stream, dtype, rng, fill):
    x = rng.standard_normal((5, 100))
    x[1] = -np.inf
    x[3, 17] = fill
    params = SamplingBatch(temperature=[0.0, 0.0, 1.0, 1.0, 1.0], top_p=[1.0, 1.0, 0.9, 0.9, 1.0])
    got = sample(mx.array(x, dtype), params, (1, 2), stream=stream)
    assert np.array(got.valid).tolist() == [True, False, True, not np.isnan(fill), True]
    ids = np.array(got.ids)
    assert ((ids >= 0) & (ids < 100)).all()
    x[1], x[3] = 0.0, 0.0
    again = sample(mx.array(x, dtype), params, (1, 2), stream=stream)
    assert np.array_equal(ids[[0, 2, 4]], np.array(again.ids)[[0, 2, 4]])


def test_masked_tokens_are_never_drawn(stream, rng):
    n = min(MANY, 4000)
    x = np.full((n, 70), -np.inf, np.float32)
    x[:, [3, 66]] = -200.0
    params = SamplingBatch(temperature=1.0, top_k=[0, 50] * (n // 2), top_p=[1.0, 1.0, 0.9, 0.9] * (n // 4))
    got = sample(mx.array(x), params, (3, np.arange(n)), stream=stream)
    assert set(np.array(got.ids).tolist()) == {3, 66}
    assert np.array(got.valid).all()


def test_logits_100_apart_never_lose(stream):
    """A uniform of exactly 1 would be infinite noise, and one token in 2^24 draws would win by it."""
    logits = mx.broadcast_to(mx.array([100.0, 0.0, 0.0, 0.0]), (MANY, 4))
    got = sample(logits, SamplingBatch(), (5, mx.arange(MANY).astype(mx.uint64)), stream=stream)
    assert not np.any(np.array(got.ids))


@pytest.mark.parametrize(
    "params",
    [{"top_k": 1}, {"top_p": 0.0}, {"top_p": -1.0}, {"temperature": 0.0}, {"temperature": 1e-6}],
    ids=str,
)
def test_argmax_rows(stream, rng, params):
    x = rng.standard_normal((64, 500)).astype(np.float32)
    x[:, 400] = x[:, 20] = 9.0
    got = sample(mx.array(x), SamplingBatch(**params), (1, 2), stream=stream)
    assert np.array(got.ids).tolist() == [20] * 64


def test_a_draw_depends_on_seed_and_index_alone(stream, rng):
    x = rng.standard_normal((1, 3000)).astype(np.float32)
    params = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}
    alone = sample(mx.array(x), SamplingBatch(**params), (42, 7), stream=stream).ids.item()
    others = np.concatenate([rng.standard_normal((9, 3000)).astype(np.float32), x])
    batch = SamplingBatch(
        temperature=[1.0] * 9 + [0.9], top_k=[0] * 9 + [40], top_p=[0.5] * 9 + [0.95], min_p=[0.1] * 9 + [0.0]
    )
    together = sample(mx.array(others), batch, ([*range(9), 42], [*range(9), 7]), stream=stream)
    assert together.ids[9].item() == alone
    differ = sample(
        mx.broadcast_to(mx.array(x), (200, 3000)),
        SamplingBatch(**params),
        (42, np.arange(200)),
        stream=stream,
    )
    assert len(set(np.array(differ.ids).tolist())) > 10


def test_parameters_may_live_on_the_device(stream, rng):
    x = mx.array(rng.standard_normal((20, 300)), mx.float32)
    params = rows_of(rng, 20, 300)
    seeds, draws = keys(rng, 20)
    host = sample(x, SamplingBatch(**params), (seeds, draws), stream=stream)
    on_device = SamplingBatch(
        temperature=mx.array(params["temperature"], mx.float32),
        top_k=mx.array(params["top_k"]),
        top_p=mx.array(params["top_p"], mx.float32),
        min_p=0.0,
    )
    # min_p stays on the host: the two may be mixed.
    host = sample(x, SamplingBatch(**{**params, "min_p": 0.0}), (seeds, draws), stream=stream)
    got = sample(x, on_device, (mx.array(seeds), mx.array(draws)), stream=stream)
    assert mx.array_equal(host.ids, got.ids)


def test_strided_logits(stream, rng):
    x = mx.array(rng.standard_normal((300, 40)), mx.float32)
    params = SamplingBatch(temperature=1.0, top_p=0.8)
    got = sample(x.T, params, (1, np.arange(40)), stream=stream)
    assert mx.array_equal(got.ids, sample(mx.contiguous(x.T), params, (1, np.arange(40)), stream=stream).ids)


CHI_SQUARE = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 60},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 1.3, "top_k": 90, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("name", CHI_SQUARE)
@pytest.mark.parametrize("vocab", [5, 128])
def test_many_draws_follow_the_distribution(stream, rng, name, vocab):
    params = CHI_SQUARE[name]
    x = (rng.standard_normal(vocab) * 1.5).astype(np.float32)
    n = MANY
    got = sample(
        mx.broadcast_to(mx.array(x), (n, vocab)), SamplingBatch(**params), (9, np.arange(n)), stream=stream
    )
    counts = np.bincount(np.array(got.ids), minlength=vocab)
    kept = reference.kept_tokens(x, **params).mask
    weights = np.where(kept, np.exp(x.astype(np.float64) / params.get("temperature", 1.0)), 0.0)
    assert not counts[~kept].any()
    expected = (weights / weights.sum() * n)[kept]
    assert expected.size == 1 or chisquare(counts[kept], expected).pvalue > 1e-6


def test_vocabulary_of_512(stream, rng):
    x = rng.standard_normal(512).astype(np.float32)
    n = MANY
    ids = []
    for part in range(4):  # 512 MB at a time
        draws = np.arange(n // 4) + part * (n // 4)
        logits = mx.broadcast_to(mx.array(x), (n // 4, 512))
        ids.append(np.array(sample(logits, SamplingBatch(), (2**63 + 1, draws), stream=stream).ids))
    weights = np.exp(x.astype(np.float64))
    counts = np.bincount(np.concatenate(ids), minlength=512)
    assert chisquare(counts, weights / weights.sum() * n).pvalue > 1e-6


def test_a_draw_leaves_other_graphs_alone(stream, rng):
    """MLX updates cached graphs: a kernel that takes the place of a draw must not inherit its cluster size."""
    small = mx.arange(1000)
    logits = mx.array(rng.standard_normal((48, 1003)), mx.float32)
    mx.eval(small, logits)
    for top_p in (0.9, 1.0, 0.9):
        mx.eval(sample(logits, SamplingBatch(top_p=top_p), (1, 2), stream=stream).ids)
        assert np.array_equal(np.array(mx.add(small, 1, stream=stream)), np.arange(1000) + 1)


def test_empty_batch(stream):
    got = sample(mx.zeros((0, 10)), SamplingBatch(), (1, 2), stream=stream)
    assert got.ids.shape == got.valid.shape == (0,)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"logits": mx.zeros((3,))}, r"\[sample\] logits must have 2 dimensions \[batch, vocab\]"),
        ({"logits": mx.zeros((2, 8), mx.int32)}, r"\[sample\] logits must be float32, float16 or bfloat16"),
        ({"logits": mx.zeros((2, 0))}, r"\[sample\] logits must have 1 to 262144 tokens a row, got 0"),
        ({"logits": mx.zeros((1, 262145))}, r"tokens a row, got 262145"),
        ({"rng": ([1, 2, 3], 0)}, r"\[sample\] seed must be one value or 2, one a row, got shape \(3,\)"),
        ({"rng": (-1, 0)}, r"\[sample\] seed must be integers in 0\.\.2\^64-1"),
        ({"rng": (1, 0.5)}, r"\[sample\] draw must be integers"),
        ({"params": SamplingBatch(top_k=[1, 2, 3])}, r"\[sample\] top_k must be one value or 2"),
    ],
)
def test_bad_input_is_a_value_error(change, text):
    good = {"logits": mx.zeros((2, 8)), "params": SamplingBatch(), "rng": (1, 2)}
    with pytest.raises(ValueError, match=text):
        sample(**(good | change))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"temperature": -0.1}, r"\[sample\] temperature must be in 0\.\.inf, got -0.1"),
        ({"temperature": float("nan")}, r"temperature must be in"),
        ({"top_k": 1.5}, r"top_k must be integers"),
        ({"top_k": -2}, r"top_k must be in -1"),
        ({"top_p": float("nan")}, r"top_p must be in"),
        ({"min_p": 1.5}, r"min_p must be in 0\.\.1"),
        ({"order": "random"}, r"order must be 'top_k_first' or 'joint'"),
    ],
)
def test_bad_parameters_are_value_errors(value, text):
    with pytest.raises(ValueError, match=text):
        SamplingBatch(**value)


def test_gradients_are_refused():
    def loss(x: mx.array) -> mx.array:
        return sample(x, SamplingBatch(), (1, 2), stream=mx.cpu).ids.astype(mx.float32).sum()

    with pytest.raises(ValueError, match=r"\[sample\] is for inference"):
        mx.grad(loss)(mx.ones((2, 4)))

"""pytest-benchmark of the sampling family on CPU; bench_sampling.py compares sample with mlx-lm's samplers.

PYTHONPATH=python:. python -m pytest benchmarks/bench_sampling_ops.py --benchmark-only

Each case checks its result against the float64 reference before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxcel_ext import (
    SamplingBatch,
    chain_speculative_sample,
    edit_logits,
    min_p_renorm,
    sample,
    token_logprobs,
    top_k_mask,
    top_k_renorm,
    top_p_renorm,
)
from mlxcel_ext.ops import reference_sampling as reference
from mlxcel_ext.ops.sampling import NO_EDIT

VOCAB = 49152
SAMPLERS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
}


@pytest.fixture(params=[1, 8])
def logits(request) -> mx.array:
    rng = np.random.default_rng(0)
    return mx.array(rng.standard_normal((request.param, VOCAB)) * 2, mx.float32)


def timed(benchmark, run: Callable[[], object]) -> None:
    benchmark.pedantic(lambda: mx.eval(run()), rounds=15, warmup_rounds=2)


@pytest.mark.parametrize("name", SAMPLERS)
def test_sample(benchmark, logits, name):
    params = SAMPLERS[name]
    batch = SamplingBatch(**params)
    drawn = sample(logits, batch, (1, 2), stream=mx.cpu)
    assert np.array(drawn.valid).all()
    for row, token in zip(np.array(logits, np.float64), np.array(drawn.ids), strict=True):
        if params["temperature"] == 0.0:
            assert token == np.argmax(row)
        else:
            assert reference.kept_tokens(row, **params).mask[token]
    timed(benchmark, lambda: sample(logits, batch, (1, 2), stream=mx.cpu).ids)


RENORMS = {
    "top_k": (top_k_renorm, reference.top_k_renorm, 50),
    "top_p": (top_p_renorm, reference.top_p_renorm, 0.9),
    "min_p": (min_p_renorm, reference.min_p_renorm, 0.05),
}


@pytest.mark.parametrize("name", RENORMS)
def test_renorm(benchmark, logits, name):
    op, want, value = RENORMS[name]
    probs = mx.softmax(logits, axis=-1)
    got = np.array(op(probs, value, stream=mx.cpu))
    for row, kept in zip(np.array(probs), got, strict=True):
        np.testing.assert_allclose(kept, want(row, value), atol=1e-5)
    timed(benchmark, lambda: op(probs, value, stream=mx.cpu))


def test_top_k_mask(benchmark, logits):
    got = np.array(top_k_mask(logits, 50, stream=mx.cpu))
    for row, kept in zip(np.array(logits), got, strict=True):
        np.testing.assert_array_equal(kept, reference.top_k_mask(row, 50).astype(np.float32))
    timed(benchmark, lambda: top_k_mask(logits, 50, stream=mx.cpu))


def test_token_logprobs(benchmark, logits):
    ids = mx.argmax(logits, axis=-1).astype(mx.int32)
    got = token_logprobs(logits, ids, 5)
    want: npt.NDArray[np.float64] = np.stack([reference.log_softmax(row) for row in np.array(logits)])
    np.testing.assert_allclose(np.array(got.logprob), want.max(axis=-1), atol=1e-4)
    timed(benchmark, lambda: list(token_logprobs(logits, ids, 5)))


def test_chain(benchmark):
    rng = np.random.default_rng(0)
    target = mx.softmax(mx.array(rng.standard_normal((4, 5, VOCAB)), mx.float32), axis=-1)
    draft = target[:, :4]
    ids = mx.argmax(draft, axis=-1).astype(mx.int32)
    mx.eval(target, draft, ids)
    _, accepted = chain_speculative_sample(ids, draft, target, (1, 2), stream=mx.cpu)
    assert np.array(accepted).tolist() == [4] * 4  # equal distributions: every draft is taken
    timed(benchmark, lambda: list(chain_speculative_sample(ids, draft, target, (1, 2), stream=mx.cpu)))


def test_edit_logits(benchmark, logits):
    rows = np.repeat(NO_EDIT, logits.shape[0])
    rows["mask_row"] = 0
    masks = mx.array(np.full((1, VOCAB // 32), 0x55555555, np.uint32))
    got = np.array(edit_logits(logits, rows, masks=masks, stream=mx.cpu))
    want = np.where(np.arange(VOCAB) % 2 == 0, np.array(logits), -np.inf)
    np.testing.assert_array_equal(got, want)
    timed(benchmark, lambda: edit_logits(logits, rows, masks=masks, stream=mx.cpu))

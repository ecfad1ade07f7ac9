"""chain_speculative_sample: the tokens are the target's, whatever was drafted."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from scipy.stats import chisquare

from mlxcel_ext import SamplingBatch, chain_speculative_sample, sample
from mlxcel_ext.ops import reference_sampling as reference
from tests.conftest import MANY


def dirichlet(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.dirichlet(np.ones(shape[-1]), shape[:-1]).astype(np.float32)


def drafts(rng: np.random.Generator, draft: np.ndarray, batch: int) -> np.ndarray:
    """Ids drawn from draft [n, vocab], [batch, n]."""
    vocab = draft.shape[1]
    return np.stack(
        [rng.choice(vocab, batch, p=q / q.sum(dtype=np.float64)) for q in draft.astype(np.float64)], 1
    )


@pytest.mark.parametrize(("n", "vocab"), [(0, 50), (1, 1), (3, 7), (5, 1000), (33, 20), (2, 32000)])
def test_equals_the_reference(stream, rng, n, vocab):
    batch = 12
    draft, target = dirichlet(rng, batch, n, vocab), dirichlet(rng, batch, n + 1, vocab)
    target[:, :n] = 0.3 * target[:, :n] + 0.7 * draft
    ids = np.array(
        [[rng.choice(vocab, p=q / q.sum(dtype=np.float64)) for q in row.astype(np.float64)] for row in draft]
    )
    ids = ids.reshape(batch, n)
    seeds = rng.integers(0, 2**64, batch, np.uint64)
    got, accepted = chain_speculative_sample(
        mx.array(ids, mx.int32), mx.array(draft), mx.array(target), (seeds, 2**32 - 2), stream=stream
    )
    for b in range(batch):
        want = reference.chain(ids[b], draft[b], target[b], int(seeds[b]), 2**32 - 2)
        assert np.array(got[b]).tolist() == want + [-1] * (n + 1 - len(want))
        assert accepted[b].item() == len(want) - 1


def one_hot(ids: np.ndarray, vocab: int) -> np.ndarray:
    return np.eye(vocab, dtype=np.float32)[ids]


def mixed(draft: np.ndarray, target: np.ndarray) -> None:
    """Some of the drafts are accepted."""
    target[:-1] = 0.3 * target[:-1] + 0.7 * draft


def equal(draft: np.ndarray, target: np.ndarray) -> None:
    target[:-1] = draft


def disjoint(draft: np.ndarray, target: np.ndarray) -> None:
    draft[:, 6:], target[:, :6] = 0, 0


def greedy(draft: np.ndarray, target: np.ndarray) -> None:
    target[:] = one_hot(np.arange(len(target)), target.shape[1])


def zero_residual(draft: np.ndarray, target: np.ndarray) -> None:
    """A target of less mass than the draft: a fifth is turned down, and nothing is left to draw from."""
    target[:-1] = np.float32(0.8) * draft


@pytest.mark.parametrize("case", [mixed, equal, disjoint, greedy, zero_residual], ids=lambda f: f.__name__)
def test_many_chains_follow_the_target(stream, rng, case):
    batch, n, vocab = MANY, 2, 12
    draft, target = dirichlet(rng, n, vocab), dirichlet(rng, n + 1, vocab)
    case(draft, target)
    got, accepted = chain_speculative_sample(
        mx.array(drafts(rng, draft, batch), mx.int32),
        mx.broadcast_to(mx.array(draft), (batch, n, vocab)),
        mx.broadcast_to(mx.array(target), (batch, n + 1, vocab)),
        (17, np.arange(batch) * (n + 1)),
        stream=stream,
    )
    ids = np.array(got)
    p, q = target.astype(np.float64), draft.astype(np.float64)
    q /= q.sum(axis=1, keepdims=True)
    for i in range(n + 1):
        drawn = ids[:, i][ids[:, i] >= 0]
        counts, possible = np.bincount(drawn, minlength=vocab), p[i] > 0
        assert counts[possible].sum() == drawn.size
        if drawn.size and np.count_nonzero(possible) > 1:
            expected = p[i][possible] / p[i].sum() * drawn.size
            assert chisquare(counts[possible], expected).pvalue > 1e-6
    # The rate of acceptance of the first draft is the overlap of the distributions.
    overlap = np.minimum(q[0], p[0]).sum()
    assert abs((np.array(accepted) > 0).mean() - overlap) < 5 * np.sqrt(0.25 / batch)


def test_greedy_targets_give_the_targets_tokens(stream, rng):
    batch, n, vocab = 200, 4, 30
    draft = dirichlet(rng, batch, n, vocab)
    wanted = rng.integers(0, vocab, (batch, n + 1))
    ids = np.where(rng.random((batch, n)) < 0.7, wanted[:, :n], rng.integers(0, vocab, (batch, n)))
    got, accepted = chain_speculative_sample(
        mx.array(ids, mx.int32), mx.array(draft), mx.array(one_hot(wanted, vocab)), (1, 2), stream=stream
    )
    out, lengths = np.array(got), np.array(accepted) + 1
    for b in range(batch):
        matching = int(np.argmin(np.append(ids[b] == wanted[b, :n], False)))
        assert lengths[b] == matching + 1
        assert out[b, : lengths[b]].tolist() == wanted[b, : lengths[b]].tolist()
        assert (out[b, lengths[b] :] == -1).all()


def test_equal_distributions_accept_everything(stream, rng):
    batch, n, vocab = 500, 3, 40
    probs = dirichlet(rng, batch, n + 1, vocab)
    ids = rng.integers(0, vocab, (batch, n))
    _, accepted = chain_speculative_sample(
        mx.array(ids, mx.int32), mx.array(probs[:, :n]), mx.array(probs), (1, 2), stream=stream
    )
    assert (np.array(accepted) == n).all()


def test_disjoint_supports_accept_nothing(stream, rng):
    batch, vocab = 300, 20
    draft, target = dirichlet(rng, batch, 2, vocab), dirichlet(rng, batch, 3, vocab)
    draft[..., 10:], target[..., :10] = 0, 0
    got, accepted = chain_speculative_sample(
        mx.array(rng.integers(0, 10, (batch, 2)), mx.int32),
        mx.array(draft),
        mx.array(target),
        (1, 2),
        stream=stream,
    )
    assert not np.array(accepted).any()
    assert (np.array(got)[:, 0] >= 10).all()


def test_a_zero_residual_draws_from_the_target(stream):
    """Where the target's mass is the draft's or less, only rounding can turn a draft down."""
    draft = mx.array([[[0.5, 0.5, 0.5, 0.0]]])
    target = mx.array([[[0.5, 0.0, 0.5, 0.0], [0.25, 0.25, 0.25, 0.25]]])
    got, accepted = chain_speculative_sample(mx.array([[1]]), draft, target, (1, 2), stream=stream)
    assert accepted.item() == 0
    assert got[0, 0].item() in (0, 2)
    assert got[0, 1].item() == -1


def test_large_vocabulary(stream, rng):
    vocab = 262144
    draft, target = dirichlet(rng, 2, 1, vocab), dirichlet(rng, 2, 2, vocab)
    ids = drafts(rng, draft[:, 0], 1).T
    got, _ = chain_speculative_sample(
        mx.array(ids, mx.int32), mx.array(draft), mx.array(target), (5, 6), stream=stream
    )
    for b in range(2):
        want = reference.chain(ids[b], draft[b], target[b], 5, 6)
        assert np.array(got[b]).tolist() == want + [-1] * (2 - len(want))


def test_rows_without_mass_give_an_id_in_range(stream):
    got, accepted = chain_speculative_sample(
        mx.array([[1, 2]]), mx.zeros((1, 2, 9)), mx.zeros((1, 3, 9)), (1, 2), stream=stream
    )
    assert accepted.item() == 0
    assert 0 <= got[0, 0].item() < 9


def test_an_id_out_of_range_is_turned_down(stream, rng):
    probs = dirichlet(rng, 3, 2, 15)
    ids = mx.array([[-1], [15], [2**31 - 1]], mx.int32)
    got, accepted = chain_speculative_sample(
        ids, mx.array(probs[:, :1]), mx.array(probs), (1, 2), stream=stream
    )
    assert not np.array(accepted).any()
    assert ((np.array(got)[:, 0] >= 0) & (np.array(got)[:, 0] < 15)).all()


def test_without_drafts_it_is_the_plain_draw(stream, rng):
    """Position i of a chain has the noise of draw index i of the request."""
    logits = rng.standard_normal((50, 400)).astype(np.float32)
    probs = mx.softmax(mx.array(logits), axis=-1)[:, None]
    got, _ = chain_speculative_sample(
        mx.zeros((50, 0), mx.int32), mx.zeros((50, 0, 400)), probs, (np.arange(50), 9), stream=stream
    )
    want = sample(mx.array(logits), SamplingBatch(), (np.arange(50), 9), stream=stream)
    assert np.count_nonzero(np.array(got)[:, 0] != np.array(want.ids)) <= 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"draft_ids": mx.zeros((2,), mx.int32)}, r"draft_ids must have 2 dimensions \[batch, n\]"),
        ({"draft_ids": mx.zeros((2, 3))}, r"draft_ids must be int32, got float32"),
        ({"draft_probs": mx.zeros((2, 2, 8))}, r"draft_probs must have shape \(2,3,8\), got \(2,2,8\)"),
        ({"target_probs": mx.zeros((2, 3, 8))}, r"target_probs must have shape \(2,4,8\), got \(2,3,8\)"),
        ({"target_probs": mx.zeros((2, 4, 8), mx.float16)}, r"target_probs must be float32, got float16"),
        ({"rng": ([1, 2, 3], 0)}, r"seed must be one value or 2"),
    ],
)
def test_bad_input_is_a_value_error(change, text):
    good = {
        "draft_ids": mx.zeros((2, 3), mx.int32),
        "draft_probs": mx.zeros((2, 3, 8)),
        "target_probs": mx.zeros((2, 4, 8)),
        "rng": (1, 2),
    }
    with pytest.raises(ValueError, match=r"\[chain_speculative_sample\] " + text):
        chain_speculative_sample(**(good | change))

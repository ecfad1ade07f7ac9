"""Sampler: per-request parameters, edits and counts over steps, on every device."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import SamplingBatch, sample
from mlxcel_ext.ops import reference_sampling as reference
from mlxcel_ext.sampler import RowEdit, Sampler
from tests.support.compare import to_numpy

VOCAB = 500


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None


GREEDY = Params(temperature=0.0)


def logits_of(rng: np.random.Generator, batch: int) -> mx.array:
    return mx.array(rng.standard_normal((batch, VOCAB)) * 3, mx.float32)


def test_rows_draw_as_the_op_does(stream, rng):
    sampler = Sampler(VOCAB, 4, stream=stream)
    sampler.add(3, Params(temperature=0.7, top_k=20), seed=5)
    sampler.add(1, Params(top_p=0.8, min_p=0.05), seed=2**64 - 1)
    sampler.add(2, GREEDY, seed=0)
    x = logits_of(rng, 3)
    got = sampler(x, [1, 2, 3], [3, 9, 2**40])
    batch = SamplingBatch(
        temperature=[1.0, 0.0, 0.7], top_k=[0, 0, 20], top_p=[0.8, 1.0, 1.0], min_p=[0.05, 0.0, 0.0]
    )
    want = sample(x, batch, ([2**64 - 1, 0, 5], [3, 9, 2**40]), stream=stream)
    assert mx.array_equal(got.ids, want.ids)
    assert np.array(got.valid).all()
    assert got.logprobs is None


def test_greedy_rows_launch_the_draw_alone(stream, rng):
    sampler = Sampler(VOCAB, 2, stream=stream)
    sampler.add(0, GREEDY, seed=1)
    x = logits_of(rng, 1)
    assert sampler(x, [0], [0]).ids.item() == int(np.argmax(to_numpy(x)))
    assert sampler.steps == {"greedy": 1, "temperature": 0, "top_k": 0, "filters": 0, "mlx": 0}


def test_penalties_follow_the_drawn_tokens(stream, rng):
    """Ten greedy steps on equal logits: each token drawn is penalised in the next step."""
    x = logits_of(rng, 2)
    params = Params(temperature=0.0, presence_penalty=0.9, frequency_penalty=0.5, repetition_penalty=1.2)
    sampler = Sampler(VOCAB, 3, stream=stream)
    prompt = rng.integers(0, VOCAB, 30).tolist()
    sampler.add(2, GREEDY, seed=1)
    sampler.add(0, params, seed=1, prompt_ids=prompt)
    output: list[int] = []
    for step in range(10):
        ids = sampler(x, [2, 0], [step, step]).ids
        edited = reference.edit_logits(
            to_numpy(x)[1], prompt=prompt, output=output, repetition=1.2, presence=0.9, frequency=0.5
        )
        assert ids[0].item() == int(np.argmax(to_numpy(x)[0]))
        assert ids[1].item() == int(np.argmax(edited))
        output.append(ids[1].item())
    assert len(set(output)) > 3


def test_a_request_that_comes_back_keeps_its_counts(stream, rng):
    x = logits_of(rng, 1)
    params = Params(temperature=0.0, frequency_penalty=1.5)
    sampler = Sampler(VOCAB, 1, stream=stream)
    sampler.add(0, params, seed=1, prompt_ids=[1, 2])
    first = [sampler(x, [0], [i]).ids.item() for i in range(8)]
    sampler.add(0, params, seed=1, prompt_ids=[1, 2], output_ids=first[:5])
    assert [sampler(x, [0], [i]).ids.item() for i in range(5, 8)] == first[5:]
    sampler.add(0, params, seed=1)  # the slot starts clean
    assert sampler(x, [0], [0]).ids.item() == first[0]


def test_masks_bias_and_bans(stream, rng):
    x = logits_of(rng, 4)
    best = [int(i) for i in np.argmax(to_numpy(x), axis=1)]
    sampler = Sampler(VOCAB, 4, stream=stream)
    for slot in range(3):
        sampler.add(slot, GREEDY, seed=1)
    sampler.add(3, Params(temperature=0.0, logit_bias={3: 100.0, 4: 200.0}), seed=1)
    words = np.zeros((VOCAB + 31) // 32, np.uint32)
    words[77 // 32] = 1 << (77 % 32)
    edits = {1: RowEdit(mask=words), 2: RowEdit(banned=[best[2]]), 3: RowEdit(banned=[4])}
    got = sampler(x, [0, 1, 2, 3], [0] * 4, edits)
    second = int(np.argsort(to_numpy(x)[2])[-2])
    assert np.array(got.ids).tolist() == [best[0], 77, second, 3]
    assert np.array(got.valid).all()


def test_a_mask_without_a_token_makes_the_row_invalid(stream, rng):
    sampler = Sampler(VOCAB, 2, stream=stream)
    sampler.add(0, Params(), seed=1)
    sampler.add(1, Params(), seed=1)
    nothing = np.zeros((VOCAB + 31) // 32, np.uint32)
    got = sampler(logits_of(rng, 2), [0, 1], [0, 0], {0: RowEdit(mask=nothing)})
    assert np.array(got.valid).tolist() == [False, True]


def test_logprobs_are_of_the_raw_logits(stream, rng):
    sampler = Sampler(VOCAB, 2, stream=stream)
    sampler.add(0, Params(temperature=0.5, logprobs=0, logit_bias={7: 50.0}), seed=1)
    sampler.add(1, Params(top_k=3, logprobs=4), seed=1)
    x = logits_of(rng, 2)
    got = sampler(x, [0, 1], [0, 0])
    want = np.stack([reference.log_softmax(row) for row in to_numpy(x)])
    ids = np.array(got.ids)
    assert ids[0] == 7
    np.testing.assert_allclose(to_numpy(got.logprobs), want[[0, 1], ids], atol=1e-5)
    assert np.array(got.top_ids).tolist() == np.argsort(-want, axis=1, kind="stable")[:, :4].tolist()
    np.testing.assert_allclose(to_numpy(got.top_logprobs), -np.sort(-want, axis=1)[:, :4], atol=1e-5)
    assert got.ranks[0].item() == np.count_nonzero(want[0] >= want[0, 7])


def test_steps_are_lazy_and_chain_on_the_device(stream, rng):
    """Three steps submitted before any token is read give what reading each would."""
    x = logits_of(rng, 1)
    params = Params(temperature=0.8, frequency_penalty=1.0, top_p=0.9)

    def run(eager: bool) -> list[int]:
        sampler = Sampler(VOCAB, 1, stream=stream)
        sampler.add(0, params, seed=3)
        steps = []
        for i in range(3):
            steps.append(sampler(x, [0], [i]).ids)
            if eager:
                mx.eval(steps[-1])
        return [s.item() for s in steps]

    assert run(eager=False) == run(eager=True)


@pytest.mark.parametrize(
    ("switch", "params"), [("GUMBEL", Params()), ("REJECTION", Params(top_k=5, top_p=0.9))]
)
def test_kill_switches_fall_back_to_mlx(stream, rng, monkeypatch, switch, params):
    monkeypatch.setenv(f"MLXCEL_SAMPLING_{switch}", "0")
    sampler = Sampler(VOCAB, 2, stream=stream)
    sampler.add(0, params, seed=1)
    sampler.add(1, GREEDY, seed=1)
    x = logits_of(rng, 2)
    ids = [np.array(sampler(x, [0, 1], [i, i]).ids) for i in range(40)]
    assert sampler.steps["mlx"] == 40
    kept = reference.kept_tokens(to_numpy(x)[0], params.temperature, params.top_k, params.top_p).mask
    assert all(kept[a] for a, _ in ids)
    assert len({a for a, _ in ids}) > 1
    assert {g for _, g in ids} == {int(np.argmax(to_numpy(x)[1]))}


def test_slots_and_shapes_are_checked():
    sampler = Sampler(VOCAB, 1, stream=mx.cpu)
    for slot in (-1, 1):
        with pytest.raises(ValueError, match=rf"\[sampler\] slot must be in 0\.\.0, got {slot}"):
            sampler.add(slot, GREEDY, seed=1)
    with pytest.raises(ValueError, match=r"\[sampler\] logit_bias must name tokens in 0\.\.499, got 500"):
        sampler.add(0, Params(logit_bias={500: 1.0}), seed=1)
    with pytest.raises(ValueError, match=r"\[sampler\] logits must have shape \(0, 500\), got \(1, 500\)"):
        sampler(mx.zeros((1, VOCAB)), [], [])


def test_a_slot_forgets_the_request_before(stream, rng):
    """Bias, penalties and logprobs of the one do not touch the other."""
    sampler = Sampler(VOCAB, 1, stream=stream)
    x = logits_of(rng, 1)
    best = int(np.argmax(to_numpy(x)))
    edited = Params(temperature=0.0, logit_bias={best: -100.0}, frequency_penalty=2.0, logprobs=3)
    sampler.add(0, edited, seed=1)
    got = sampler(x, [0], [0])
    assert got.ids.item() != best
    assert got.logprobs is not None
    sampler.add(0, GREEDY, seed=1)
    for step in range(3):
        got = sampler(x, [0], [step])
        assert got.ids.item() == best
        assert got.logprobs is None

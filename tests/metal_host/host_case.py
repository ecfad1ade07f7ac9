"""The ops through a given build of the Metal host code: exits with an error where that is wrong.

python -m tests.metal_host.host_case BACKEND.so [CASE ...]
"""

from __future__ import annotations

import sys

import mlx.core as mx
import numpy as np

from mlxcel_ext import (
    SamplingBatch,
    _ext,
    add_rms_norm,
    chain_speculative_sample,
    count_tokens,
    edit_logits,
    merge_states,
    paged_attention,
    plan_attention,
    rope_append,
    sample,
    token_logprobs,
    top_p_renorm,
)
from mlxcel_ext.ops import reference, reference_sampling
from mlxcel_ext.ops.sampling import EDIT_ROW, NO_EDIT
from tests.support.compare import assert_close, to_numpy
from tests.support.paged import PagedCase


def sample_case(rng: np.random.Generator) -> None:
    vocab = 5001  # two parts of a row
    logits = mx.array(rng.standard_normal((3, vocab)), mx.float32)
    x = to_numpy(logits)
    for params in ({"temperature": 1.0}, {"temperature": 0.7, "top_k": 40, "top_p": 0.8}):
        got = sample(logits, SamplingBatch(**params), ([1, 2, 3], [7, 8, 9]))
        mx.eval(got)
        mx.synchronize()
        rows = [
            reference_sampling.sample_row(
                row, **({"top_k": 0, "top_p": 1.0, "min_p": 0.0} | params), seed=b + 1, draw=b + 7
            )
            for b, row in enumerate(x)
        ]
        assert np.array(got.ids).tolist() == [r.id for r in rows]
        assert np.array(got.valid).all()
        assert not np.array(got.rounds).any()

    counts = mx.full((2, vocab), 3, mx.uint32)
    counts = count_tokens(counts, mx.array([1, 1]), mx.array([9, 4999]), reset=True)
    counts = count_tokens(counts, mx.array([1, 0]), mx.array([9, 2]))
    edits = np.full(3, NO_EDIT, EDIT_ROW)
    edits["counts_row"][1], edits["presence"][1], edits["bias_end"][2] = 1, 0.5, 1
    bias = {"bias_ids": mx.array([4999]), "bias_values": mx.array([2.0])}
    edited = edit_logits(logits, edits, counts=counts, **bias)
    mx.eval(counts, edited)
    mx.synchronize()
    want = np.zeros((2, vocab), np.uint32)
    want[0], want[0, 2], want[1, [9, 4999]] = 3, 4, [0x80000001, 0x80000000]
    assert np.array_equal(np.array(counts), want)
    changed = x.copy()
    changed[1, 9] -= 0.5
    changed[2, 4999] += 2.0
    np.testing.assert_allclose(to_numpy(edited), changed, rtol=1e-6)

    logprobs = token_logprobs(logits, mx.array([5, 4999, 0], mx.int32), 3)
    probs = mx.softmax(logits, axis=-1)
    kept = top_p_renorm(probs, 0.5)
    mx.eval(logprobs, kept)
    mx.synchronize()
    for b, token in enumerate((5, 4999, 0)):
        row = reference_sampling.log_softmax(x[b])
        order = np.argsort(-x[b])[:3]
        assert abs(logprobs.logprobs[b].item() - row[token]) < 2e-5
        assert logprobs.ranks[b].item() == np.count_nonzero(x[b] >= x[b, token])
        assert np.array(logprobs.top_ids[b]).tolist() == order.tolist()
        np.testing.assert_allclose(to_numpy(logprobs.top_logprobs[b]), row[order], atol=2e-5)
        share = reference_sampling.top_p_renorm(to_numpy(probs)[b], 0.5)
        np.testing.assert_allclose(to_numpy(kept)[b], share, rtol=1e-5)

    draft, target = (rng.dirichlet(np.ones(vocab), (2, n)).astype(np.float32) for n in (2, 3))
    ids = rng.integers(0, vocab, (2, 2))
    got, accepted = chain_speculative_sample(
        mx.array(ids, mx.int32), mx.array(draft), mx.array(target), ([3, 4], [5, 6])
    )
    mx.eval(got, accepted)
    mx.synchronize()
    for b in range(2):
        chain = reference_sampling.chain(ids[b], draft[b], target[b], 3 + b, 5 + b)
        assert np.array(got[b]).tolist() == chain + [-1] * (3 - len(chain))
        assert accepted[b].item() == len(chain) - 1


def add_rms_norm_case(rng: np.random.Generator) -> None:
    x, residual = (mx.array(rng.standard_normal((5, 200)), mx.float32) for _ in range(2))
    weight = mx.array(rng.standard_normal(200), mx.float32)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    mx.eval(normed, total)
    mx.synchronize()  # an error of the stream's last task is raised by the next wait
    want, want_total = reference.add_rms_norm(to_numpy(x), to_numpy(residual), to_numpy(weight), 1e-5)
    assert_close(total, want_total, ulps=1)
    assert_close(normed, want, ulps=4)


def rope_append_case(rng: np.random.Generator) -> None:
    q, k, v = (mx.array(rng.standard_normal((3, h, 64)), mx.float32) for h in (4, 2, 2))
    pools = [mx.zeros((4, 4, 2, 64)) for _ in range(2)]
    mx.eval(pools)
    address = _ext.buffer_address(pools[0])
    slots, positions = mx.array([5, 0, 11], mx.int32), mx.array([100, 2, 7], mx.int32)
    inv_freq = mx.array(10000.0 ** (-np.arange(0, 64, 2) / 64), mx.float32)
    q_rot, k_pages, v_pages = rope_append(q, k, v, *pools, slots, positions, inv_freq=inv_freq)
    mx.eval(q_rot, k_pages, v_pages)
    mx.synchronize()
    assert _ext.buffer_address(k_pages) == address, "the pool was copied"
    for got, given in ((q_rot, q), (k_pages.reshape(16, 2, 64)[slots], k)):
        assert_close(got, reference.rope(to_numpy(given), positions, to_numpy(inv_freq)), ulps=8)
    assert mx.array_equal(v_pages.reshape(16, 2, 64)[slots], v)


def merge_states_case(rng: np.random.Generator) -> None:
    states, lse = mx.array(rng.standard_normal((5, 3, 48)), mx.float32), mx.array(rng.standard_normal((5, 3)))
    merged, merged_lse = merge_states(states, lse.astype(mx.float32), [0, 2, 5])
    want, want_lse = reference.merge_states(to_numpy(states), to_numpy(lse), [0, 2, 5])
    assert_close(merged, want, ulps=8)
    assert_close(merged_lse, want_lse, ulps=8, scale=8.0)


def paged_attention_case(rng: np.random.Generator) -> None:
    sinks = mx.array([0.0, 1.0, 2.0, 3.0])
    for options in ({"sinks": sinks}, {"logits_soft_cap": 0.5}, {}):
        for qo_len in (None, [40, 3, 1]):
            case = PagedCase(rng, [700, 9, 300], qo_len=qo_len, hq=4, hkv=1, offsets=[3, 0, 2])
            plan = plan_attention(case.table, case.qo_indptr, **case.heads)
            assert plan.num_partials > 0, "the case must have something to merge"
            out, lse = paged_attention(
                *case.args, qo_indptr=case.qo_indptr, plan=plan, return_lse=True, **options
            )
            mx.eval(out, lse)
            mx.synchronize()
            want, want_lse = case.reference(**options)
            assert_close(out, want, ulps=16, scale=1.0)
            assert_close(lse, want_lse, ulps=16, scale=8.0)


CASES = {
    "add_rms_norm": add_rms_norm_case,
    "rope_append": rope_append_case,
    "merge_states": merge_states_case,
    "paged_attention": paged_attention_case,
    "sample": sample_case,
}


def main(backend: str, *cases: str) -> None:
    _ext.load_gpu_backend(backend)
    for case in cases or CASES:
        CASES[case](np.random.default_rng(0))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""edit_logits, count_tokens and token_logprobs against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import count_tokens, edit_logits, token_logprobs
from mlxcel_ext.ops import reference_sampling as reference
from mlxcel_ext.ops.sampling import EDIT_ROW, NO_EDIT
from tests.conftest import MANY
from tests.support.compare import to_numpy


def random_words(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, 2**32, n, np.uint32)


@pytest.mark.parametrize("vocab", [5, 32, 33, 1000, 4099])
def test_edits_equal_the_reference(stream, dtype, rng, vocab):
    logits = mx.array(rng.standard_normal((6, vocab)) * 3, dtype)
    masks = np.stack([random_words(rng, (vocab + 31) // 32) for _ in range(2)])
    tokens = [rng.integers(0, vocab, 40) for _ in range(6)]
    counts = mx.zeros((3, vocab), mx.uint32)
    for row, (prompt, output) in enumerate(((tokens[0], tokens[1]), (tokens[2], tokens[3]), ([], tokens[4]))):
        counts = count_tokens(
            counts,
            mx.full(41, row, mx.int32),
            mx.array(np.append(prompt, [-1] * (41 - len(prompt))), mx.int32),
            reset=True,
            stream=stream,
        )
        counts = count_tokens(counts, mx.full(40, row, mx.int32), mx.array(output, mx.int32), stream=stream)
    bias = {
        int(t): float(v)
        for t, v in zip(rng.choice(vocab, 5, replace=False), (1.5, -2.0, 100.0, -np.inf, 0.5), strict=True)
    }
    rows = np.array(
        [
            NO_EDIT.item(),
            (1.0, 0.0, 0.0, -1, 1, 0, 0, 0),
            (1.0, 0.0, 0.0, -1, -1, 0, 5, 0),
            (1.3, 0.0, 0.0, 0, -1, 0, 0, 0),
            (1.0, 0.7, 0.4, 1, -1, 0, 0, 0),
            (0.8, -0.5, 1.1, 2, 0, 2, 5, 0),
        ],
        EDIT_ROW,
    )
    got = edit_logits(
        logits,
        rows,
        bias_ids=mx.array(list(bias), mx.int32),
        bias_values=mx.array(list(bias.values()), mx.float32),
        counts=counts,
        masks=mx.array(masks),
        stream=stream,
    )
    x = to_numpy(logits)
    want = [
        x[0],
        reference.edit_logits(x[1], mask=masks[1]),
        reference.edit_logits(x[2], bias=bias),
        reference.edit_logits(x[3], prompt=tokens[0], output=tokens[1], repetition=1.3),
        reference.edit_logits(x[4], prompt=tokens[2], output=tokens[3], presence=0.7, frequency=0.4),
        reference.edit_logits(
            x[5],
            mask=masks[0],
            bias=dict(list(bias.items())[2:]),
            output=tokens[4],
            repetition=0.8,
            presence=-0.5,
            frequency=1.1,
        ),
    ]
    assert got.dtype == mx.float32
    np.testing.assert_allclose(to_numpy(got), want, rtol=1e-5, atol=1e-5)


def test_tokens_beyond_the_mask_are_forbidden(stream):
    rows = np.array([(1.0, 0.0, 0.0, -1, 0, 0, 0, 0)], EDIT_ROW)
    got = edit_logits(mx.ones((1, 100)), rows, masks=mx.array([[0xFFFFFFFF]], mx.uint32), stream=stream)
    assert np.isfinite(to_numpy(got)[0]).tolist() == [True] * 32 + [False] * 68


def test_counts_are_kept_in_place(stream):
    counts = mx.zeros((4, 10), mx.uint32)
    mx.eval(counts)
    before = np.array(counts, copy=False).ctypes.data if stream == mx.cpu else None
    after = count_tokens(counts, mx.array([0, 0, 3, -1, 7]), mx.array([2, 2, 9, 1, 1]), stream=stream)
    after = count_tokens(after, mx.array([3, 3]), mx.array([10, -1]), stream=stream)
    want = np.zeros((4, 10), np.uint32)
    want[0, 2], want[3, 9] = 2, 1
    assert np.array_equal(np.array(after), want)
    assert before is None or np.array(after, copy=False).ctypes.data == before


def test_reset_clears_rows_and_marks_the_prompt(stream):
    counts = mx.full((3, 6), 5, mx.uint32)
    got = count_tokens(counts, mx.array([1, 1, 1, 1]), mx.array([0, 3, 3, -1]), reset=True, stream=stream)
    want = np.full((3, 6), 5, np.uint32)
    want[1] = 0
    want[1, [0, 3]] = 0x80000000
    assert np.array_equal(np.array(got), want)


@pytest.mark.parametrize("vocab", [1, 3, 65, 1000, 32000])
def test_logprobs_equal_the_reference(stream, dtype, rng, vocab):
    logits = mx.array(np.round(rng.standard_normal((16, vocab)) * 8) / 8, dtype)
    num_top = min(20, vocab)
    ids = rng.integers(0, vocab, 16)
    got = token_logprobs(logits, mx.array(ids, mx.int32), num_top, stream=stream)
    x = to_numpy(logits)
    for b in range(16):
        want = reference.log_softmax(x[b])
        order = np.lexsort((np.arange(vocab), -x[b]))[:num_top]
        assert abs(got.logprobs[b].item() - want[ids[b]]) < 2e-5
        assert got.ranks[b].item() == np.count_nonzero(x[b] >= x[b, ids[b]])
        assert np.array(got.top_ids[b]).tolist() == order.tolist()
        np.testing.assert_allclose(to_numpy(got.top_logprobs[b]), want[order], atol=2e-5)


def test_large_vocabulary(stream, rng):
    vocab = 262144
    logits = mx.array(rng.standard_normal((2, vocab)), mx.float32)
    got = token_logprobs(logits, mx.array([7, vocab - 1], mx.int32), 64, stream=stream)
    for b, (x, token) in enumerate(zip(to_numpy(logits), (7, vocab - 1), strict=True)):
        want = reference.log_softmax(x)
        order = np.argsort(-x, kind="stable")[:64]
        assert abs(got.logprobs[b].item() - want[token]) < 2e-5
        assert np.array(got.top_ids[b]).tolist() == order.tolist()
    words = np.full((1, vocab // 32), 0x0F0F0F0F, np.uint32)
    rows = np.array([(1.0, 0.0, 0.0, -1, 0, 0, 0, 0)] * 2, EDIT_ROW)
    edited = to_numpy(edit_logits(logits, rows, masks=mx.array(words), stream=stream))
    assert np.array_equal(np.isfinite(edited), np.tile(np.arange(vocab) % 8 < 4, (2, 1)))


def test_many_rows(stream, rng):
    """More than the 65,535 blocks that a grid has in its second dimension."""
    batch = min(MANY, 70_000)
    x = rng.standard_normal((batch, 3)).astype(np.float32)
    rows = np.full(batch, NO_EDIT)
    rows["mask_row"] = np.arange(batch) % 2
    masks = mx.array([[0b011], [0b110]], mx.uint32)
    got = to_numpy(edit_logits(mx.array(x), rows, masks=masks, stream=stream))
    x[::2, 2], x[1::2, 0] = -np.inf, -np.inf
    np.testing.assert_array_equal(got, x)
    ids = np.argmax(x, axis=1).astype(np.int32)
    ranks = token_logprobs(mx.array(x), mx.array(ids), stream=stream).ranks
    assert (np.array(ranks) == 1).all()


def test_logprobs_of_masked_and_absent_tokens(stream):
    x = mx.array([[0.0, -float("inf"), 1.0, -float("inf")]] * 3)
    got = token_logprobs(x, mx.array([1, -1, 2], mx.int32), 4, stream=stream)
    assert to_numpy(got.logprobs)[:2].tolist() == [-np.inf, -np.inf]
    assert np.array(got.top_ids[0]).tolist() == [2, 0, 1, 3]
    assert np.isneginf(to_numpy(got.top_logprobs)[0, 2:]).all()


def test_rows_on_the_device_that_point_nowhere_are_as_if_absent(stream):
    """Nobody can look at them without waiting; kernels must not read what they point at."""
    rows = np.full(5, NO_EDIT)
    rows["mask_row"] = [1, 2**31 - 1, -7, -1, -1]
    rows["counts_row"] = [-1, -1, -1, 2, 2**31 - 1]
    rows["bias_begin"], rows["bias_end"] = [0, 0, 0, -5, 2], [0, 0, 0, 2**31 - 1, 2**31 - 1]
    words = mx.array(rows.view(np.uint32).reshape(5, 8))
    got = edit_logits(
        mx.ones((5, 40)),
        words,
        bias_ids=mx.array([3, 4], mx.int32),
        bias_values=mx.array([0.5, 0.25]),
        counts=mx.full((2, 40), 1, mx.uint32),
        masks=mx.zeros((1, 2), mx.uint32),
        stream=stream,
    )
    want = np.ones((5, 40), np.float32)
    want[3, [3, 4]] += [0.5, 0.25]
    np.testing.assert_array_equal(to_numpy(got), want)


def test_no_top_and_empty_batches(stream):
    got = token_logprobs(mx.zeros((2, 8)), mx.array([0, 1], mx.int32), stream=stream)
    assert got.top_ids.shape == (2, 0)
    np.testing.assert_allclose(to_numpy(got.logprobs), -np.log(8), rtol=1e-6)
    empty = token_logprobs(mx.zeros((0, 8)), mx.zeros((0,), mx.int32), 3, stream=stream)
    assert empty.top_ids.shape == (0, 3)
    assert edit_logits(mx.zeros((0, 8)), np.zeros(0, EDIT_ROW), stream=stream).shape == (0, 8)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: token_logprobs(mx.zeros((2, 8)), mx.zeros((3,), mx.int32)),
            r"\[token_logprobs\] ids must have shape \(2\)",
        ),
        (
            lambda: token_logprobs(mx.zeros((2, 8)), mx.zeros((2,), mx.int32), 9),
            r"\[token_logprobs\] num_top must be in 0..8, got 9",
        ),
        (
            lambda: token_logprobs(mx.zeros((2, 99)), mx.zeros((2,), mx.int32), 65),
            r"num_top must be in 0..64, got 65",
        ),
        (
            lambda: edit_logits(mx.zeros((2, 8)), np.zeros(3, EDIT_ROW)),
            r"\[edit_logits\] rows must have shape \(2,8\)",
        ),
        (
            lambda: edit_logits(mx.zeros((1, 8)), np.zeros(1, EDIT_ROW), counts=mx.zeros((1, 7), mx.uint32)),
            r"\[edit_logits\] counts must have shape \(1,8\), got \(1,7\)",
        ),
        (
            lambda: count_tokens(mx.zeros((2, 8)), mx.array([0]), mx.array([0])),
            r"\[count_tokens\] counts must be uint32",
        ),
    ],
)
def test_bad_input_is_a_value_error(call, text):
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize(
    ("field", "value"), [("counts_row", 0), ("mask_row", 2), ("bias_end", 3), ("bias_begin", -1)]
)
def test_rows_that_point_outside_are_refused(field, value):
    rows = np.full(1, NO_EDIT, EDIT_ROW)
    rows[field] = value
    with pytest.raises(ValueError, match=field):
        edit_logits(
            mx.zeros((1, 8)),
            rows,
            bias_ids=mx.array([1, 2], mx.int32),
            bias_values=mx.zeros((2,)),
            masks=mx.zeros((2, 1), mx.uint32),
        )

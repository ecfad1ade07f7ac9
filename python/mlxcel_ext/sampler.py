"""The engine's sampler: per-request parameters in packed rows, state on the device, no host synchronisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from . import env
from .ops.sampling import (
    EDIT_ROW,
    GREEDY_TEMPERATURE,
    NO_EDIT,
    SAMPLE_ROW,
    Work,
    count_tokens,
    edit_logits,
    sample_rows,
    token_logprobs,
    work_of,
)

_WORK_ORDER: tuple[Work, ...] = ("greedy", "temperature", "top_k", "filters")


class Params(Protocol):
    """What the sampler reads of a request's parameters (``SamplingParams`` has it all)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    logit_bias: Mapping[int, float]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logprobs: int | None


@dataclass(frozen=True, slots=True)
class RowEdit:
    """What a step asks of one row beyond its request's parameters.

    Attributes
    ----------
    mask
        Allowed tokens of a grammar, uint32 words: token ``i`` is bit ``i % 32`` of word ``i // 32``.
    banned
        Tokens that may not be drawn in this step: EOS and stop tokens before ``min_tokens``.
    """

    mask: npt.NDArray[np.uint32] | None = None
    banned: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """Device arrays of one step, ``[batch]`` or ``[batch, num_top]``; the logprobs where a row asked for them."""

    ids: mx.array  #: int32, always in range
    valid: mx.array  #: bool; False where the logits had a NaN or no token was allowed
    logprobs: mx.array | None = None  #: float32, of the drawn token, from the raw logits
    ranks: mx.array | None = None  #: int32, 1 is the likeliest
    top_ids: mx.array | None = None  #: int32, best first
    top_logprobs: mx.array | None = None


class Sampler:
    """Draws one token a row for requests that were added before.

    Logits pass a grammar's mask, bans, logit bias and penalties (in vLLM's order), then temperature, min-p and
    top-k, then top-p. Log-probabilities are of the raw logits. Steps whose rows want none of the edits launch
    the draw alone.

    Parameters
    ----------
    vocab_size
        Width of the logits.
    max_rows
        Slots for requests, 0 to ``max_rows - 1``.
    stream
        Where the ops run.
    """

    def __init__(
        self, vocab_size: int, max_rows: int, *, stream: mx.Stream | mx.Device | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self._stream = stream
        self._rows = np.zeros(max_rows, SAMPLE_ROW)
        self._edits = np.full(max_rows, NO_EDIT, EDIT_ROW)
        # Lists and sets, not arrays: for the few rows of a step a look at each is faster than a call of numpy.
        self._work = [0] * max_rows
        #: Ids and values. A bias of a whole vocabulary is taken into every step: as arrays that costs nothing.
        self._bias = [_bias({})] * max_rows
        self._edited: set[int] = set()  # slots with bias or penalties
        self._penalised: set[int] = set()
        self._num_top: dict[int, int] = {}  # slots that want logprobs
        self._counts: mx.array | None = None  # [max_rows, vocab_size], made with the first penalty
        #: Steps by what served them: a work of the compiled op, or "mlx" where a kill switch is off.
        self.steps: dict[str, int] = {**dict.fromkeys(_WORK_ORDER, 0), "mlx": 0}
        self._compiled: dict[Work, bool] = {
            "greedy": True,
            "temperature": env.switch("MLXCEL_SAMPLING_GUMBEL"),
            "top_k": env.switch("MLXCEL_SAMPLING_REJECTION"),
            "filters": env.switch("MLXCEL_SAMPLING_REJECTION"),
        }

    def add(
        self,
        slot: int,
        params: Params,
        seed: int,
        *,
        prompt_ids: Sequence[int] = (),
        output_ids: Sequence[int] = (),
    ) -> None:
        """Give a slot to a request, whoever had it before.

        ``output_ids`` are tokens that it has drawn already, where it comes back.
        """
        if not 0 <= slot < self.max_rows:
            raise ValueError(f"[sampler] slot must be in 0..{self.max_rows - 1}, got {slot}.")
        bias = params.logit_bias or {}
        bad = [t for t in bias if not 0 <= t < self.vocab_size]
        if bad:
            raise ValueError(
                f"[sampler] logit_bias must name tokens in 0..{self.vocab_size - 1}, got {bad[0]}."
            )
        values = params.temperature, params.top_k, params.top_p, params.min_p
        self._rows[slot] = (*values, seed, 0)
        self._work[slot] = _WORK_ORDER.index(work_of(*values, self.vocab_size))
        self._bias[slot] = _bias(bias)
        for slots in (self._edited, self._penalised):
            slots.discard(slot)
        self._num_top.pop(slot, None)
        if params.logprobs is not None:
            self._num_top[slot] = params.logprobs
        self._edits[slot] = NO_EDIT
        if bias:
            self._edited.add(slot)
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        if penalties != (1.0, 0.0, 0.0):
            self._edits[slot] = (*penalties, slot, -1, 0, 0, 0)
            self._edited.add(slot)
            self._penalised.add(slot)
            self._reset_counts(slot, prompt_ids, output_ids)

    def __call__(
        self,
        logits: mx.array,
        slots: Sequence[int],
        draws: Sequence[int],
        edits: Mapping[int, RowEdit] | None = None,
    ) -> Sampled:
        """Draw for ``logits[i]`` as the request in ``slots[i]`` asks; lazy, like every MLX op.

        Parameters
        ----------
        logits
            ``[len(slots), vocab_size]``.
        slots
            As given to :meth:`add`.
        draws
            Index of each row's token in its request's output; with the seed it decides the noise.
        edits
            Row -> what this step asks of it in addition.
        """
        if logits.shape != (len(slots), self.vocab_size):
            raise ValueError(
                f"[sampler] logits must have shape ({len(slots)}, {self.vocab_size}), got {logits.shape}."
            )
        edited = logits
        if edits or not self._edited.isdisjoint(slots):
            edited = self._edit(logits, slots, edits or {})
        index = np.array(slots, np.intp)
        packed = self._rows[index]
        packed["draw"] = draws
        work = _WORK_ORDER[max([self._work[slot] for slot in slots], default=0)]
        if self._compiled[work]:
            self.steps[work] += 1
            ids, valid, _ = sample_rows(edited, packed, work, stream=self._stream)
        else:
            self.steps["mlx"] += 1
            ids, valid = _sample_with_mlx_ops(edited, packed, self._stream)
        if not self._penalised.isdisjoint(slots):
            self._add_counts(mx.array(self._edits["counts_row"][index]), ids)
        if self._num_top.keys().isdisjoint(slots):
            return Sampled(ids, valid)
        num_top = max(self._num_top[slot] for slot in slots if slot in self._num_top)
        return Sampled(ids, valid, *token_logprobs(logits, ids, num_top, stream=self._stream))

    def _edit(self, logits: mx.array, slots: Sequence[int], wanted: Mapping[int, RowEdit]) -> mx.array:
        """The logits that the draw sees."""
        edits = self._edits[np.array(slots, np.intp)]
        masks: list[npt.NDArray[np.uint32]] = []
        biases = [_bias({})]
        num_bias = 0
        for i, slot in enumerate(slots):
            (ids, values), edit = self._bias[slot], wanted.get(i)
            if edit is not None and edit.mask is not None:
                edits[i]["mask_row"] = len(masks)
                masks.append(edit.mask)
            if edit is not None and edit.banned:
                # Each id once: the kernels add the values at the same time.
                kept = ~np.isin(ids, edit.banned)
                banned, never = _bias(dict.fromkeys(edit.banned, -np.inf))
                ids, values = np.append(ids[kept], banned), np.append(values[kept], never)
            if ids.size:
                edits[i]["bias_begin"], edits[i]["bias_end"] = num_bias, num_bias + ids.size
                num_bias += ids.size
                biases.append((ids, values))
        return edit_logits(
            logits,
            edits,
            bias_ids=mx.array(np.concatenate([ids for ids, _ in biases])),
            bias_values=mx.array(np.concatenate([values for _, values in biases])),
            counts=None if self._penalised.isdisjoint(slots) else self._counts,
            masks=mx.array(np.stack(masks)) if masks else None,
            stream=self._stream,
        )

    def _reset_counts(self, slot: int, prompt_ids: Iterable[int], output_ids: Iterable[int]) -> None:
        if self._counts is None:
            self._counts = mx.zeros((self.max_rows, self.vocab_size), mx.uint32, stream=self._stream)
        # An id out of range clears the row of a request without a prompt.
        prompt, output = np.array([*prompt_ids, -1], np.int32), np.array([*output_ids], np.int32)
        self._add_counts(mx.full(prompt.shape, slot, mx.int32), mx.array(prompt), reset=True)
        if output.size:
            self._add_counts(mx.full(output.shape, slot, mx.int32), mx.array(output))

    def _add_counts(self, rows: mx.array, ids: mx.array, *, reset: bool = False) -> None:
        assert self._counts is not None
        self._counts = count_tokens(self._counts, rows, ids, reset=reset, stream=self._stream)


def _bias(bias: Mapping[int, float]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Ids and values of a bias."""
    count = len(bias)
    return np.fromiter(bias, np.int32, count), np.fromiter(bias.values(), np.float32, count)


def _sample_with_mlx_ops(
    logits: mx.array, rows: npt.NDArray[np.void], stream: mx.Stream | mx.Device | None
) -> tuple[mx.array, mx.array]:
    """The same filters by a full sort, with MLX's own noise: what the kill switches fall back to."""
    with mx.stream(stream) if stream is not None else mx.stream(mx.default_device()):
        x = logits.astype(mx.float32)
        vocab = x.shape[1]
        order = mx.argsort(-x, axis=-1)
        scale = mx.array(1.0 / np.maximum(rows["temperature"], GREEDY_TEMPERATURE))[:, None]
        ranked = mx.take_along_axis(x, order, axis=-1) * scale
        top_k = np.where(rows["top_k"] > 0, rows["top_k"], vocab)
        greedy = (rows["temperature"] < GREEDY_TEMPERATURE) | (rows["top_p"] <= 0)
        most = mx.array(np.where(greedy, 1, top_k))[:, None]
        min_p = mx.log(mx.array(rows["min_p"])[:, None])
        kept = (mx.arange(vocab)[None] < most) & (ranked - ranked[:, :1] >= min_p)
        ranked = mx.where(kept, ranked, -mx.inf)
        probs = mx.softmax(ranked, axis=-1)
        before = mx.cumsum(probs, axis=-1) - probs
        ranked = mx.where((before < mx.array(rows["top_p"])[:, None]) | (before == 0), ranked, -mx.inf)
        keys = [
            mx.random.key(int(seed) ^ (int(draw) << 32))
            for seed, draw in zip(rows["seed"], rows["draw"], strict=True)
        ]
        drawn = mx.stack([mx.random.categorical(r, key=key) for r, key in zip(ranked, keys, strict=True)])
        ids = mx.take_along_axis(order, drawn[:, None], axis=-1)[:, 0]
        return ids.astype(mx.int32), mx.isfinite(x.max(axis=-1)) & ~mx.isnan(x).any(axis=-1)

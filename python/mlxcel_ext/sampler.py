"""From logits to tokens on the device: masks, penalties, draws, log-probabilities. Nothing here synchronises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How to sample one row.

    seed, draw   the token depends on these, the logits and the parameters alone
    slot         the request's place among the running ones: where its penalty counts are kept
    forbidden    tokens that may not be drawn now
    mask         uint32 [ceil(vocab / 32)], bit i % 32 of word i // 32: token i is allowed (None: all are)
    """

    params: SamplingParams
    seed: int
    draw: int
    slot: int
    forbidden: tuple[int, ...] = ()
    mask: npt.NDArray[np.uint32] | None = None


class Logprobs(NamedTuple):
    """logprob f32 and rank int32 [N] of the chosen tokens; top_ids and top_logprobs [N, K], best first."""

    logprob: mx.array
    rank: mx.array
    top_ids: mx.array
    top_logprobs: mx.array


class SampleResult(NamedTuple):
    """ids int32 [B], always in range; valid bool [B], False where nothing could be drawn."""

    ids: mx.array
    valid: mx.array
    logprobs: Logprobs | None


class Sampler:
    """Samples the rows of each step; keeps what penalties need on the device."""

    def __init__(self, vocab_size: int, max_num_seqs: int) -> None:
        self._vocab_size = vocab_size
        # uint32 [V] per slot with penalties: occurrences in the output, and whether the prompt has the token.
        self._counts: dict[int, mx.array] = {}
        self._in_prompt: dict[int, mx.array] = {}

    @property
    def arrays(self) -> list[mx.array]:
        """State to evaluate with each step."""
        return list(self._counts.values())

    def begin(
        self, slot: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        """A request takes the slot with these tokens so far."""
        self._counts.pop(slot, None)
        if params.has_penalties:
            counts = np.bincount(np.asarray(output, np.int64), minlength=self._vocab_size)
            seen = np.bincount(np.asarray(prompt, np.int64), minlength=self._vocab_size) > 0
            self._counts[slot] = mx.array(counts.astype(np.float32))
            self._in_prompt[slot] = mx.array(seen)

    def __call__(self, logits: mx.array, rows: Sequence[RowSampling]) -> SampleResult:
        logits = logits.astype(mx.float32)
        wanted = [row.params.logprobs for row in rows if row.params.logprobs is not None]
        edited = mx.stack([self._edit(logits[i], row) for i, row in enumerate(rows)])
        valid = (mx.max(edited, axis=-1) > -mx.inf) & ~mx.any(mx.isnan(edited), axis=-1)
        greedy = mx.argmax(edited, axis=-1)
        drawn = [
            greedy[i] if row.params.greedy else _draw(edited[i], row) for i, row in enumerate(rows)
        ]
        ids = mx.stack(drawn).astype(mx.int32)
        for i, row in enumerate(rows):
            if row.slot in self._counts and row.params.has_penalties:
                self._counts[row.slot] = self._counts[row.slot].at[ids[i]].add(1.0)
        return SampleResult(ids, valid, self.logprobs(logits, ids, max(wanted)) if wanted else None)

    def logprobs(self, logits: mx.array, targets: mx.array, num_top: int) -> Logprobs:
        """Of the target token of each row and of the row's likeliest tokens."""
        logits = logits.astype(mx.float32)
        normalised = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(normalised, targets[:, None].astype(mx.int32), axis=-1)
        rank = mx.sum(normalised > chosen, axis=-1) + 1
        top = mx.argsort(-normalised, axis=-1)[:, :num_top].astype(mx.int32)
        return Logprobs(chosen[:, 0], rank.astype(mx.int32), top, mx.take_along_axis(normalised, top, axis=-1))

    def _edit(self, logits: mx.array, row: RowSampling) -> mx.array:
        params = row.params
        if params.has_penalties:
            counts, in_prompt = self._counts[row.slot], self._in_prompt[row.slot]
            if params.repetition_penalty != 1.0:
                scaled = mx.where(
                    logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
                )
                logits = mx.where(in_prompt | (counts > 0), scaled, logits)
            logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        if params.logit_bias:
            ids = mx.array(list(params.logit_bias))
            logits = logits.at[ids].add(mx.array(list(params.logit_bias.values())))
        if row.forbidden:
            logits = logits.at[mx.array(list(row.forbidden))].add(-mx.inf)
        if row.mask is not None:
            allowed = np.unpackbits(row.mask.view(np.uint8), bitorder="little")[: self._vocab_size]
            logits = mx.where(mx.array(allowed.astype(bool)), logits, -mx.inf)
        return logits


def _draw(logits: mx.array, row: RowSampling) -> mx.array:
    params = row.params
    scaled = logits / params.temperature
    order = mx.argsort(-scaled)
    ranked = mx.softmax(scaled[order])
    keep = mx.arange(ranked.size) < (params.top_k if params.top_k > 0 else ranked.size)
    ranked = mx.where(keep, ranked, 0.0)
    before = mx.cumsum(ranked) - ranked
    keep = keep & (before < params.top_p * mx.sum(ranked)) & (ranked >= params.min_p * ranked[0])
    key = mx.random.key((row.seed * 0x9E3779B97F4A7C15 + row.draw) & (2**63 - 1))
    # Noise belongs to the token, not to its rank.
    noise = mx.random.gumbel((logits.size,), key=key)[order]
    return order[mx.argmax(mx.where(keep, scaled[order] + noise, -mx.inf))]

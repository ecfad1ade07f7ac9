"""Runs planned steps: host tokens and page tables in, device-side tokens out. Never waits for the device,
except in read()."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import mlx.core as mx
import numpy as np

from .attention_planner import AttentionPlanner
from .models.batch import AttentionBatch
from .ops import TokenLogprobs, token_logprobs
from .ops.device import to_list
from .outcomes import Outcomes
from .outputs import TokenLogprob
from .sampler import Sampler
from .scheduler.policy import Tick
from .scheduler.request import Request
from .scheduler.scheduler import ScheduledRow, StepPlan
from .step_batch import ScoredTokens, StepBatcher

if TYPE_CHECKING:
    from .kvcache.pool import KVPool
    from .models.config import ModelConfig


class RunnableModel(Protocol):
    """What the runner needs of a model."""

    config: ModelConfig
    dtype: mx.Dtype
    attention_path: str
    kv_layout: str

    def __call__(self, tokens: mx.array, batch: AttentionBatch, kv: Any) -> mx.array: ...


@dataclass(slots=True)
class Step:
    """A submitted step. Its arrays live on the device until read() asks for them."""

    plan: StepPlan
    sampled: list[ScheduledRow]
    #: Place of a request's sampled token in ids.
    index: dict[Request, int]
    #: Kept until the tokens are drawn, where that has to wait for the step before (grammars).
    logits: mx.array | None = None
    #: The last pool that it writes, to wait for where it draws nothing.
    written: mx.array | None = None
    ids: mx.array | None = None
    valid: mx.array | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[tuple[ScoredTokens, TokenLogprobs]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the host reads of a step; lists are parallel to Step.sampled."""

    token_ids: list[int]
    valid: list[bool]
    logprobs: list[TokenLogprob | None]
    prompt_logprobs: list[tuple[ScoredTokens, list[TokenLogprob]]]


class Runner:
    """Turns plans into arrays and back.

    Rows with a grammar are drawn when the tokens before them are known: their step's forward pass runs
    ahead like any other, only the draw waits.
    """

    def __init__(
        self,
        model: RunnableModel,
        kv: KVPool,
        sampler: Sampler,
        outcomes: Outcomes,
        *,
        batch_invariant: bool = True,
    ) -> None:
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._outcomes = outcomes
        self._batcher = StepBatcher(kv.page_size)
        self._planner = AttentionPlanner(model.config, model.attention_path, batch_invariant=batch_invariant)

    def submit(self, plan: StepPlan, previous: Step | None) -> Step:
        """Start a step whose decode rows may continue tokens of the previous one that nobody has read.

        On an error nothing is submitted, the pool's handles are as before, and the contents of the pages
        that the plan writes are undefined.
        """
        handles = self._kv.handles()
        try:
            return self._submit(plan, previous)
        except BaseException:
            self._kv.restore(handles)
            raise

    def _submit(self, plan: StepPlan, previous: Step | None) -> Step:
        if plan.copies:
            self._kv.copy_pages([c.source for c in plan.copies], [c.target for c in plan.copies])
        for row in plan.rows:
            if row.admitted:
                self._begin(row)
        sampled = [row for row in plan.rows if row.sample]
        step = Step(plan, sampled, {row.request: i for i, row in enumerate(sampled)})
        batch, scored = self._batch(plan)
        logits = self._model(self._tokens(plan, previous), batch, self._kv)
        self._score_prompts(step, logits, scored)
        if scored:
            logits = logits[: len(sampled)]
        if previous is not None and any(row.request.job.grammar is not None for row in sampled):
            step.logits = logits
            mx.async_eval(logits, *self._kv.arrays)
            self._outcomes.count("mlxcel_engine_sampling_total", "after_read")
            return step
        self._draw(step, logits)
        return step

    def draw(self, step: Step) -> None:
        """Sample a step that waited for the tokens of the step before, which are read now."""
        if step.logits is not None:
            logits, step.logits = step.logits, None
            self._draw(step, logits)

    def _draw(self, step: Step, logits: mx.array) -> None:
        arrays = [a for _, scores in step.prompt_logprobs for a in scores]
        if step.sampled:
            drawn = self._sampler(
                logits,
                [row.slot for row in step.sampled],
                [row.draw_index for row in step.sampled],
                {
                    i: job.row_edit(row)
                    for i, row in enumerate(step.sampled)
                    if (job := row.request.job).edits_rows
                },
            )
            step.ids, step.valid = drawn.ids, drawn.valid
            arrays += [step.ids, step.valid]
            scores = (drawn.logprobs, drawn.ranks, drawn.top_ids, drawn.top_logprobs)
            if drawn.logprobs is not None:
                step.logprobs = TokenLogprobs(*cast(tuple[mx.array, ...], scores))
                arrays += step.logprobs
        step.written = self._kv.arrays[-1]
        mx.async_eval(*arrays, *self._kv.arrays)

    def read(self, step: Step) -> StepResult:
        """Wait for a step and bring its tokens to the host."""
        token_ids: list[int] = []
        valid: list[bool] = []
        if step.ids is None or step.valid is None:
            mx.eval(step.written)  # of this step: the pool's present handle belongs to the next one
        else:
            token_ids, valid = to_list(step.ids), to_list(step.valid)
        logprobs: list[TokenLogprob | None] = [None] * len(token_ids)
        if step.logprobs is not None:
            wanted = [row.request.job.params.logprobs for row in step.sampled]
            logprobs = _token_logprobs(token_ids, step.logprobs, wanted)
        prompts = []
        for scored, scores in step.prompt_logprobs:
            wanted = [scored.request.job.params.prompt_logprobs] * scored.count
            found = _token_logprobs(scored.targets, scores, wanted)
            prompts.append((scored, [s for s in found if s is not None]))
        return StepResult(token_ids, valid, logprobs, prompts)

    def probe(self, request: Request, page: int) -> None:
        """Draw one token for a request that nobody planned, and wait; raises what an ordinary step would raise.

        Overwrites the page. Counts nothing: a probe is no traffic.
        """
        row = ScheduledRow(request, 0, 1, array("i", [page]), True, 0, True, slot=0, admitted=True)
        outcomes, self._outcomes = self._outcomes, Outcomes()
        try:
            self.read(self.submit(StepPlan(Tick.PREFILL, [row], []), None))
        finally:
            self._outcomes = outcomes

    # -- inputs ------------------------------------------------------------------------------------------

    def _begin(self, row: ScheduledRow) -> None:
        request = row.request
        split = request.num_prompt_tokens
        tokens, job = request.tokens, request.job
        # Slots are unique among running requests; a preempted one gives its own up.
        self._sampler.add(
            row.slot,
            job.params,
            job.seed,
            prompt_ids=tokens[:split],
            output_ids=tokens[split:],
        )

    def _tokens(self, plan: StepPlan, previous: Step | None) -> mx.array:
        """int32 [nnz]: tokens the host knows, and for the others the previous step's, still on the device."""
        index = {} if previous is None else previous.index
        drawn = None if previous is None else previous.ids
        if drawn is not None and [row.request for row in plan.rows] == list(index):
            # Steady decoding: the same rows as before, so each continues its token of the step before.
            self._outcomes.count("mlxcel_engine_step_input_total", "device")
            return drawn
        host: list[int] = []
        sources: list[int] = []  # place in the previous step's ids, -1: the host knows
        for row in plan.rows:
            tokens = row.request.tokens
            if row.start + row.count <= len(tokens):
                host += tokens[row.start : row.start + row.count]
                sources += [-1] * row.count
            else:
                host.append(0)
                sources.append(index[row.request])
        if drawn is None or max(sources) < 0:
            self._outcomes.count("mlxcel_engine_step_input_total", "host")
            return mx.array(np.array(host, np.int32))
        self._outcomes.count("mlxcel_engine_step_input_total", "mixed")
        known = drawn.size
        places = [source if source >= 0 else known + i for i, source in enumerate(sources)]
        both = mx.concatenate([drawn, mx.array(np.array(host, np.int32))])
        return both[mx.array(np.array(places, np.int32))]

    def _batch(self, plan: StepPlan) -> tuple[AttentionBatch, list[ScoredTokens]]:
        made = self._batcher.batch(plan.rows)
        attention_plan = self._planner.plan(made.table, made.qo_indptr, self._outcomes)
        if made.qo_indptr is None:
            path = self._planner.decode_path
            self._outcomes.count("mlxcel_paged_decode_launches_total", path, self._num_layers)
        batch = AttentionBatch(made.positions, made.table, made.qo_indptr, attention_plan, made.logit_rows)
        return batch, made.scored

    def _score_prompts(self, step: Step, logits: mx.array, scored: Sequence[ScoredTokens]) -> None:
        at = len(step.sampled)
        for tokens in scored:
            targets = mx.array(np.array(tokens.targets, np.int32))
            num_top = tokens.request.job.params.prompt_logprobs
            scores = token_logprobs(logits[at : at + tokens.count], targets, num_top)
            step.prompt_logprobs.append((tokens, scores))
            at += tokens.count

    @property
    def _num_layers(self) -> int:
        return self._model.config.num_layers


def _token_logprobs(
    token_ids: Sequence[int], scores: TokenLogprobs, wanted: Sequence[int | None]
) -> list[TokenLogprob | None]:
    logprob, rank, top_ids, top_logprobs = (to_list(a) for a in scores)
    return [
        None
        if count is None
        else TokenLogprob(
            token, logprob[i], rank[i], tuple(zip(top_ids[i][:count], top_logprobs[i][:count], strict=True))
        )
        for i, (token, count) in enumerate(zip(token_ids, wanted, strict=True))
    ]

"""What the engine thread does: one turn plans and submits a step, then reads the one before it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import mlx.core as mx

from .engine_config import EngineConfig, EngineError, EngineStats
from .grammar import GrammarError
from .job import Job
from .kvcache.page_allocator import PageAllocator
from .kvcache.pool import KVPool
from .kvcache.prefix_tree import PrefixTree
from .outcomes import Outcomes
from .outputs import FinishReason, RequestOutput
from .runner import RunnableModel, Runner, Step, StepResult
from .sampler import Sampler
from .sampling_params import SamplingParams
from .scheduler.policy import TickPolicy
from .scheduler.request import Request, State
from .scheduler.scheduler import Scheduler, StepPlan
from .text import Detokenizer

if TYPE_CHECKING:
    from .models.config import ModelConfig

_logger = logging.getLogger("mlxcel_ext")

#: Without a setting, the pool takes at most this share of the memory: of a GPU, what the weights leave.
_POOL_SHARE = {mx.cpu: 1 / 16, mx.gpu: 0.6}

_DEVICES = {mx.cpu: "the CPU", mx.gpu: "a GPU"}


class EngineLoop:
    """Scheduler, runner and jobs of an engine; used by the engine thread alone, but for stats().

    A failed step does not end the loop. Its requests start over, one at a time, until the one that fails by
    itself is found; that one fails, the others go on. Only when a harmless probe fails too, the loop gives up.
    """

    def __init__(self, model: RunnableModel, config: EngineConfig) -> None:
        self._config = config
        shape = model.config
        dtype = kv_cache_dtype(config, model.dtype)
        page_bytes = KVPool.page_bytes(
            shape.num_layers, config.page_size, shape.num_kv_heads, shape.head_dim, dtype
        )
        self._page_bytes = page_bytes
        num_pages = pool_pages(config, shape, page_bytes)
        self.max_model_len = min(
            config.max_model_len or shape.max_position_embeddings,
            shape.max_position_embeddings,
            num_pages * config.page_size,
        )
        self._kv = KVPool(
            shape.num_layers,
            num_pages,
            config.page_size,
            shape.num_kv_heads,
            shape.head_dim,
            dtype,
            model.kv_layout,
        )
        self.allocator = PageAllocator(num_pages)
        self.tree = None
        if config.enable_prefix_caching:
            budget = config.prompt_cache_bytes
            self.tree = PrefixTree(
                self.allocator, config.page_size, None if budget is None else budget // page_bytes
            )
        self.scheduler = Scheduler(
            self.allocator,
            self.tree,
            TickPolicy(config.prefill_grant_interval, config.mixed_steps),
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            prefill_chunk_size=config.prefill_chunk_size,
            token_budget=config.token_budget,
            watermark=config.watermark,
            window_left=max(shape.windows) if shape.windows and min(shape.windows) >= 0 else None,
        )
        self.outcomes = Outcomes()
        self._sampler = Sampler(shape.vocab_size, config.max_num_seqs)
        self.runner = Runner(
            model,
            self._kv,
            self._sampler,
            self.outcomes,
            batch_invariant=(
                mx.default_device() == mx.cpu if config.batch_invariant is None else config.batch_invariant
            ),
        )
        # Held where the engine thread moves requests and pages, so that stats() sees sums that are right.
        self._lock = threading.Lock()
        self._in_flight: Step | None = None
        self._ended: list[str] = []
        self._outputs: list[tuple[Job, RequestOutput]] = []
        self._with_deadline: dict[Job, None] = {}
        #: time.monotonic() at which the turn under way began; None between turns.
        self.turn_began: float | None = None
        self._failures = 0
        self._steps = 0
        self._step_seconds = 0.0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    # -- requests ----------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return self.scheduler.has_work() or self._in_flight is not None or bool(self._ended or self._outputs)

    def add(self, job: Job) -> None:
        """A new request."""
        if job.request.state is State.FINISHED:
            return
        if job.deadline is not None:
            self._with_deadline[job] = None
        with self._lock:
            self._prompt_tokens += job.request.num_prompt_tokens
            self.scheduler.add(job.request)

    def end(
        self,
        job: Job,
        reason: FinishReason,
        *,
        error: str | None = None,
        client_error: bool = False,
        stop_reason: str | None = None,
        keep: bool = True,
    ) -> None:
        """End a request from outside or by an error, and tell its owner."""
        if job.request.state is State.FINISHED:
            return
        output = job.output(
            finish_reason=reason, error=error, client_error=client_error, stop_reason=stop_reason
        )
        self._retire(job, reason, keep=keep)
        self._outputs.append((job, output))

    def notify_death(self, job: Job, detail: str) -> None:
        """The loop is over: nothing but the message matters."""
        if job.request.state is not State.FINISHED:
            job.request.state = State.FINISHED
            self._outputs.append((job, job.output(finish_reason="error", error=f"the engine died: {detail}")))

    def evict_all(self) -> int:
        """Drop every cached page that no request uses."""
        with self._lock:
            return 0 if self.tree is None else self.tree.evict(self.allocator.num_pages)

    def _retire(self, job: Job, reason: str, *, keep: bool) -> None:
        with self._lock:
            self.scheduler.finish(job.request, keep=keep)
        self._with_deadline.pop(job, None)
        self._ended.append(job.request.request_id)
        self.outcomes.count("mlxcel_requests_finished_total", reason)

    def hand_over(self) -> None:
        """Tell the requests' owners what has come for them."""
        outputs, self._outputs = self._outputs, []
        for job, output in outputs:
            try:
                job.on_output(output)
            except Exception:
                _logger.exception("%s: its output callback raised", job.request.request_id)
                self.outcomes.count("mlxcel_request_failures_total", "callback")
                if job.request.state is not State.FINISHED:
                    self._retire(job, "error", keep=True)

    # -- a turn ------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Run one harmless step, so that "ok" means that the model answers."""
        self._probe()

    def _probe(self) -> None:
        """A step of one token that belongs to nobody; nothing else may be running."""
        request = Request("probe", [0], 2, arrival=0)
        request.job = Job(
            request, SamplingParams(temperature=0.0), _ignore, Detokenizer(_NoText()), 0, frozenset()
        )
        self.runner.probe(request, self._take_probe_page())

    def turn(self) -> list[str]:
        """Submit a step and read the one before; returns the ids of requests that ended."""
        self.turn_began = started = time.monotonic()
        self._expire()
        previous, self._in_flight = self._in_flight, None
        with self._lock:
            plan = self.scheduler.schedule()
        if plan is None and previous is None:
            self._fail_stuck()
        step = None if plan is None else self._submit(plan, previous)
        # What the turn before has read: now, since its readers have the interpreter while the device is at work.
        self.hand_over()
        if previous is not None and not self._read(previous, step):
            step = None
        if step is not None and not self._draw(step):
            step = None
        self._in_flight = step
        if step is not None and not self._config.pipeline:
            self._in_flight = None
            self._read(step, None)
        if self._in_flight is None:
            self.hand_over()
        self._step_seconds += time.monotonic() - started
        self.turn_began = None
        ended, self._ended = self._ended, []
        return ended

    def _expire(self) -> None:
        now = time.monotonic() if self._with_deadline else 0.0
        for job in [job for job in self._with_deadline if job.deadline is not None and job.deadline <= now]:
            self.end(job, "abort", error="the time limit of the request is over", stop_reason="deadline")

    def _submit(self, plan: StepPlan, previous: Step | None) -> Step | None:
        now = time.monotonic()
        for row in plan.rows:
            if row.request.job.scheduled is None:
                row.request.job.scheduled = now
                self.outcomes.count("mlxcel_prefix_lookups_total", self._lookup_outcome(row.request))
        try:
            step = self.runner.submit(plan, previous)
        except Exception as error:
            self._recover([plan], error, "submit")
            return None
        self._steps += 1
        self.outcomes.count("mlxcel_engine_steps_total", plan.tick.value)
        return step

    def _lookup_outcome(self, request: Request) -> str:
        cached = request.num_cached_tokens or 0
        if self.tree is None:
            return "off"
        if not request.use_prefix_cache:
            return "bypassed"
        if not cached:
            return "miss"
        return "whole_prompt" if cached == request.num_prompt_tokens - 1 else "prefix"

    def _draw(self, step: Step) -> bool:
        try:
            self.runner.draw(step)
        except Exception as error:
            self._recover([step.plan], error, "draw")
            return False
        return True

    def _read(self, step: Step, following: Step | None) -> bool:
        """Take the tokens of a step; False where it failed, and with it the one that follows."""
        try:
            result = self.runner.read(step)
        except Exception as error:
            self._kv.reset()
            self._recover([step.plan, *([following.plan] if following else [])], error, "read")
            return False
        self._failures = 0
        self._take(step, result)
        return True

    def _take(self, step: Step, result: StepResult) -> None:
        for scored, logprobs in result.prompt_logprobs:
            # At their places: after a failure a chunk that was in flight is read, and then scored again.
            known = scored.request.job.prompt_logprobs
            known[scored.first : scored.first + scored.count] = logprobs
        for row, token, valid, logprob in zip(
            step.sampled, result.token_ids, result.valid, result.logprobs, strict=True
        ):
            request, job = row.request, row.request.job
            if request.state is State.FINISHED:
                self.outcomes.count("mlxcel_rows_discarded_total", "finished")
                continue
            try:
                self.scheduler.append(request, token)
                if step.plan.alone:
                    self.scheduler.suspects.pop(request, None)
                if not valid and job.failure is None:
                    raise EngineError("the model's logits are NaN, or nothing may be drawn from them")
                self._generation_tokens += 1
                output = job.accept(token, logprob)
            except Exception as error:
                self._fail(job, error, "row")
                continue
            if output.finish_reason is not None:
                self._retire(job, output.finish_reason, keep=True)
            self._outputs.append((job, output))
        if self._config.prefill_progress and step.plan.rows[-1].prefill:  # decode rows come first
            for row in step.plan.rows:
                request = row.request
                if row.prefill and not row.sample and request.state is State.RUNNING:
                    done = min(row.start + row.count, request.num_prompt_tokens)
                    progress = request.job.output(prefill_progress=(done, request.num_prompt_tokens))
                    self._outputs.append((request.job, progress))

    # -- failures ----------------------------------------------------------------------------------------

    def _fail(self, job: Job, error: Exception, stage: str, *, keep: bool = False) -> None:
        if isinstance(error, GrammarError):
            _logger.info("%s: %s", job.request.request_id, error)
            self.outcomes.count("mlxcel_request_failures_total", "grammar")
            self.end(job, "error", error=str(error), client_error=True, keep=keep)
            return
        _logger.error("%s failed: %s", job.request.request_id, error, exc_info=error)
        self.outcomes.count("mlxcel_request_failures_total", stage)
        self.end(job, "error", error=f"{type(error).__name__}: {error}", keep=keep)

    def _fail_stuck(self) -> None:
        """Nothing could be planned and nothing is under way: waiting longer would change nothing."""
        stuck = next(iter((*self.scheduler.running, *self.scheduler.waiting)), None)
        if stuck is not None:
            self._fail(stuck.job, EngineError("no step can be planned for this request"), "stuck")

    def _recover(self, plans: list[StepPlan], error: Exception, stage: str) -> None:
        """Steps failed: forget what they wrote, and find out who is to blame."""
        _logger.error("a step failed (%s): %s", stage, error, exc_info=error)
        self.outcomes.count("mlxcel_step_failures_total", stage)
        self._failures += 1
        involved: dict[Request, None] = {}
        with self._lock:
            for plan in plans:
                self.scheduler.forget(plan)
                involved.update(
                    (row.request, None) for row in plan.rows if row.request.state is not State.FINISHED
                )
            if self.tree is not None:
                self.tree.clear()
            for request in list(self.scheduler.running):
                self.scheduler.requeue(request, keep=False)
        for request in involved:
            self.scheduler.suspects[request] = None
            request.job.num_scored = len(request.job.prompt_logprobs)
        if len(involved) == 1:
            self._fail(next(iter(involved)).job, error, stage)
        if self._failures >= self._config.max_step_failures:
            self._probe_or_give_up(error)

    def _probe_or_give_up(self, error: Exception) -> None:
        try:
            self._probe()
        except Exception as probe_error:
            raise EngineError(
                f"{self._failures} steps failed in a row, and so did a probe: the engine gives up. "
                f"Last error: {type(error).__name__}: {error}"
            ) from probe_error
        self._failures = 0

    def _take_probe_page(self) -> int:
        """A page that nobody uses at the moment; nothing is planned before the probe is over."""
        with self._lock:
            pages = self.allocator.allocate(1)
            if pages is None and self.tree is not None:
                self.tree.evict(1)
                pages = self.allocator.allocate(1)
            if pages is None:
                raise EngineError("no page is free for a probe")
            self.allocator.release(pages[0])
        return pages[0]

    # -- statistics --------------------------------------------------------------------------------------

    def stats(self, jobs: Iterable[Job], labels: Mapping[str, str | None]) -> EngineStats:
        """Counts of this moment; of the jobs, those count as waiting that have not ended and do not run."""
        counters = self.outcomes.snapshot()
        counters["mlxcel_engine_sampling_total"] = {
            **counters["mlxcel_engine_sampling_total"],
            **{path: count for path, count in self._sampler.steps.items() if count},
        }
        scheduled, allocator = self.scheduler.stats, self.allocator
        counters["mlxcel_admissions_declined_total"] = {r: n for r, n in scheduled.declined.items() if n}
        with self._lock:
            return EngineStats(
                running=len(self.scheduler.running),
                waiting=sum(job.request.state is State.WAITING for job in jobs),
                max_num_seqs=self._config.max_num_seqs,
                max_model_len=self.max_model_len,
                page_size=self._config.page_size,
                page_bytes=self._page_bytes,
                pages_total=allocator.num_pages,
                pages_free=allocator.num_free,
                pages_cached=allocator.num_cached,
                pages_in_use=allocator.num_in_use,
                prefix_queries=scheduled.prefix_queries,
                prefix_hits=scheduled.prefix_hits,
                prefix_query_tokens=scheduled.prefix_query_tokens,
                prefix_hit_tokens=scheduled.prefix_hit_tokens,
                prompt_tokens=self._prompt_tokens,
                generation_tokens=self._generation_tokens,
                preemptions=scheduled.preemptions,
                steps=self._steps,
                step_seconds=self._step_seconds,
                counters=counters,
                counter_labels=labels,
            )


class _NoText:
    """The text of a probe."""

    def step(self, token_id: int) -> str | None:
        return None

    def flush(self) -> str:
        return ""


def _ignore(output: RequestOutput) -> None:
    """Where a probe's outputs would go."""


def kv_cache_dtype(config: EngineConfig, activations: mx.Dtype) -> mx.Dtype:
    """Of the pages: EngineConfig.kv_cache_dtype under activations of that dtype. Only CPU kernels read 16-bit pages
    under float32 activations."""
    narrow = mx.default_device() == mx.cpu and activations == mx.float32
    if config.kv_cache_dtype == "auto":
        return mx.float16 if narrow else activations
    dtype: mx.Dtype = getattr(mx, config.kv_cache_dtype)
    if dtype != activations and not narrow:
        own = str(activations).removeprefix("mlx.core.")
        raise ValueError(
            f"[engine] kv_cache_dtype must be auto or {own} where activations are {own} on {_DEVICES[mx.default_device().type]}; "
            f"got {config.kv_cache_dtype}."
        )
    return dtype


def pool_pages(config: EngineConfig, shape: ModelConfig, page_bytes: int) -> int:
    """Pages of the pool: as set, else for max_num_seqs full contexts within a share of the memory."""
    if config.num_pages is not None:
        return config.num_pages
    if config.kv_cache_bytes is not None:
        pages = config.kv_cache_bytes // page_bytes
        if pages < 1:
            raise ValueError(
                f"[engine] kv_cache_bytes must hold at least one page of {page_bytes} bytes; "
                f"got {config.kv_cache_bytes}."
            )
        return pages
    context = min(config.max_model_len or shape.max_position_embeddings, shape.max_position_embeddings)
    one = -(-context // config.page_size)
    return max(min(one * config.max_num_seqs, _default_pool_bytes() // page_bytes), min(one, 64), 1)


def _default_pool_bytes() -> int:
    device = mx.default_device()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device == mx.gpu:
        memory = int(mx.device_info().get("memory_size", memory)) - mx.get_active_memory()
    return int(memory * _POOL_SHARE[device.type])

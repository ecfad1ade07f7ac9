"""The engine: one thread that plans, submits and reads steps, and never lets one request take down the others."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import set_num_threads
from .engine_config import (
    EngineConfig,
    EngineDeadError,
    EngineError,
    EngineStats,
    Health,
    QueueFullError,
)
from .engine_loop import EngineLoop
from .grammar import GrammarCompiler
from .job import Job
from .outcomes import LABELS
from .outputs import RequestOutput
from .sampling_params import MAX_SEED, SamplingParams
from .scheduler.request import Request
from .text import Detokenizer

if TYPE_CHECKING:
    from .models import LoadedModel

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineStats",
    "Health",
    "QueueFullError",
]

_logger = logging.getLogger("mlxcel_ext")


class Engine:
    """Continuous batching over one model. Every public method is thread-safe."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        if self.config.threads is not None:
            set_num_threads(self.config.threads)
        self._loaded = loaded
        self._loop = EngineLoop(loaded.model, self.config)
        self._vocab_size = loaded.config.vocab_size
        # Some models name an end of text that their logits do not have: it is never drawn.
        self._eos_token_ids = tuple(
            dict.fromkeys(
                token
                for token in (*loaded.config.eos_token_ids, *loaded.tokenizer.eos_token_ids)
                if token < self._vocab_size
            )
        )
        self._grammars = GrammarCompiler(loaded.tokenizer, self._vocab_size, self._eos_token_ids)
        self._wake = threading.Condition()
        # Guarded by _wake:
        self._jobs: dict[str, Job] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._health = Health("loading")
        self._arrivals = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="mlxcel-engine", daemon=True)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt plus output."""
        return self._loop.max_model_len

    def start(self) -> None:
        """Start the engine thread; returns at once. health() is "loading" until a first step has run."""
        # A thread that is inside MLX when the interpreter goes is ended by force, and takes the process down with it.
        atexit.register(self._leave)
        self._thread.start()

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """Refuse new requests, finish (drain) or abort the others, and join the thread.

        With a timeout, what still runs after that many seconds is aborted.
        """
        with self._wake:
            if self._health.state in ("ok", "loading"):
                self._health = Health("draining")
            self._stop = True
            if not drain:
                self._abort_all("the server shuts down")
            self._wake.notify()
        atexit.unregister(self._leave)
        if self._thread.ident is None:
            self._die(EngineDeadError("shut down before it was started"))
        if not self._thread.is_alive():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._wake:
                self._abort_all("the server shuts down")
                self._wake.notify()
            self._thread.join()

    def _leave(self) -> None:
        self.shutdown(drain=False)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        on_output: Callable[[RequestOutput], None],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
    ) -> None:
        """Queue a request.

        on_output is called on the engine thread with each delta and must not block; the last one is finished.
        A lower priority runs first. deadline is a time.monotonic() value.
        Raises ValueError (bad params or grammar, empty or too long prompt, id in use), QueueFullError,
        EngineDeadError.
        """
        params.validate(self._vocab_size)
        prompt = self._checked_prompt(prompt_token_ids)
        grammar = None if params.grammar is None else self._grammars.compile(params.grammar)
        now = time.monotonic()
        if self.config.max_request_seconds is not None:
            limit = now + self.config.max_request_seconds
            deadline = limit if deadline is None else min(deadline, limit)
        room = self.max_model_len - len(prompt)
        stream = self._loaded.tokenizer.decode_stream(params.skip_special_tokens)
        with self._wake:
            if self._health.state in ("draining", "dead"):
                raise EngineDeadError(
                    f"[engine] {self._health.state}: {self._health.detail or 'shutting down'}"
                )
            if request_id in self._jobs:
                raise ValueError(f"[engine] request id {request_id!r} is in use.")
            if len(self._jobs) >= self.config.max_num_seqs + self.config.max_queue_depth:
                raise QueueFullError(
                    f"[engine] the queue is full ({self.config.max_queue_depth} requests wait)."
                )
            self._arrivals += 1
            request = Request(
                request_id,
                prompt,
                len(prompt) + min(params.max_tokens or room, room),
                self._arrivals,
                priority=priority,
                cache_salt=cache_salt,
                # Adopted tokens are not computed, so they would have no logprobs.
                use_prefix_cache=params.prompt_logprobs is None,
            )
            job = request.job = Job(
                request,
                params,
                on_output,
                Detokenizer(stream, params.stop, include_stop=params.include_stop_str_in_output),
                seed=self._seed(params),
                stop_ids=frozenset(() if params.ignore_eos else self._eos_token_ids)
                | {*params.stop_token_ids},
                grammar=grammar,
                deadline=deadline,
                submitted=now,
            )
            self._jobs[request_id] = job
            self._inbox.append(lambda: self._loop.add(job))
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """End a request with finish_reason "abort"; unknown ids are ignored. Its pages are free within a step."""
        with self._wake:
            job = self._jobs.get(request_id)
            if job is not None:
                self._inbox.append(lambda: self._loop.end(job, "abort"))
                self._wake.notify()

    def health(self) -> Health:
        """The state now. An engine that hangs in one step is dead as long as it does."""
        with self._wake:
            if self._health.state in ("ok", "draining") and not self._thread.is_alive() and not self._stop:
                self._health = Health("dead", "the engine thread is gone")
            state, began, limit = self._health, self._loop.turn_began, self.config.stall_seconds
        waited = 0.0 if began is None else time.monotonic() - began
        if state.state != "dead" and limit is not None and waited > limit:
            return Health("dead", f"a step has been running for {waited:.0f} s")
        return state

    def stats(self) -> EngineStats:
        """Counts of this moment."""
        with self._wake:
            return self._loop.stats(self._jobs.values(), LABELS)

    def reset_prefix_cache(self) -> int:
        """Drop every cached page that no request uses; returns how many. Waits for the current step."""
        done = threading.Event()
        freed: list[int] = []

        def clear() -> None:
            freed.append(self._loop.evict_all())
            done.set()

        with self._wake:
            if self._health.state == "dead":
                raise EngineDeadError(f"[engine] dead: {self._health.detail}")
            self._inbox.append(clear)
            self._wake.notify()
        while not done.wait(0.1):
            if not self._thread.is_alive():
                raise EngineDeadError("[engine] the engine thread is gone.")
        return freed[0]

    # -- checks ------------------------------------------------------------------------------------------

    def _checked_prompt(self, token_ids: list[int]) -> list[int]:
        prompt = list(token_ids)
        if not prompt:
            raise ValueError("[engine] the prompt is empty: at least one token is needed.")
        if len(prompt) >= self.max_model_len:
            raise ValueError(
                f"[engine] the prompt has {len(prompt)} tokens, but the context holds {self.max_model_len} and the "
                f"answer needs at least one."
            )
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self._vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"[engine] prompt token ids must be in 0..{self._vocab_size - 1}; got {bad}.")
        return prompt

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        # Odd multiples of an odd constant differ for 2^64 arrivals.
        return (self.config.seed + self._arrivals * 0x9E3779B97F4A7C15) & MAX_SEED

    # -- the engine thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.warm_up()
            with self._wake:
                if self._health.state == "loading":
                    self._health = Health("ok")
            while self._take_messages():
                for request_id in self._loop.turn():
                    with self._wake:
                        self._jobs.pop(request_id, None)
        except BaseException as error:
            self._die(error)
        else:
            with self._wake:
                self._health = Health("dead", "shut down")

    def _take_messages(self) -> bool:
        """Run what other threads asked for; blocks while there is nothing to do. False: the loop ends."""
        with self._wake:
            while not self._inbox and not self._loop.has_work():
                if self._stop and not self._jobs:
                    return False
                self._wake.wait()
            messages = list(self._inbox)
            self._inbox.clear()
        for message in messages:
            message()
        return True

    def _abort_all(self, why: str) -> None:
        for job in self._jobs.values():
            self._inbox.append(lambda job=job: self._loop.end(job, "abort", error=why))  # type: ignore[misc]

    def _die(self, error: BaseException) -> None:
        """Tell the truth and everybody who waits."""
        detail = f"{type(error).__name__}: {error}"
        _logger.critical("the engine thread died: %s", detail, exc_info=error)
        with self._wake:
            self._health = Health("dead", detail)
            jobs = list(self._jobs.values())
            self._jobs.clear()
            self._inbox.clear()
        for job in jobs:
            self._loop.notify_death(job, detail)
        self._loop.hand_over()

"""Engine requests of one HTTP request: submitted together, read as one stream, cancelled as one."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

from ..engine_config import EngineDeadError, QueueFullError
from ..outputs import RequestOutput
from ..sampling_params import GRAMMAR_KINDS, MAX_SEED, SamplingParams
from .errors import ApiError, bad_request
from .metrics import Finished
from .protocol import PromptTokensDetails, Usage
from .state import ServerState

#: Text longer than this many characters is tokenized off the event loop: other streams go on meanwhile.
OFF_LOOP_CHARS = 4096
#: A text that is truncated to the context, or ids that are read back, may be longer than that by this factor.
TRUNCATED = 16


@dataclass(frozen=True)
class Work:
    """One choice: a prompt and how to continue it."""

    index: int
    prompt_ids: list[int]
    params: SamplingParams


def seeded(params: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of the n-th choice of a prompt: a seed of its own, so that the choices differ."""
    if params.seed is None or choice == 0:
        return params
    return replace(params, seed=(params.seed + choice) & MAX_SEED)


async def tokenize(
    state: ServerState,
    text: str,
    add_special_tokens: bool,
    *,
    truncated: bool = False,
    one_of_many: bool = False,
) -> list[int]:
    """Ids of a prompt. A text that cannot fit the context is refused unread; one that is truncated may be longer.

    one_of_many: other texts of the same request follow, which are long together.

    Tokenizing ten megabytes without a space takes minutes, in a thread that no disconnect can stop.
    """
    encode = state.model.tokenizer.encode
    limit = state.engine.max_model_len
    if len(text) > limit * state.model.tokenizer.max_token_chars * (TRUNCATED if truncated else 1):
        raise bad_request(
            f"This model's context is {limit} tokens; a prompt of {len(text)} characters has more",
            "prompt",
            "context_length_exceeded",
        )
    try:
        if len(text) <= OFF_LOOP_CHARS and not one_of_many:
            return encode(text, add_special_tokens)
        return await asyncio.to_thread(encode, text, add_special_tokens)
    except ValueError as error:  # a lone surrogate, which JSON's escapes can spell
        raise bad_request(str(error), "prompt", "invalid_value") from None


def check_length(state: ServerState, prompt_ids: list[int], max_tokens: int | None) -> None:
    """A 400 for a prompt that is empty, holds unknown ids, or leaves no room for the output."""
    if not prompt_ids:
        raise bad_request("The prompt is empty: at least one token is wanted", "prompt", "invalid_value")
    limit = state.engine.max_model_len
    room = limit - len(prompt_ids)
    if room < 1 or (max_tokens or 0) > room:
        wanted = f" and {max_tokens} of output" if max_tokens else ""
        raise bad_request(
            f"This model's context is {limit} tokens; the request has {len(prompt_ids)} tokens of prompt{wanted}",
            "prompt" if room < 1 else "max_tokens",
            "context_length_exceeded",
        )
    vocab_size = state.model.tokenizer.vocab_size
    low, high = min(prompt_ids), max(prompt_ids)
    if low < 0 or high >= vocab_size:
        raise bad_request(
            f"prompt holds token id {low if low < 0 else high}; the vocabulary has {vocab_size} tokens",
            "prompt",
            "invalid_value",
        )


@dataclass
class _Progress:
    """What is known of one choice so far."""

    last_token: float | None = None
    first_token: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Generation:
    """Async context manager and iterator over batches of (choice index, output).

    Leaving the context cancels what is not finished, whatever the reason. A batch is all that has come since
    the last one; an empty batch says that nothing came for keepalive_interval seconds.
    Where the answer is not streamed, a batch waits for the end of a choice.
    """

    def __init__(
        self,
        state: ServerState,
        works: list[Work],
        log_fields: dict[str, Any],
        *,
        stream: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        grammar_field: str = "structured_outputs",
    ) -> None:
        self._state = state
        self._log_fields = log_fields
        self._engine = state.engine
        self._works = {work.index: work for work in works}
        self._progress = {work.index: _Progress(prompt_tokens=len(work.prompt_ids)) for work in works}
        self._stream = stream
        self._priority = priority
        self._cache_salt = cache_salt
        self._grammar_field = grammar_field
        self._id = uuid.uuid4().hex
        self._unsubmitted = deque(works)
        self._running: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._outputs: list[tuple[int, RequestOutput]] = []
        self._failure: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waits_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._prefill: tuple[int, int] | None = None
        self._arrived = time.monotonic()
        limit = state.settings.request_timeout
        self._deadline = None if limit is None else self._arrived + limit

    async def __aenter__(self) -> Generation:
        self._state.begin()
        try:
            await self._submit_more()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what still runs. More than one call does no harm."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        now = time.monotonic()
        for index in self._running:
            self._engine.cancel(self._request_id(index))
            self._record(index, "abort", now, None)
        self._running.clear()
        self._unsubmitted.clear()
        self._describe()
        self._state.end()

    def _describe(self) -> None:
        """Leave the numbers of this request for the log."""
        progress = self._progress.values()
        first = min((p.first_token for p in progress if p.first_token is not None), default=None)
        prompts = {id(work.prompt_ids): len(work.prompt_ids) for work in self._works.values()}
        self._log_fields |= {
            "prompt_tokens": sum(prompts.values()),
            "completion_tokens": self.completion_tokens,
            "ttft": None if first is None else round(first - self._arrived, 4),
        }

    def _request_id(self, index: int) -> str:
        return f"{self._id}-{index}"

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[tuple[int, RequestOutput]]:
        if not self._outputs and self._failure is None:
            if not self._running and not self._unsubmitted:
                raise StopAsyncIteration
            await self._wait()
        batch, self._outputs = self._outputs, []
        if not batch and self._failure is not None:
            raise self._failure
        if self._unsubmitted and any(output.finished for _, output in batch):
            await self._submit_more()
        return batch

    async def _wait(self) -> None:
        """Until there is something to take, keepalive_interval is over, or the deadline, which raises."""
        self._waits_since = time.monotonic()
        self._waiter = self._loop.create_future()
        if self._timer is None:
            self._look()
        try:
            await self._waiter
        finally:
            self._waiter = None
        late = self._deadline is not None and time.monotonic() >= self._deadline
        if late and not self._outputs and self._failure is None:
            raise self._timed_out()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _look(self) -> None:
        """Wake a wait that is over. There is one timer, not one for each token: it may ring early, never late."""
        self._timer = None
        if self._waiter is None:
            return
        due = self._waits_since + self.keepalive_interval
        if self._deadline is not None:
            due = min(due, self._deadline)
        left = due - time.monotonic()
        if left <= 0:
            self._wake()
        else:
            self._timer = self._loop.call_later(left, self._look)

    def _timed_out(self) -> ApiError:
        limit = self._state.settings.request_timeout
        return ApiError(
            504, f"The request took longer than this server's limit of {limit:g} s", code="timeout"
        )

    async def _submit_more(self) -> None:
        """Submit until the queue is full. With some of its own running, a request waits for those."""
        while self._unsubmitted:
            work = self._unsubmitted[0]
            try:
                await self._submit_one(work)
            except QueueFullError as error:
                if self._running or self._outputs:
                    return
                self._state.metrics.rejected("queue_full")
                raise ApiError(429, f"Too many requests: {error}", code="queue_full", retry_after=1) from None
            except EngineDeadError as error:
                self._state.metrics.rejected("unavailable")
                raise ApiError(503, str(error), code="unavailable", retry_after=10) from None
            except ValueError as error:
                raise bad_request(str(error), self._param_of(str(error)), "invalid_value") from None
            self._unsubmitted.popleft()

    async def _submit_one(self, work: Work) -> None:
        # Noted before: its last output may come while this waits, and it may be cancelled meanwhile.
        self._running.add(work.index)
        try:
            if work.params.grammar is not None:  # compiled in submit: keep that off the event loop
                await asyncio.to_thread(self._submit, work)
            else:
                self._submit(work)
        except Exception:
            self._running.discard(work.index)
            raise

    def _submit(self, work: Work) -> None:
        self._engine.submit(
            self._request_id(work.index),
            work.prompt_ids,
            work.params,
            partial(self._state.inbox.put, partial(self._receive, work.index)),
            priority=self._priority,
            cache_salt=self._cache_salt,
            deadline=self._deadline,
        )
        if self._closed:  # while a grammar compiled on another thread: close() did not know of this one
            self._engine.cancel(self._request_id(work.index))

    def _receive(self, index: int, output: RequestOutput, now: float) -> None:
        """From the inbox: an output of a choice, at that time."""
        if self._closed:
            return
        progress = self._progress[index]
        self._prefill = output.prefill_progress or self._prefill
        progress.completion_tokens = max(progress.completion_tokens, output.num_completion_tokens)
        progress.cached_tokens = max(progress.cached_tokens, output.num_cached_tokens)
        if output.token_ids:
            if progress.first_token is None:
                progress.first_token = now
                self._state.metrics.first_token(now - self._arrived)
            elif progress.last_token is not None:
                self._state.metrics.token(now - progress.last_token, len(output.token_ids))
            progress.last_token = now
        if output.finished:
            self._finish(index, output, now)
        if self._failure is None:
            self._outputs.append((index, output))
        if self._stream or output.finished:
            self._wake()

    def _finish(self, index: int, output: RequestOutput, now: float) -> None:
        self._running.discard(index)
        self._record(index, output.finish_reason or "error", now, output)
        self._failure = self._failure or self._failure_of(output)

    def _record(self, index: int, reason: str, now: float, output: RequestOutput | None) -> None:
        progress = self._progress[index]
        itl = None
        if progress.first_token is not None and progress.completion_tokens > 1:
            itl = (now - progress.first_token) / (progress.completion_tokens - 1)
        finished = Finished(
            now,
            reason,
            None if progress.first_token is None else progress.first_token - self._arrived,
            now - self._arrived,
            itl,
            progress.prompt_tokens,
            progress.completion_tokens,
        )
        self._state.metrics.finished(finished, None if output is None else output.times)

    def _failure_of(self, output: RequestOutput) -> ApiError | None:
        if output.finish_reason == "error" and output.client_error:
            return bad_request(output.error or "The request cannot be answered", code="request_failed")
        if output.finish_reason == "error":
            return ApiError(500, f"The engine failed on this request: {output.error}", code="engine_error")
        if output.finish_reason == "abort":
            if output.stop_reason == "deadline":
                return self._timed_out()
            return ApiError(503, output.error or "The request was aborted", code="aborted", retry_after=1)
        return None

    def _param_of(self, message: str) -> str | None:
        """The argument that an engine's ValueError names: "[sampling] top_p must be ..."."""
        words = message.split("] ", 1)[-1].split()
        if not words or not words[0].isidentifier() or not words[0].islower():
            return None
        return self._grammar_field if words[0] in GRAMMAR_KINDS else words[0]

    @property
    def keepalive_interval(self) -> float:
        return self._state.settings.keepalive_interval

    def progress_text(self) -> str:
        """What a keep-alive comment says: how far the prompt has come, where that is known."""
        return "keepalive" if self._prefill is None else "keepalive {}/{}".format(*self._prefill)

    @property
    def completion_tokens(self) -> int:
        return sum(progress.completion_tokens for progress in self._progress.values())

    def usage(self, prompt_tokens: int, completion_tokens: int | None = None) -> Usage:
        """Token counts over all choices. A prompt counts once however many choices it has."""
        completion = self.completion_tokens if completion_tokens is None else completion_tokens
        by_prompt: dict[int, int] = {}
        for index, work in self._works.items():
            prompt = id(work.prompt_ids)
            by_prompt[prompt] = max(by_prompt.get(prompt, 0), self._progress[index].cached_tokens)
        cached = sum(by_prompt.values())
        return Usage(prompt_tokens, completion, prompt_tokens + completion, PromptTokensDetails(cached))

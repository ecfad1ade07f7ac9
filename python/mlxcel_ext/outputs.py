"""What the engine reports about a request. Pure: imports nothing of the engine or of MLX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprob(NamedTuple):
    """Log-probability (natural log, of the model's distribution) of one token and of its alternatives."""

    token_id: int
    logprob: float
    #: 1 is the likeliest token of the vocabulary.
    rank: int
    #: ``(token_id, logprob)`` of the likeliest tokens, best first.
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds of time.monotonic() at which things happened; None: not yet."""

    submitted: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(slots=True)  # not frozen: that would quadruple the time to make one, and a step makes one a row
class RequestOutput:
    """One delta of a request's stream, not to be changed. The last one has a finish_reason.

    text, token_ids, logprobs
        What came since the previous output. Text that may be the start of a stop string, or half of a UTF-8
        character, is held back, so text and token_ids of one delta need not match.
    prompt_logprobs
        For each prompt token, None for the first; sent once, with the first token.
    stop_reason
        The stop string or stop token that ended it (finish_reason "stop"; None: EOS or end of the grammar),
        or "deadline" (finish_reason "abort").
    error
        Human-readable reason of finish_reason "error", and of "abort" where it was not the client's.
    client_error
        The request itself is to blame for finish_reason "error" (its grammar cannot go on): a 4xx, not a 5xx.
    prefill_progress
        (prompt tokens done, prompt tokens): such outputs carry no token.
    times
        With the first token, with the last output, and with progress.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    error: str | None = None
    client_error: bool = False
    prefill_progress: tuple[int, int] | None = None
    times: RequestTimes | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class Completion:
    """A finished request of the offline API, all deltas joined."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None

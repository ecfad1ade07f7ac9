"""A request as the engine sees it: where its output goes, its text, and when it stops."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .grammar import Grammar, allows_others
from .outputs import FinishReason, RequestOutput, RequestTimes, TokenLogprob
from .sampler import RowEdit
from .sampling_params import SamplingParams
from .scheduler.request import Request
from .scheduler.scheduler import ScheduledRow
from .text import Detokenizer


@dataclass(eq=False, slots=True)
class Job:
    """The engine's record of a request; Request.job points to it."""

    request: Request
    params: SamplingParams
    on_output: Callable[[RequestOutput], None]
    detokenizer: Detokenizer
    seed: int
    #: Tokens that end the output: EOS unless ignored, and the request's own.
    stop_ids: frozenset[int]
    grammar: Grammar | None = None
    deadline: float | None = None
    submitted: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    first_token: float | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    #: What went wrong with it while a step was built; told when the step is read.
    failure: Exception | None = None
    #: Prompt tokens whose logprobs are computed or under way; the first has none.
    num_scored: int = 1
    #: Some of its draws depend on more than its parameters: row_edit() knows.
    edits_rows: bool = field(init=False)

    def __post_init__(self) -> None:
        self.edits_rows = self.grammar is not None or self.params.min_tokens > 0

    def row_edit(self, row: ScheduledRow) -> RowEdit:
        """What the draw of a row has to heed; the grammar's state must be up to date."""
        below = row.draw_index < self.params.min_tokens
        mask = None
        if self.grammar is not None and not self.grammar.finished:
            try:
                mask = self.grammar.mask()
            except Exception as error:
                self.failure = error
        banned = tuple(self.stop_ids) if below else ()
        if mask is not None and banned and not allows_others(mask, banned):
            banned = ()  # the grammar is at its end, which min_tokens cannot put off
        return RowEdit(mask, banned)

    def accept(self, token: int, logprob: TokenLogprob | None) -> RequestOutput:
        """Take a token that the scheduler knows already; returns what to send, finished if it is the last."""
        if self.failure is not None:
            raise self.failure
        request, params, detokenizer = self.request, self.params, self.detokenizer
        count = len(request.tokens) - request.num_prompt_tokens
        text = ""
        reason: FinishReason | None = None
        stop_reason: int | str | None = None
        if self.grammar is not None:
            self.grammar.accept(token)
        if token in self.stop_ids:
            reason = "stop"
            stop_reason = token if token in params.stop_token_ids else None
        else:
            text = detokenizer.push(token, count >= params.min_tokens)
            if detokenizer.stopped is not None:
                reason, stop_reason = "stop", detokenizer.stopped
            elif self.grammar is not None and self.grammar.finished:
                reason = "stop"
            elif len(request.tokens) >= request.max_total_tokens:
                reason = "length"
        if reason is not None:
            text += detokenizer.finish()
        prompt_logprobs = None
        if self.first_token is None:
            self.first_token = time.monotonic()
            if params.prompt_logprobs is not None:
                prompt_logprobs = tuple(self.prompt_logprobs)
        elif reason is None:
            # Most outputs are this one: a token in the middle.
            return RequestOutput(
                request.request_id,
                text,
                (token,),
                None if logprob is None else (logprob,),
                num_prompt_tokens=request.num_prompt_tokens,
                num_completion_tokens=count,
                num_cached_tokens=request.num_cached_tokens or 0,
            )
        return self.output(
            text=text,
            token_ids=(token,),
            logprobs=None if logprob is None else (logprob,),
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
        )

    def output(self, *, finish_reason: FinishReason | None = None, **fields: object) -> RequestOutput:
        """An output with the counts and times of this moment."""
        request = self.request
        finished = time.monotonic() if finish_reason is not None else None
        return RequestOutput(
            request.request_id,
            finish_reason=finish_reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_completion_tokens=request.num_output_tokens,
            num_cached_tokens=request.num_cached_tokens or 0,
            times=RequestTimes(self.submitted, self.scheduled, self.first_token, finished),
            **fields,  # type: ignore[arg-type]
        )

"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import Request

from ..outputs import RequestOutput, TokenLogprob
from ..sampling_params import SamplingParams
from .answer import Answer, answer
from .errors import bad_request
from .generation import OFF_LOOP_CHARS, Generation, Work, check_length, seeded, tokenize
from .params import grammar_of, sampling_params
from .protocol import CompletionRequest, Prompt, Usage
from .state import ServerState

DEFAULT_MAX_TOKENS = 16  # OpenAI's and vLLM's


@dataclass
class _Choice:
    """One answer as it grows. max_tokens 0 (scoring a prompt) draws one token and drops it."""

    prompt_ids: list[int]
    prompt_text: str
    echo: bool
    drop_output: bool
    want_logprobs: bool
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    entries: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    echoed: bool = False
    offset: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, output: RequestOutput) -> None:
        """Take an output in; what is to be sent next lies in text, tokens and entries."""
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if self.echo and not self.echoed and (output.token_ids or output.finished):
            self.echoed = True
            self.text += self.prompt_text
            if self.want_logprobs:
                self.tokens += self.prompt_ids
                self.entries += self.prompt_logprobs or [None] * len(self.prompt_ids)
        if output.finished:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        if self.drop_output:
            self.finish_reason = "length" if output.finished else None
            self.stop_reason = None
            return
        self.text += output.text
        self.token_ids += output.token_ids
        if self.want_logprobs and output.logprobs:
            self.tokens += [entry.token_id for entry in output.logprobs]
            self.entries += output.logprobs

    def take(self, state: ServerState, index: int, request: CompletionRequest, last: bool) -> dict[str, Any]:
        """The choice object of what has come since the last call."""
        logprobs = None
        if self.want_logprobs:
            logprobs, self.offset = state.texts.completion_logprobs(self.tokens, self.entries, self.offset)
        out: dict[str, Any] = {
            "index": index,
            "text": self.text,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }
        if request.return_token_ids:
            out["token_ids"] = self.token_ids
            if last:
                out["prompt_token_ids"] = self.prompt_ids
        if request.prompt_logprobs is not None and self.prompt_logprobs is not None:
            out["prompt_logprobs"] = state.texts.prompt_logprobs(self.prompt_ids, self.prompt_logprobs)
            self.prompt_logprobs = None
        self.text, self.tokens, self.entries, self.token_ids = "", [], [], []
        return out


class _Answer(Answer[CompletionRequest]):
    """A choice for each of the prompts' n."""

    id_prefix = "cmpl"
    whole_kind = chunk_kind = "text_completion"

    def __init__(self, state: ServerState, request: CompletionRequest, log_fields: dict[str, Any]) -> None:
        super().__init__(state, request, log_fields)
        self.choices: list[_Choice] = []
        self.prompt_tokens = 0
        self.scoring = request.max_tokens == 0

    async def prepare(self) -> None:
        request, state = self.request, self.state
        n = request.n or 1
        if request.best_of not in (None, n):
            raise bad_request("best_of other than n is not supported", "best_of", "unsupported_value")
        if request.suffix:
            raise bad_request("suffix is not supported", "suffix", "unsupported_value")
        prompts = as_prompts(request.prompt, state.settings.max_choices // n)
        params = self._params()
        many = sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) > OFF_LOOP_CHARS
        for prompt in prompts:
            ids = await self._token_ids(prompt, many)
            check_length(state, ids, None if self.scoring else request.max_tokens)
            text = prompt if isinstance(prompt, str) else ""
            if request.echo and not isinstance(prompt, str):
                text = state.model.tokenizer.decode(ids, skip_special_tokens=False)
            self.prompt_tokens += len(ids)
            for choice in range(n):
                index = len(self.choices)
                self.choices.append(
                    _Choice(ids, text, bool(request.echo), self.scoring, request.logprobs is not None)
                )
                self.works.append(Work(index, ids, seeded(params, choice)))

    async def _token_ids(self, prompt: str | list[int], one_of_many: bool) -> list[int]:
        keep = self.request.truncate_prompt_tokens
        if isinstance(prompt, str):
            special = self.request.add_special_tokens is not False
            ids = await tokenize(
                self.state, prompt, special, truncated=keep is not None, one_of_many=one_of_many
            )
        else:
            ids = prompt
        return ids if keep is None else ids[-keep:]

    def _params(self) -> SamplingParams:
        request = self.request
        prompt_logprobs = request.prompt_logprobs
        if request.echo and request.logprobs is not None:
            prompt_logprobs = max(request.logprobs, prompt_logprobs or 0)
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else max(request.max_tokens, 1)
        return sampling_params(
            request,
            max_tokens=max_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar_of(request),
        )

    def usage(self, generation: Generation) -> Usage:
        return generation.usage(self.prompt_tokens, 0 if self.scoring else None)

    def add(self, index: int, output: RequestOutput) -> None:
        self.choices[index].add(output)

    def whole(self) -> dict[str, Any]:
        taken = [
            choice.take(self.state, index, self.request, True) for index, choice in enumerate(self.choices)
        ]
        return {"choices": taken}

    def chunks(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        choice = self.choices[index]
        choice.add(output)
        if choice.text or choice.tokens or choice.token_ids or output.finished:
            yield {"choices": [choice.take(self.state, index, self.request, output.finished)]}


def as_prompts(prompt: Prompt, most: int) -> list[str | list[int]]:
    """A list of prompts, each text or token ids; a 400 where there are more than so many."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt must not be an empty list", "prompt", "invalid_value")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if int in kinds:
        raise bad_request("prompt must not mix token ids with other prompts", "prompt", "invalid_type")
    if len(prompt) > most:
        raise bad_request(
            f"{len(prompt)} prompts are more than this server takes: {most} with these n choices of each",
            "prompt",
            "invalid_value",
        )
    return cast(list[str | list[int]], prompt)


async def completions(request: Request) -> Any:
    """Handler of POST /v1/completions."""
    return await answer(request, _Answer, CompletionRequest)

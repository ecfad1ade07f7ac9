"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from ..outputs import RequestOutput, TokenLogprob
from ..sampling_params import GrammarSpec
from .answer import Answer, answer
from .errors import bad_request
from .generation import Generation, Work, check_length, seeded, tokenize
from .json_scan import CallDelta
from .messages import render
from .params import grammar_of, sampling_params, schema_grammar
from .protocol import ChatCompletionRequest, NamedToolChoice, Usage
from .state import ServerState
from .tools import PARSERS, Delta, ForcedParser, ToolParser, detect_parser, forced_schema


@dataclass
class _Choice:
    """One answer as it grows: text, calls and logprobs that have not been sent yet, and the whole."""

    parser: ToolParser | None
    one_call: bool
    text: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    entries: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    started: bool = False

    def add(self, output: RequestOutput) -> list[Delta]:
        """Take an output in; the deltas that it completes."""
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.entries += output.logprobs or ()
        self.token_ids += output.token_ids
        deltas: list[Delta] = []
        if self.parser is None:
            deltas = [output.text] if output.text else []
        else:
            deltas = self.parser.feed(output.text)
            if output.finished:
                deltas += self.parser.finish()
        if self.one_call:
            deltas = [delta for delta in deltas if isinstance(delta, str) or delta.index == 0]
        for delta in deltas:
            self._join(delta)
        if output.finished:
            self.stop_reason = output.stop_reason
            # OpenAI's rule: a call that the request named ends with "stop", one that the model chose with "tool_calls".
            chosen = self.calls and output.finish_reason == "stop" and not self._named()
            self.finish_reason = "tool_calls" if chosen else output.finish_reason
        return deltas

    def _named(self) -> bool:
        return isinstance(self.parser, ForcedParser) and self.parser.function is not None

    def _join(self, delta: Delta) -> None:
        if isinstance(delta, str):
            self.text += delta
            return
        if delta.name is not None and self.parser is not None:
            self.calls[delta.index] = {
                "id": self.parser.call_id(),
                "type": "function",
                "function": {"name": delta.name, "arguments": ""},
            }
        self.calls[delta.index]["function"]["arguments"] += delta.arguments

    def call_chunk(self, delta: CallDelta) -> dict[str, Any]:
        """A delta as streams carry it: id, type and name once, then arguments."""
        if delta.name is None:
            return {"index": delta.index, "function": {"arguments": delta.arguments}}
        call = self.calls[delta.index]
        return {
            "index": delta.index,
            "id": call["id"],
            "type": "function",
            "function": {"name": delta.name, "arguments": delta.arguments},
        }

    def message(self) -> dict[str, Any]:
        calls = [self.calls[index] for index in sorted(self.calls)]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.text or (None if calls else ""),
            "refusal": None,
        }
        return {**message, "tool_calls": calls} if calls else message


class _Answer(Answer[ChatCompletionRequest]):
    """n answers to one conversation."""

    id_prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, state: ServerState, request: ChatCompletionRequest, log_fields: dict[str, Any]
    ) -> None:
        super().__init__(state, request, log_fields)
        self.choices: list[_Choice] = []
        self.prompt_ids: list[int] = []

    async def prepare(self) -> None:
        request, state = self.request, self.state
        forced = self._check_tools()
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs wants logprobs to be true", "top_logprobs", "invalid_value")
        text = render(state, request)
        keep = request.truncate_prompt_tokens
        ids = await tokenize(state, text, add_special_tokens=False, truncated=keep is not None)
        self.prompt_ids = ids if keep is None else ids[-keep:]
        max_tokens = (
            request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        )
        check_length(state, self.prompt_ids, max_tokens)
        parsers = [self._parser(forced is not None) for _ in range(request.n or 1)]
        params = sampling_params(
            request,
            max_tokens=max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
            grammar=forced or grammar_of(request),
            keep_special_tokens=parsers[0] is not None and parsers[0].needs_special_tokens,
        )
        for index, parser in enumerate(parsers):
            self.choices.append(_Choice(parser, request.parallel_tool_calls is False))
            self.works.append(Work(index, self.prompt_ids, seeded(params, index)))

    def _check_tools(self) -> GrammarSpec | None:
        """The grammar of a forced choice; a 400 where the choice and the tools do not fit."""
        tools, choice = self.request.tools or [], self.request.tool_choice
        if choice in (None, "none", "auto"):
            return None
        if not tools:
            raise bad_request("tool_choice wants tools", "tool_choice", "invalid_value")
        if grammar_of(self.request):
            raise bad_request(
                "A forced tool_choice and a format of the output exclude each other",
                "tool_choice",
                "invalid_value",
            )
        if isinstance(choice, NamedToolChoice):
            name = choice.function.name
            if name not in {tool.function.name for tool in tools}:
                raise bad_request(
                    f"tool_choice names {name!r}, which tools lacks", "tool_choice", "invalid_value"
                )
            return schema_grammar(forced_schema(tools, choice))
        most = 1 if self.request.parallel_tool_calls is False else None
        return schema_grammar(forced_schema(tools, "required", most))

    def _parser(self, forced: bool) -> ToolParser | None:
        choice = self.request.tool_choice
        if not self.request.tools or choice == "none":
            return None
        if forced:
            return ForcedParser(choice.function.name if isinstance(choice, NamedToolChoice) else None)
        family = self.state.settings.tool_call_parser
        if family == "auto":
            template = self.state.model.chat_template
            family = detect_parser(template.source if template else "")
        return PARSERS[family]() if family in PARSERS else None

    def usage(self, generation: Generation) -> Usage:
        return generation.usage(len(self.prompt_ids))

    def add(self, index: int, output: RequestOutput) -> None:
        self.choices[index].add(output)

    def whole(self) -> dict[str, Any]:
        request, texts = self.request, self.state.texts
        choices = []
        for index, choice in enumerate(self.choices):
            out = {
                "index": index,
                "message": choice.message(),
                "logprobs": texts.chat_logprobs(choice.entries) if request.logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if request.return_token_ids:
                out["token_ids"] = choice.token_ids
            choices.append(out)
        return {"choices": choices, **self._of_prompt(self.choices[0])}

    def _of_prompt(self, choice: _Choice) -> dict[str, Any]:
        """What is said of the prompt, once for all choices, which share it."""
        fields: dict[str, Any] = {}
        if self.request.prompt_logprobs is not None and choice.prompt_logprobs is not None:
            texts = self.state.texts
            fields["prompt_logprobs"] = texts.prompt_logprobs(self.prompt_ids, choice.prompt_logprobs)
        if self.request.return_token_ids:
            fields["prompt_token_ids"] = self.prompt_ids
        return fields

    def _per_token(self, choice: _Choice) -> dict[str, Any]:
        """What a chunk says of the tokens since the last one: a token whose text is held back waits with it."""
        fields: dict[str, Any] = {}
        if choice.entries and self.request.logprobs:
            fields["logprobs"] = self.state.texts.chat_logprobs(choice.entries)
        if self.request.return_token_ids:
            fields["token_ids"] = choice.token_ids
        choice.entries, choice.token_ids = [], []
        return fields

    def chunks(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        choice = self.choices[index]

        def chunk(delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
            out = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
            return {"choices": [out]}

        deltas = choice.add(output)
        if not choice.started and (output.token_ids or output.finished):
            choice.started = True
            first = not any(other.started for other in self.choices if other is not choice)
            yield chunk({"role": "assistant", "content": ""}) | (self._of_prompt(choice) if first else {})
        for delta in deltas:
            if isinstance(delta, str):
                yield chunk({"content": delta}, **self._per_token(choice))
            else:
                yield chunk({"tool_calls": [choice.call_chunk(delta)]}, **self._per_token(choice))
        if output.finished:
            ending = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            yield chunk({}, **self._per_token(choice), **ending)


async def chat_completions(request: Request) -> Any:
    """Handler of POST /v1/chat/completions."""
    return await answer(request, _Answer, ChatCompletionRequest)

"""Tool calls in the text of a model: parsers of the served families, and schemas for forced calls.

A parser is fed the text as it streams and hands out text and call deltas; text that may yet turn out
to be a marker is held back. A call that cannot be read comes out as the text it was.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

from .json_scan import CallDelta, CallScanner, ValueEnd
from .protocol import NamedToolChoice, Tool

Delta = str | CallDelta

_SPACE = " \t\r\n"


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of text that begins one of the markers."""
    longest = max(map(len, markers)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


class ToolParser:
    """Base: plain text until a marker, then calls until the subclass says that they end."""

    markers: tuple[str, ...] = ()
    #: The marker is a special token of the family, which decoding would drop.
    needs_special_tokens = False

    def __init__(self) -> None:
        self.calls = 0
        self._text = ""
        self._scanner: CallScanner | None = None
        self._inside = False

    @staticmethod
    def call_id() -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    def feed(self, text: str) -> list[Delta]:
        """Deltas that this piece of text completes."""
        deltas: list[Delta] = []
        for char in text:
            deltas += self._in_calls(char) if self._inside else self._in_text(char)
        return _merged(deltas + self._flush_text())

    def finish(self) -> list[Delta]:
        """What was held back at the end of the text."""
        rest, self._text = self._text, ""
        if self._scanner is not None and not self._scanner.named:
            rest += self._scanner.raw
        self._scanner = None
        return [rest] if rest else []

    def _in_text(self, char: str) -> list[Delta]:
        self._text += char
        for marker in self.markers:
            if self._text.endswith(marker):
                before = self._text.removesuffix(marker)
                self._text, self._inside = "", True
                return [before] if before else []
        return []

    def _flush_text(self) -> list[Delta]:
        if self._inside or not self._text:
            return []
        keep = held_back(self._text, self.markers) if self.markers else 0
        ready, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        return [ready] if ready else []

    def _in_calls(self, char: str) -> list[Delta]:
        raise NotImplementedError

    def _scan(self, char: str) -> list[Delta]:
        """Feed the open call; a failed one turns into text and ends the calls."""
        if self._scanner is None:
            self._scanner = CallScanner(self.calls)
        deltas: list[Delta] = list(self._scanner.feed(char))
        if self._scanner.done:
            scanner, self._scanner = self._scanner, None
            if scanner.failed:
                self._inside = False
                return [*deltas, scanner.raw]
            self.calls += 1
        return deltas


class HermesParser(ToolParser):
    """Hermes, Qwen 2.5 and Qwen 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

    markers = ("<tool_call>",)
    _END = "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._tail: str | None = None  # text after a call, until its end marker

    def _in_calls(self, char: str) -> list[Delta]:
        if self._tail is None:
            before = self.calls
            deltas = self._scan(char)
            if self.calls > before:
                self._tail = ""
            return deltas
        self._tail += char
        if self._tail.endswith(self._END):
            self._tail, self._inside = None, False
        return []

    def _in_text(self, char: str) -> list[Delta]:
        # The line feeds between two calls are part of the format, not of the answer.
        if self.calls and not self._text and char in _SPACE:
            return []
        return super()._in_text(char)


class LlamaParser(ToolParser):
    """Llama 3.1 to 3.3: the answer is {"name": ..., "parameters": {...}}, several split by semicolons."""

    needs_special_tokens = True
    _TAG = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._prefix: str | None = ""  # what came before the first call; None once that is decided

    def _in_text(self, char: str) -> list[Delta]:
        if self._prefix is None:
            self._text += char
            return []
        self._prefix += char
        bare = self._prefix.lstrip().removeprefix(self._TAG).lstrip()
        if not bare or self._TAG.startswith(bare):
            return []
        text, self._prefix = self._prefix, None
        if bare[0] == "{":
            self._inside = True
            return self._scan("{")
        self._text = text
        return []

    def _in_calls(self, char: str) -> list[Delta]:
        if self._scanner is None and (char in _SPACE or char in ";,"):
            return []
        return self._scan(char)

    def finish(self) -> list[Delta]:
        if self._prefix:
            self._text, self._prefix = self._prefix + self._text, None
        return super().finish()


class MistralParser(ToolParser):
    """Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...}."""

    markers = ("[TOOL_CALLS]",)
    needs_special_tokens = True

    def __init__(self) -> None:
        super().__init__()
        self._form = ""  # "", then array or named
        self._name = ""
        self._arguments: ValueEnd | None = None

    @staticmethod
    def call_id() -> str:
        return uuid.uuid4().hex[:9]  # the family's templates refuse any other length

    def _in_calls(self, char: str) -> list[Delta]:
        if not self._form:
            if char in _SPACE:
                return []
            self._form = "array" if char == "[" else "named"
            if char == "[":
                return []
        return self._in_array(char) if self._form == "array" else self._in_named(char)

    def _in_array(self, char: str) -> list[Delta]:
        if self._scanner is None:
            if char == "]":
                self._inside, self._form = False, ""
                return []
            if char in _SPACE or char == ",":
                return []
        return self._scan(char)

    def _in_named(self, char: str) -> list[Delta]:
        deltas: list[Delta] = []
        if self._arguments is None:
            if char != "{":
                self._name += char
                return []
            name = self._name.replace("[ARGS]", "").split("[CALL_ID]")[0].strip()
            self._arguments, self._name = ValueEnd(), ""
            deltas.append(CallDelta(self.calls, name))
        deltas.append(CallDelta(self.calls, None, char))
        if self._arguments.feed(char) == "last":
            self.calls += 1
            self._arguments, self._form, self._inside = None, "", False
        return deltas

    def finish(self) -> list[Delta]:
        if self._name:
            self._text, self._name = self.markers[0] + self._name, ""
        return super().finish()


class ForcedParser(ToolParser):
    """The answer to a forced choice, held to `forced_schema`: one call's arguments, or an array of calls."""

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self._inside = True
        self.function = name

    def _in_calls(self, char: str) -> list[Delta]:
        if self.function is not None:
            if self.calls:
                return [CallDelta(0, None, char)]
            self.calls = 1
            return [CallDelta(0, self.function, char)]
        if self._scanner is None and (char in _SPACE or char in "[],"):
            return []
        return self._scan(char)


def _merged(deltas: list[Delta]) -> list[Delta]:
    """Neighbours that belong together joined, so that a token makes one chunk."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, str) and isinstance(last, str):
            out[-1] = last + delta
        elif (
            isinstance(delta, CallDelta)
            and isinstance(last, CallDelta)
            and delta.index == last.index
            and delta.name is None
        ):
            out[-1] = CallDelta(last.index, last.name, last.arguments + delta.arguments)
        else:
            out.append(delta)
    return out


PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaParser,
    "mistral": MistralParser,
}


def detect_parser(template: str) -> str:
    """The family's parser by what its chat template writes; hermes, the commonest, where it says nothing."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters"' in template):
        return "llama3_json"
    return "hermes"


def forced_schema(
    tools: list[Tool], choice: NamedToolChoice | str, most: int | None = None
) -> dict[str, Any]:
    """JSON schema of the text that a required or named tool choice allows, with that many calls at most."""
    parameters = {tool.function.name: tool.function.parameters or {"type": "object"} for tool in tools}
    if isinstance(choice, NamedToolChoice):
        return parameters[choice.function.name]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": schema},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, schema in parameters.items()
    ]
    limit = {} if most is None else {"maxItems": most}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}}


def described(tools: list[dict[str, Any]]) -> str:
    """Instructions for a model whose chat template knows no tools, in the form that HermesParser reads."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call one or more functions to answer. The functions, one JSON object a line:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, answer with its name and arguments as a JSON object within tags:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )

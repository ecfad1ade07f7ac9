"""Tool calls in the text of a model: parsers of the served families, and schemas for forced calls.

A parser is fed the text as it streams and hands out text and call deltas; text that may yet turn out
to be a marker or a call is held back. A call that cannot be read comes out as the text it was.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from typing import Any

from .json_scan import CallDelta, CallScanner, ValueEnd
from .protocol import NamedToolChoice, Tool

Delta = str | CallDelta

_SPACE = " \t\r\n"


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of text that begins one of the markers."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


class ToolParser:
    """Base: plain text until a marker, then calls until the subclass says that they end.

    Nothing that the model said is lost: what belongs to no call is text. What a format writes around its
    calls is dropped: markers, separators between two calls, white space at their edges.
    """

    markers: tuple[str, ...] = ()
    #: The marker is a special token of the family, which decoding would drop.
    needs_special_tokens = False

    def __init__(self) -> None:
        self.calls = 0
        self._text = ""
        self._scanner: CallScanner | None = None
        self._inside = False
        #: What was read since the last delta and is text where no call comes of it.
        self._unread = ""
        #: Nothing but white space has come since the start or the last call.
        self._at_edge = True
        self._calls_before = 0  # this marker

    @staticmethod
    def call_id() -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    def feed(self, text: str) -> list[Delta]:
        """Deltas that this piece of text completes."""
        deltas: list[Delta] = []
        for char in text:
            deltas += self._in_calls(char) if self._inside else self._in_text(char)
        if not self._inside:
            deltas += self._plain(held_back(self._text, self.markers))
        return _merged(deltas)

    def finish(self) -> list[Delta]:
        """What was held back at the end of the text."""
        self._text, self._unread = self._unread + self._text, ""
        self._at_edge &= self.calls > 0  # white space alone is an answer too
        return self._plain(0)

    def _in_text(self, char: str) -> list[Delta]:
        self._text += char
        for marker in self.markers:
            if self._text.endswith(marker):
                return self._marker(marker)
        return []

    def _marker(self, marker: str) -> list[Delta]:
        """A marker has ended the text."""
        deltas = self._plain(len(marker))
        self._text, self._unread, self._inside = "", marker, True
        self._calls_before = self.calls
        return deltas

    def _plain(self, keep: int) -> list[Delta]:
        """The text up to its last keep characters, as far as it is known to be part of the answer."""
        ready, rest = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        if not ready or (self._at_edge and ready.isspace()):
            return []
        self._text, self._at_edge = rest, False
        return [ready]

    def _in_calls(self, char: str) -> list[Delta]:
        raise NotImplementedError

    def _scan(self, char: str) -> list[Delta]:
        """Feed the open call, or open one."""
        if self._scanner is None:
            self._scanner = CallScanner(self.calls)
        scanner = self._scanner
        deltas: list[Delta] = list(scanner.feed(char))
        if scanner.failed:
            return deltas + self._leave(char)
        self._unread = "" if deltas or scanner.done else self._unread + char
        self._at_edge |= scanner.told
        if scanner.done:
            self._end_call()
        return deltas

    def _end_call(self) -> None:
        self._scanner = None
        self.calls += 1

    def _leave(self, char: str) -> list[Delta]:
        """The calls end before char: it is text, and so is what no call came of."""
        if self._scanner is not None and self._scanner.told:
            self._end_call()
        self._scanner, self._inside = None, False
        self._text, self._unread = self._unread, ""
        return self._in_text(char)

    def _in_array(self, char: str) -> list[Delta]:
        """Between the brackets of an array of calls."""
        if self._scanner is None:
            if char == "]" and self.calls > self._calls_before:
                self._unread, self._inside = "", False
                return []
            if char in _SPACE or char == ",":
                self._unread += char
                return []
        return self._scan(char)


class HermesParser(ToolParser):
    """Hermes, Qwen 2.5 and Qwen 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

    _BEGIN, _END = "<tool_call>", "</tool_call>"
    markers: tuple[str, ...] = (_BEGIN,)

    def _in_calls(self, char: str) -> list[Delta]:
        return self._scan(char)

    def _end_call(self) -> None:
        super()._end_call()
        self._inside = False
        self.markers = (self._BEGIN, self._END)

    def _marker(self, marker: str) -> list[Delta]:
        self.markers = (self._BEGIN,)
        deltas = super()._marker(marker)
        if marker == self._END:
            self._unread, self._inside = "", False
        return deltas


class LlamaParser(ToolParser):
    """Llama 3.1 to 3.3: {"name": ..., "parameters": {...}} at the start or after a tag, several split by semicolons."""

    markers = ("<|python_tag|>",)
    needs_special_tokens = True

    def __init__(self) -> None:
        super().__init__()
        self._at_start = True

    def _in_text(self, char: str) -> list[Delta]:
        if self._at_start and char not in _SPACE:
            self._at_start = False
            if char == "{":
                self._text, self._unread, self._inside = "", self._text, True
                return self._scan(char)
        return super()._in_text(char)

    def _in_calls(self, char: str) -> list[Delta]:
        if self._scanner is None and (char in _SPACE or char in ";,"):
            self._unread += char
            return []
        return self._scan(char)


class MistralParser(ToolParser):
    """Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...}."""

    markers = ("[TOOL_CALLS]",)
    needs_special_tokens = True
    _NAME = re.compile(r"([\w.:/-]+)(\[CALL_ID\]\w*)?(\[ARGS\])?\s*")
    _NAME_CHARS = re.compile(r"[\w.:/\[\] -]")

    def __init__(self) -> None:
        super().__init__()
        self._form = ""  # "", then array or named
        self._name = ""
        self._arguments: ValueEnd | None = None

    @staticmethod
    def call_id() -> str:
        return uuid.uuid4().hex[:9]  # the family's templates refuse any other length

    def _marker(self, marker: str) -> list[Delta]:
        self._form, self._name, self._arguments = "", "", None
        return super()._marker(marker)

    def _in_calls(self, char: str) -> list[Delta]:
        if not self._form:
            if char not in _SPACE:
                self._form = "array" if char == "[" else "named"
            if char in _SPACE or char == "[":
                self._unread += char
                return []
        return self._in_array(char) if self._form == "array" else self._in_named(char)

    def _in_named(self, char: str) -> list[Delta]:
        name = None
        if self._arguments is None:
            if char != "{" and self._NAME_CHARS.fullmatch(char):
                self._unread += char
                self._name += char
                return []
            match = self._NAME.fullmatch(self._name)
            if char != "{" or match is None:
                return self._leave(char)
            self._arguments, name = ValueEnd(), match[1]
        self._unread, self._at_edge = "", True
        index = self.calls
        if self._arguments.feed(char) == "last":
            self._inside = False
            self.calls += 1
        return [CallDelta(index, name, char)]


class ForcedParser(ToolParser):
    """The answer to a forced choice, held to `forced_schema`: one call's arguments, or an array of calls."""

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self._inside = True
        self.function = name

    def _in_calls(self, char: str) -> list[Delta]:
        if self.function is not None:
            name = None if self.calls else self.function
            self.calls = 1
            return [CallDelta(0, name, char)]
        if self._scanner is None and char == "[" and not self.calls:
            self._unread += char
            return []
        return self._in_array(char)


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

"""Incremental scanners over JSON text that arrives in pieces: where a value ends, what a call says."""

from __future__ import annotations

import json
from dataclasses import dataclass

_SPACE = " \t\r\n"
_OPEN, _CLOSE = "{[", "}]"


class ValueEnd:
    """Finds the end of one JSON value, a character at a time, without judging its contents."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._kind = ""  # "", then string, nested or literal

    def feed(self, char: str) -> str:
        """'more', 'last' (char ends the value) or 'past' (the value ended before char)."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                return "last" if self._depth == 0 else "more"
            return "more"
        if not self._kind:
            self._kind = "string" if char == '"' else "nested" if char in _OPEN else "literal"
        if self._kind == "literal":
            return "past" if char in _SPACE or char in ",}]" else "more"
        if char == '"':
            self._in_string = True
        elif char in _OPEN:
            self._depth += 1
        elif char in _CLOSE:
            self._depth -= 1
            return "last" if self._depth == 0 else "more"
        return "more"


@dataclass(frozen=True)
class CallDelta:
    """A piece of a tool call: the name comes once, first; the arguments are JSON text to be joined."""

    index: int
    name: str | None = None
    arguments: str = ""


def _text_of(value: str) -> str | None:
    """The text of a JSON string; None for other values, and for one that UTF-8 cannot carry (a lone surrogate)."""
    try:
        text = json.loads(value)
        text.encode()
    except (ValueError, RecursionError, AttributeError):
        return None
    return text if isinstance(text, str) else None


class CallScanner:
    """Reads {"name": ..., "arguments" or "parameters": {...}} and hands the arguments on as they arrive.

    The name is handed out with the first of the arguments, or where the object ends without any: until then
    the text may turn out not to be a call, and shows as it was. `failed` says that the last character
    cannot follow; it is not part of the call.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.done = False
        self.failed = False
        self.told = False  # a delta has gone out: this is a call
        self._step = self._before
        self._field = ""
        self._value = ""
        self._end = ValueEnd()
        self._name = ""
        self._waiting = ""  # arguments that came before the name
        self._arguments_ended = False

    def feed(self, char: str) -> list[CallDelta]:
        """Deltas that this character completes."""
        return self._step(char)

    def _fail(self) -> list[CallDelta]:
        self.failed = True
        return []

    def _before(self, char: str) -> list[CallDelta]:
        if char == "{":
            self._step = self._between
        elif char not in _SPACE:
            return self._fail()
        return []

    def _between(self, char: str) -> list[CallDelta]:
        """After an opening brace, a comma or a value."""
        if char == '"':
            self._step, self._field = self._in_field, ""
        elif char == "}" and self._name:
            self.done = True
            return [] if self.told else self._tell("{}")
        elif char != "," and char not in _SPACE:
            return self._fail()
        return []

    def _in_field(self, char: str) -> list[CallDelta]:
        if char == '"':
            self._step = self._colon
        else:
            self._field += char
        return []

    def _colon(self, char: str) -> list[CallDelta]:
        if char == ":":
            self._step, self._value, self._end = self._in_value, "", ValueEnd()
        elif char not in _SPACE:
            return self._fail()
        return []

    def _in_value(self, char: str) -> list[CallDelta]:
        if not self._value and char in _SPACE:
            return []
        verdict = self._end.feed(char)
        deltas: list[CallDelta] = []
        if verdict != "past":
            self._value += char
            if self._is_arguments() and self._value[0] != '"':
                deltas += self._tell(char)
        if verdict == "more":
            return deltas
        self._step = self._between
        deltas += self._end_of_value()
        return deltas + (self._between(char) if verdict == "past" else [])

    def _is_arguments(self) -> bool:
        return self._field in ("arguments", "parameters") and not self._arguments_ended

    def _end_of_value(self) -> list[CallDelta]:
        if self._is_arguments():
            self._arguments_ended = True
            if self._value[:1] != '"':
                return []
            # Arguments that the model quoted as a string of JSON: unquoted once the string is whole.
            unquoted = _text_of(self._value)
            return self._tell(self._value if unquoted is None else unquoted)
        if self._field != "name" or self._name:
            return []
        name = _text_of(self._value)
        if not name:
            return self._fail()
        self._name = name
        return self._tell("") if self._waiting else []

    def _tell(self, text: str) -> list[CallDelta]:
        if not self._name:
            self._waiting += text
            return []
        name = None if self.told else self._name
        self.told, text, self._waiting = True, self._waiting + text, ""
        return [CallDelta(self.index, name, text)]

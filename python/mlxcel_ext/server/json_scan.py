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


class CallScanner:
    """Reads {"name": ..., "arguments" or "parameters": {...}} and hands the arguments on as they arrive.

    `failed` is set where the text cannot be such an object, or ended as one without a name; `raw` then
    is the text to show instead. Arguments that come before the name wait for it.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.raw = ""
        self.done = False
        self.failed = False
        self.named = False
        self._step = self._before
        self._field = ""
        self._value = ""
        self._end = ValueEnd()
        self._waiting = ""
        self._has_arguments = False

    def feed(self, char: str) -> list[CallDelta]:
        """Deltas that this character completes."""
        self.raw += char
        return self._step(char)

    def _fail(self) -> list[CallDelta]:
        # A call whose name went out cannot be taken back: it ends here with the arguments it has.
        self.done = True
        self.failed = not self.named
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
        elif char == "}":
            self.done = True
            self.failed = not self.named
            if self.named and not self._has_arguments:
                return [CallDelta(self.index, None, "{}")]
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
                deltas += self._emit_arguments(char)
        if verdict == "more":
            return deltas
        self._step = self._between
        deltas += self._end_of_value()
        return deltas + (self._between(char) if verdict == "past" and not self.done else [])

    def _is_arguments(self) -> bool:
        return self._field in ("arguments", "parameters")

    def _end_of_value(self) -> list[CallDelta]:
        if self._is_arguments() and self._value[:1] == '"':
            # Arguments that the model quoted as a string of JSON: unquoted once the string is whole.
            try:
                return self._emit_arguments(json.loads(self._value))
            except ValueError:
                return self._emit_arguments(self._value)
        if self._field != "name" or self.named:
            return []
        try:
            name = json.loads(self._value)
        except ValueError:
            name = None
        if not isinstance(name, str) or not name:
            return self._fail()
        self.named = True
        waiting, self._waiting = self._waiting, ""
        return [CallDelta(self.index, name, waiting)]

    def _emit_arguments(self, text: str) -> list[CallDelta]:
        self._has_arguments = True
        if self.named:
            return [CallDelta(self.index, None, text)]
        self._waiting += text
        return []

"""From tokens to text: characters come out when they are complete, and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TokenStream(Protocol):
    """An incremental decoder of one sequence (Tokenizer.decode_stream)."""

    def step(self, token_id: int) -> str | None: ...

    def flush(self) -> str: ...


class Detokenizer:
    """The text of one request.

    Text that may be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, stream: TokenStream, stop: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self._stream = stream
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._include_stop = include_stop
        self._held = ""
        #: The stop string that ended the text.
        self.stopped: str | None = None

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Text that may be sent now. may_stop=False: stop strings do not count yet."""
        text = self._stream.step(token_id)
        if not text:
            return ""
        return self._advance(text, may_stop) if self._stop else text

    def finish(self) -> str:
        """What is left at the end, an incomplete character as U+FFFD."""
        if self.stopped is not None:
            return ""
        rest = self._advance(self._stream.flush(), may_stop=True)
        rest, self._held = rest + self._held, ""
        return rest

    def _advance(self, text: str, may_stop: bool) -> str:
        if not self._stop:
            return text
        self._held += text
        if may_stop:
            for stop in self._stop:
                if stop in self._held:
                    return self._end()
        keep = self._length_to_hold() if may_stop else 0
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _end(self) -> str:
        """The text up to the stop string that begins first."""
        at, i = min((at, i) for i, stop in enumerate(self._stop) if (at := self._held.find(stop)) >= 0)
        self.stopped = self._stop[i]
        end = at + len(self.stopped) if self._include_stop else at
        text, self._held = self._held[:end], ""
        return text

    def _length_to_hold(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            end = self._held[-length:]
            for stop in self._stop:
                if stop.startswith(end):
                    return length
        return 0

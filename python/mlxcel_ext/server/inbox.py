"""Outputs on their way from the engine's thread to the requests on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

from ..outputs import RequestOutput

#: Seconds of a pause between two deliveries: event loops' timers know no less than the shortest.
MIN_PAUSE, MAX_PAUSE = 0.001, 0.01


class Inbox:
    """One wake-up of the loop for all outputs that come until it runs, and pauses while it has much to send.

    Loop and engine share the interpreter's lock: a loop that is always busy takes it from an engine whose steps are
    short. So it pauses after a delivery as long as it took to send that one. A few streams get every token as it
    comes; many, several at a time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outputs: deque[tuple[Callable[[RequestOutput, float], None], RequestOutput]] = deque()
        self._scheduled = False
        self._not_before = 0.0

    def put(self, receive: Callable[[RequestOutput, float], None], output: RequestOutput) -> None:
        """On the engine's thread: have receive called with the output and the time of its delivery."""
        # Append, then look at the flag; the delivery clears it, then looks at the outputs: none is left behind.
        self._outputs.append((receive, output))
        if not self._scheduled:
            self._scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        now = time.monotonic()
        pause = self._not_before - now
        if pause >= MIN_PAUSE:
            self._loop.call_later(pause, self._deliver)
            return
        self._scheduled = False
        while self._outputs:
            receive, output = self._outputs.popleft()
            receive(output, now)
        # After the tasks that these outputs have woken: a loop runs what is ready in the order in which it became so.
        self._loop.call_soon(self._sent, now)

    def _sent(self, began: float) -> None:
        now = time.monotonic()
        self._not_before = now + min(now - began, MAX_PAUSE)

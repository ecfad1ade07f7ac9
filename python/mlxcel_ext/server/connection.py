"""HTTP connections that end when nothing comes: a client that opens many and stays silent must not use them all up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

#: Seconds that a connection may stay without a whole request. Between two requests uvicorn's keep-alive is shorter.
SILENCE_LIMIT = 90.0

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as _Protocol
else:
    _Protocol = AutoHTTPProtocol


class Connection(_Protocol):
    """uvicorn's protocol, which waits for ever for the rest of a request's head."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_other_than(self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _expect_other_than(self, last: object) -> None:
        self._timer = self.loop.call_later(SILENCE_LIMIT, self._look, last)

    def _look(self, last: object) -> None:
        """Close where no request has come since the last look, and none is being answered."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is last:
            self.transport.close()
        else:
            self._expect_other_than(self.cycle if idle else self)

"""Server-sent events: framing, and a response that ends the moment its client has gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

T = TypeVar("T")
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
#: Key of the ASGI scope under which RequestLog leaves the server's own send.
SEND = "mlxcel.send"


def event(payload: bytes) -> bytes:
    """One event. payload is JSON from msgspec, which holds no line feed."""
    return b"data: " + payload + b"\n\n"


def comment(text: str) -> bytes:
    """A line that every client skips: keeps proxies and clients from giving up during a long prefill."""
    return f": {text}\n\n".encode()


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of work; ClientGone, with work cancelled and ended, where the client left first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream:
    """ASGI response that sends what a generator yields, a chunk at a time.

    `close` is called in every case: at the end, when the client has gone and when the server stops.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        self._chunks = chunks
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(OSError):
                await until_disconnect(receive, self._send(send, scope.get(SEND, send)))
        finally:
            await self._chunks.aclose()
            self._close()

    async def _send(self, send: Send, send_body: Send) -> None:
        """Of a good answer the layers around the routes look at the start alone: its pieces pass by them."""
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        async for chunk in self._chunks:
            await send_body({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

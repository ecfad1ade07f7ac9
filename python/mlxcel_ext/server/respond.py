"""JSON answers and event streams of generations."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import Response

from .errors import ApiError
from .generation import Generation
from .protocol import encode
from .sse import DONE, EventStream, comment, event

log = logging.getLogger("mlxcel_ext.server")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers())


async def stream_response(
    generation: Generation, events: Callable[[Generation], AsyncGenerator[bytes, None]]
) -> EventStream:
    """A stream of the generation's events, of which an empty one stands for silence. Submission fails before the headers are out, as a plain error;
    what fails later is an error event, and the stream still ends with [DONE]."""
    await generation.__aenter__()

    async def chunks() -> AsyncGenerator[bytes, None]:
        quiet_since = time.monotonic()
        try:
            async for chunk in events(generation):
                now = time.monotonic()
                if chunk:
                    quiet_since = now
                    yield chunk
                elif now - quiet_since >= generation.keepalive_interval:
                    quiet_since = now
                    yield comment(generation.progress_text())
        except ApiError as error:
            yield event(encode(error.body()))
        except Exception:
            log.exception("a stream failed")
            yield event(encode(ApiError(500, "The server failed on this request").body()))
        yield DONE

    return EventStream(chunks(), generation.close)

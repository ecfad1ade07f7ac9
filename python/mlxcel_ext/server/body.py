"""Request bodies: read within a limit, decoded into the types of protocol.py, or a 4xx that says why."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from .errors import ApiError, bad_request, from_validation
from .sse import ClientGone

T = TypeVar("T")


#: Seconds that a body may take: a client that sends a byte now and then must not hold a connection for ever.
ARRIVAL_LIMIT = 60.0

_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {}


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    if kind not in _DECODERS:
        _DECODERS[kind] = msgspec.json.Decoder(kind)
    return _DECODERS[kind]


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """A body of a million lists sets the collector off a thousand times: four fifths of its decoding."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; a 413 as soon as it is known to be longer than limit bytes."""
    too_large = ApiError(
        413, f"The request body is larger than this server's limit of {limit} bytes", code="body_too_large"
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    chunks, total = [], 0
    try:
        async with asyncio.timeout(ARRIVAL_LIMIT):
            async for chunk in request.stream():
                total += len(chunk)
                if total > limit:
                    raise too_large
                chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {ARRIVAL_LIMIT:g} s", code="timeout") from None
    return b"".join(chunks)


async def read_json(request: Request, kind: type[T], limit: int) -> T:
    """The body as a value of that type. A content type that is not JSON is a 415: it is what a page of
    another site can send without asking. So is a body that is compressed."""
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(
            415, f"The content type must be application/json, not {content_type!r}", code="content_type"
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(
            415,
            f"The body must not be compressed, but content-encoding is {encoding!r}",
            code="content_encoding",
        )
    raw = await read_body(request, limit)
    try:
        with _collector_paused():
            return _decoder(kind).decode(raw)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The body is nested too deeply", code="invalid_json") from None

"""Plain ASGI layers around the routes: request ids and logs, keys. They pass disconnects through untouched."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .metrics import Metrics
from .respond import error_response
from .sse import SEND, ClientGone

log = logging.getLogger("mlxcel_ext.server")

#: Key of the ASGI scope under which handlers leave what the log shall say of their request.
LOG_FIELDS = "mlxcel.log"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
#: Paths that probes, scrapers and browsers read without a key, as with vLLM: none shows a request's content.
OPEN_PATHS = frozenset({"/health", "/metrics", "/openapi.json", "/dashboard", "/dashboard/data"})
#: Characters of a path that logs and messages repeat; a client may send a hundred thousand.
MAX_PATH = 200
METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})
#: A body that is refused unread is taken in and dropped, up to so much: a client that is still sending when its
#: connection closes never sees why.
LINGER_BYTES = 64 * 2**20
LINGER_SECONDS = 5.0
CLIENT_CLOSED = 499  # nginx's code for a client that left; only the log sees it


class RequestLog:
    """Gives each request an id, turns what escapes the routes into an answer, logs and counts it."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[LOG_FIELDS] = {}
        scope[SEND] = send
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        started = time.monotonic()
        status = 0

        whole = False  # the body has arrived

        async def receive_noted() -> Message:
            nonlocal whole
            message = await receive()
            whole = whole or not message.get("more_body", False)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif status >= 400 and not whole and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await _take_in(receive)
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        try:
            await self._app(scope, receive_noted, send_with_id)
        except ClientGone:
            status = CLIENT_CLOSED
        except Exception as error:
            failure = error if isinstance(error, ApiError) else None
            if failure is None:
                log.exception("a request failed", extra={"fields": {"request_id": request_id}})
                failure = ApiError(500, "The server failed on this request")
            if status == 0:
                await error_response(failure)(scope, receive, send_with_id)
        finally:
            # Unmatched paths share one label, and so do odd methods: anybody can make them up, and a label costs
            # memory for ever.
            route = getattr(scope.get("route"), "path", "unmatched")
            known = route != "unmatched" and scope["method"] in METHODS
            self._metrics.http(route, scope["method"] if known else "any", status)
            self._log(scope, request_id, status, time.monotonic() - started)

    def _log(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        quiet = scope["path"] in OPEN_PATHS and status < 400
        fields: dict[str, Any] = {
            "request_id": request_id,
            "client": (scope.get("client") or ("",))[0],
            "method": scope["method"],
            "path": scope["path"][:MAX_PATH],
            "status": status,
            "seconds": round(seconds, 4),
            **scope[LOG_FIELDS],
        }
        log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})


async def _take_in(receive: Receive) -> None:
    left = LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0:
                message = await receive()
                if not message.get("more_body", False):
                    return
                left -= len(message["body"])


class KeyCheck:
    """A 401 for a request without one of the keys. Keys are compared by digest, in constant time."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or not self._digests
            or scope["path"] in OPEN_PATHS
            or self._allowed(scope)
        ):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401, "This server wants a valid key: Authorization: Bearer KEY", code="invalid_api_key"
        )
        response = error_response(error)
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # Every key is looked at, so that the time does not tell which one came near.
        return any(hmac.compare_digest(digest, known) for known in self._digests)

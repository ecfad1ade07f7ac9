"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}}."""

from __future__ import annotations

import re

import msgspec

_PATH = re.compile(r"^(?P<what>.*?) - at `(?P<path>[^`]*)`$", re.DOTALL)
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer other than 200. The message is for the client; retry_after is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, dict[str, str | None]]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def from_validation(error: msgspec.ValidationError) -> ApiError:
    """A 400 that names the field: msgspec says "Expected `int`, got `str` - at `$.max_tokens`"."""
    match = _PATH.match(str(error))
    if not match:
        return bad_request(str(error))
    param = match["path"].removeprefix("$").lstrip(".") or None
    what = match["what"]
    return bad_request(f"{param}: {what}" if param else what, param=param, code="invalid_type")

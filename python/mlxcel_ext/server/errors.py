"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}}."""

from __future__ import annotations

import re

import msgspec

_PATH = re.compile(r"^(?P<what>.*?) - at `(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`")
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
    what, path = str(error), ""
    if match := _PATH.match(what):
        what, path = match["what"], match["path"].removeprefix("$").lstrip(".")
    if missing := _MISSING.match(what):
        path = f"{path}.{missing['name']}".lstrip(".")
        return bad_request(f"Missing required parameter: {path}", path, "missing_required_parameter")
    return bad_request(f"{path}: {what}" if path else what, path or None, "invalid_type")

"""The OpenAPI document, from the types that decode the requests: it cannot say what the server does not do."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from .. import __version__
from .protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorResponse,
    ModelCard,
    TokenizeRequest,
    Usage,
)

_TYPES = (
    CompletionRequest,
    ChatCompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ErrorResponse,
    ModelCard,
    Usage,
)
_REF = "#/components/schemas/"


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_STRING, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_LIST = {"type": "array", "items": _INTEGER}


def _answer(description: str, schema: dict[str, Any], content: str = "application/json") -> dict[str, Any]:
    return {"description": description, "content": {content: {"schema": schema}}}


def _errors(*statuses: int) -> dict[str, Any]:
    error = {"$ref": f"{_REF}ErrorResponse"}
    return {str(status): _answer("OpenAI's error object", error) for status in statuses}


def _completion(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    choices = {"type": "array", "items": choice}
    usage = {"$ref": f"{_REF}Usage"}
    return _object(
        id=_STRING, object={"const": kind}, created=_INTEGER, model=_STRING, choices=choices, usage=usage
    )


_FINISH = {"enum": ["stop", "length", "tool_calls"]}
_COMPLETION = _completion("text_completion", _object(index=_INTEGER, text=_STRING, finish_reason=_FINISH))
_CHAT = _completion(
    "chat.completion",
    _object(index=_INTEGER, message=_object(role={"const": "assistant"}), finish_reason=_FINISH),
)


def _post(summary: str, request: str, response: dict[str, Any], *, streams: bool = False) -> dict[str, Any]:
    ok = _answer("The result", response)
    if streams:
        ok["content"]["text/event-stream"] = {"schema": _STRING}
    return {
        "post": {
            "summary": summary,
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": {"$ref": f"{_REF}{request}"}}},
            },
            "responses": {"200": ok, **_errors(400, 401, 404, 408, 413, 415, 429, 503, 504)},
        }
    }


def _get(
    summary: str, response: dict[str, Any], *errors: int, content: str = "application/json"
) -> dict[str, Any]:
    return {
        "get": {
            "summary": summary,
            "responses": {"200": _answer("The result", response, content), **_errors(*errors)},
        }
    }


@lru_cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    _, schemas = msgspec.json.schema_components(_TYPES, ref_template=_REF + "{name}")
    model = {"$ref": f"{_REF}ModelCard"}
    health = _object(status={"enum": ["ok", "loading", "draining", "dead"]}, detail=_STRING)
    by_name = _get("One model", model, 401, 404, 503)
    by_name["get"]["parameters"] = [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    ]
    healthy = _get("Whether the server takes requests", health)
    healthy["get"]["responses"]["503"] = _answer("It does not", health)
    reset = {
        "post": {
            "summary": "Drop the prefix cache's unused pages",
            "responses": {"200": _answer("The result", _object(pages_dropped=_INTEGER)), **_errors(401, 503)},
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlxcel-ext",
            "version": __version__,
            "description": "OpenAI-compatible LLM server",
        },
        "paths": {
            "/v1/completions": _post("Continue a prompt", "CompletionRequest", _COMPLETION, streams=True),
            "/v1/chat/completions": _post(
                "Answer a conversation", "ChatCompletionRequest", _CHAT, streams=True
            ),
            "/tokenize": _post(
                "Token ids of a text or of messages",
                "TokenizeRequest",
                _object(count=_INTEGER, max_model_len=_INTEGER, tokens=_LIST),
            ),
            "/detokenize": _post("Text of token ids", "DetokenizeRequest", _object(prompt=_STRING)),
            "/v1/models": _get(
                "The served models",
                _object(object={"const": "list"}, data={"type": "array", "items": model}),
                401,
                503,
            ),
            "/v1/models/{name}": by_name,
            "/v1/cache/stats": _get(
                "State of the KV pages and the prefix cache",
                _object(pages_total=_INTEGER, pages_free=_INTEGER, prefix_hit_rate=_NUMBER),
                401,
                503,
            ),
            "/v1/cache/reset": reset,
            "/health": healthy,
            "/metrics": _get("Prometheus metrics", _STRING, content="text/plain"),
            "/dashboard": _get("A live dashboard", _STRING, content="text/html"),
            "/dashboard/data": _get("The data behind the dashboard", {"type": "object"}),
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }

"""The ASGI application: routes over a ServerState."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from .body import read_json
from .chat import chat_completions
from .completions import completions
from .dashboard import snapshot
from .errors import ApiError, bad_request
from .generation import TRUNCATED
from .generation import tokenize as encode_text
from .messages import as_template_messages, render_messages
from .middleware import MAX_PATH, KeyCheck, RequestLog
from .openapi import document
from .protocol import DetokenizeRequest, ModelCard, TokenizeRequest
from .respond import error_response, json_response
from .state import ServerState

#: Pages that a browser on this machine loads from this machine.
LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


async def health(request: Request) -> Response:
    found = _state(request).health()
    headers = {"retry-after": "1"} if found.state in ("loading", "draining") else None
    body = {"status": found.state, "detail": found.detail}
    return json_response(body, 200 if found.state == "ok" else 503, headers)


async def metrics(request: Request) -> Response:
    text, content_type = _state(request).metrics.expose(request.headers.get("accept", ""))
    return Response(text, media_type=None, headers={"content-type": content_type})


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(name, state.engine.max_model_len, int(state.started), state.model.name)


async def models(request: Request) -> Response:
    state = _state(request)
    cards = [_card(state, name) for name in state.settings.served_model_name]
    return json_response({"object": "list", "data": cards})


async def model(request: Request) -> Response:
    state = _state(request)
    name = request.path_params["name"]
    state.check_model(name)
    return json_response(_card(state, name))


async def tokenize(request: Request) -> Response:
    state = _state(request)
    body = await read_json(request, TokenizeRequest, state.settings.max_body_bytes)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Exactly one of prompt and messages is wanted", "prompt", "invalid_value")
    if body.messages is not None:
        if not body.messages:
            raise bad_request("messages must not be empty", "messages", "invalid_value")
        messages = as_template_messages(state, body.messages)
        text = render_messages(state, messages, add_generation_prompt=body.add_generation_prompt is not False)
        ids = await encode_text(state, text, bool(body.add_special_tokens))
    else:
        ids = await encode_text(state, body.prompt or "", body.add_special_tokens is not False)
    out: dict[str, Any] = {"count": len(ids), "max_model_len": state.engine.max_model_len, "tokens": ids}
    if body.return_token_strs:
        out["token_strs"] = [state.texts.text_of(token_id) for token_id in ids]
    return json_response(out)


async def detokenize(request: Request) -> Response:
    state = _state(request)
    body = await read_json(request, DetokenizeRequest, state.settings.max_body_bytes)
    state.check_model(body.model)
    tokenizer = state.model.tokenizer
    most = state.engine.max_model_len * TRUNCATED
    if len(body.tokens) > most:
        raise bad_request(
            f"{len(body.tokens)} tokens are more than this server takes: {most}",
            "tokens",
            "context_length_exceeded",
        )
    highest = max(body.tokens, default=0)
    if highest >= tokenizer.vocab_size:
        raise bad_request(
            f"tokens holds {highest}; the vocabulary has {tokenizer.vocab_size} tokens",
            "tokens",
            "invalid_value",
        )
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, bool(body.skip_special_tokens))
    return json_response({"prompt": text})


async def cache_stats(request: Request) -> Response:
    state = _state(request)
    stats = state.engine.stats()
    share = stats.prefix_hit_tokens / stats.prefix_query_tokens if stats.prefix_query_tokens else 0.0
    names = (
        *("page_size", "page_bytes", "pages_total", "pages_free", "pages_cached", "pages_in_use"),
        *("prefix_queries", "prefix_hits", "prefix_query_tokens", "prefix_hit_tokens", "preemptions"),
    )
    return json_response({**{name: getattr(stats, name) for name in names}, "prefix_hit_rate": share})


async def cache_reset(request: Request) -> Response:
    engine = _state(request).engine
    return json_response({"pages_dropped": await asyncio.to_thread(engine.reset_prefix_cache)})


async def openapi(request: Request) -> Response:
    return json_response(document())


@lru_cache
def _page() -> str:
    return (pathlib.Path(__file__).parent / "dashboard.html").read_text(encoding="utf-8")


async def dashboard(request: Request) -> Response:
    return HTMLResponse(_page())


async def dashboard_data(request: Request) -> Response:
    return json_response(snapshot(_state(request)))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, with OpenAI's body too."""
    assert isinstance(error, HTTPException)
    response = error_response(
        ApiError(error.status_code, f"{request.method} {request.url.path[:MAX_PATH]}: {error.detail}")
    )
    response.headers.update(error.headers or {})
    return response


ROUTES = [
    Route("/health", health),
    Route("/metrics", metrics),
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/v1/cache/stats", cache_stats),
    Route("/v1/cache/reset", cache_reset, methods=["POST"]),
    Route("/openapi.json", openapi),
    Route("/dashboard", dashboard),
    Route("/dashboard/data", dashboard_data),
]


def create_app(state: ServerState) -> Starlette:
    """The application over that state. It can serve before state.attach(): then it answers 503."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        sampler = asyncio.create_task(state.sample())
        try:
            yield
        finally:
            sampler.cancel()
            await asyncio.gather(sampler, return_exceptions=True)

    origins = state.settings.allowed_origins
    app = Starlette(
        routes=ROUTES,
        middleware=[
            Middleware(RequestLog, metrics=state.metrics),
            Middleware(
                CORSMiddleware,
                allow_origins=list(origins),
                allow_origin_regex=None if origins else LOCAL_ORIGINS,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            ),
            Middleware(KeyCheck, keys=state.settings.api_key),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.state.server = state
    return app

"""Bad input gets a 4xx with OpenAI's error object, and the server lives on."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mlxcel_ext.server.errors import ApiError
from mlxcel_ext.server.generation import tokenize
from mlxcel_ext.server.messages import as_template_messages
from mlxcel_ext.server.protocol import ChatMessage
from mlxcel_ext.server.settings import ServerSettings
from mlxcel_ext.server.token_text import TokenText

from .conftest import RunningServer
from .fake_engine import FakeEngine, FakeModel, FakeTokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = {"prompt": "a"}
USER = {"messages": [{"role": "user", "content": "a"}]}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(served_model_name=("fake",), max_body_bytes=10_000, max_choices=8)


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    return error


BAD_FIELDS = [
    ("temperature", "hot"),
    ("temperature", -1),
    ("top_p", 2),
    ("top_k", 1.5),
    ("min_p", [1]),
    ("n", 0),
    ("n", 129),
    ("seed", 2**64),
    ("max_tokens", -1),
    ("max_tokens", "16"),
    ("stop", 3),
    ("stop", [""]),
    ("stop", ["x"] * 65),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10_000]),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"9999": 1}),
    ("presence_penalty", 3),
    ("repetition_penalty", 0),
    ("min_tokens", 17),
    ("stream", "yes"),
    ("model", 5),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"regex": ""}),
    ("structured_outputs", {"json": {"type": "object"}, "grammar": "x"}),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}),
    ("structured_outputs", {"grammar": "bad"}),
    ("cache_salt", 1),
    ("stream_options", {"include_usage": True}),
    ("priority", "high"),
]


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS)
@pytest.mark.parametrize(("path", "base"), [(COMPLETIONS, TEXT), (CHAT, {**USER, "max_tokens": 16})])
async def test_a_bad_field_is_named(
    client: httpx.AsyncClient, path: str, base: dict, name: str, value: Any
) -> None:
    error = check_error(await client.post(path, json={**base, name: value}), 400)
    assert name in error["message"] or name in (error["param"] or "") or value == {"grammar": "bad"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [1] * 3000}, "prompt"),
        (COMPLETIONS, {**TEXT, "structured_outputs": {"grammar": "bad"}}, "structured_outputs"),
        (COMPLETIONS, {**TEXT, "structured_outputs": {"json_object": False}}, "structured_outputs"),
        (
            COMPLETIONS,
            {**TEXT, "structured_outputs": {"json_object": True, "regex": "a"}},
            "structured_outputs",
        ),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", ""]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, -5]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, 2**70]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, 10_000]}, "prompt"),
        (COMPLETIONS, {"prompt": "a" * 3000}, "prompt"),
        (COMPLETIONS, {"prompt": "a" * 2000, "max_tokens": 100}, "max_tokens"),
        (COMPLETIONS, {"prompt": ["a"] * 5, "n": 2}, "prompt"),
        (COMPLETIONS, {**TEXT, "best_of": 3}, "best_of"),
        (COMPLETIONS, {**TEXT, "suffix": "b"}, "suffix"),
        (COMPLETIONS, {**TEXT, "logprobs": 65}, "logprobs"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role"),
        (CHAT, {**USER, "tools": [{"type": "function"}]}, "tools[0].function"),
        (
            CHAT,
            {**USER, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "bad"}}}},
            "response_format",
        ),
        (
            CHAT,
            {
                **USER,
                "tools": [{"function": {"name": "f", "parameters": {"type": "bad"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
        ),
        (CHAT, {"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
        (
            CHAT,
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            None,
        ),
        (CHAT, {**USER, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {**USER, "max_tokens": 0}, "max_tokens"),
        (CHAT, {**USER, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {**USER, **TOOLS, "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
        (
            CHAT,
            {**USER, **TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
        (CHAT, {**USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10_000]}, "tokens"),
    ],
)
async def test_a_bad_body_is_a_400(
    client: httpx.AsyncClient, path: str, body: dict, param: str | None
) -> None:
    check_error(await client.post(path, json=body), 400, param)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"a"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"x":' + b"[" * 4000,
        b'{"prompt": ' + b"[" * 4000,
    ],
)
async def test_a_body_that_is_no_json_is_a_400(client: httpx.AsyncClient, raw: bytes) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        check_error(await client.post(path, content=raw, headers={"content-type": "application/json"}), 400)


async def test_text_that_a_template_made_and_no_tokenizer_takes_is_a_400() -> None:
    """Tool arguments can spell a lone surrogate in JSON, which the template writes out."""

    def refuse(text: str, add_special_tokens: bool) -> list[int]:
        raise ValueError("[encode] text is not valid Unicode")

    tokenizer = SimpleNamespace(encode=refuse, max_token_chars=8)
    state = SimpleNamespace(
        model=SimpleNamespace(tokenizer=tokenizer), engine=SimpleNamespace(max_model_len=100_000)
    )
    for length in (1, 100_000):  # here and in a thread
        with pytest.raises(ApiError, match="not valid Unicode") as refused:
            await tokenize(state, "a" * length, False)  # type: ignore[arg-type]
        assert refused.value.status == 400


async def test_an_unknown_model_is_a_404(client: httpx.AsyncClient) -> None:
    for path, base in ((COMPLETIONS, TEXT), (CHAT, USER), ("/tokenize", TEXT)):
        assert (
            check_error(await client.post(path, json={**base, "model": "gpt"}), 404)["code"]
            == "model_not_found"
        )
    check_error(await client.get("/v1/models/gpt"), 404)


async def test_unknown_paths_and_methods(client: httpx.AsyncClient) -> None:
    check_error(await client.get("/v1/nothing"), 404)
    response = await client.get(COMPLETIONS)
    check_error(response, 405)
    assert response.headers["allow"] == "POST"


async def test_a_large_body_is_a_413(client: httpx.AsyncClient) -> None:
    check_error(await client.post(COMPLETIONS, json={"prompt": "a" * 10_001}), 413)

    async def chunks():  # type: ignore[no-untyped-def]
        for _ in range(20):
            yield b" " * 1000

    check_error(
        await client.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"}), 413
    )


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/nothing"])
def test_a_client_that_sends_on_reads_why_its_body_was_refused(
    serve: Callable[..., RunningServer], path: str
) -> None:
    """More than the socket's buffers hold, so that it is still sending when the answer comes."""
    server = serve(max_body_bytes=10_000)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    for _ in range(2):  # the connection lives on
        connection.request("POST", path, b" " * 20_000_000, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == (413 if path == COMPLETIONS else 404)
        assert "message" in json.loads(response.read())["error"]
    connection.close()


async def test_a_refusal_does_not_wait_for_a_body_that_never_ends(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxcel_ext.server.middleware.LINGER_SECONDS", 0.05)
    sent = 0

    async def chunks():  # type: ignore[no-untyped-def]
        nonlocal sent
        while sent < 100:
            sent += 1
            yield b" " * 1000
            await asyncio.sleep(0 if sent < 20 else 0.02)

    check_error(
        await client.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"}), 413
    )
    assert sent < 50


async def test_a_health_check_is_answered_while_many_prompts_are_read(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is short: it is their number that takes long."""
    encode, loop_thread, on_loop = FakeTokenizer.encode, threading.get_ident(), 0

    def watched(self: FakeTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        nonlocal on_loop
        on_loop += threading.get_ident() == loop_thread
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(FakeTokenizer, "encode", watched)
    body = {"prompt": ["a" * 1000] * 5, "max_tokens": 1}
    assert (await client.post(COMPLETIONS, json=body)).status_code == 200
    assert on_loop == 0
    assert (await client.post(COMPLETIONS, json={**body, "prompt": ["a"] * 5})).status_code == 200
    assert on_loop == 5


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (COMPLETIONS, {**TEXT, "echo": True, "logprobs": 2}, "completion_logprobs"),
        (COMPLETIONS, {**TEXT, "prompt_logprobs": 2}, "prompt_logprobs"),
        (CHAT, {**USER, "logprobs": True}, "chat_logprobs"),
    ],
)
async def test_logprobs_are_written_down_off_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, body: dict, name: str
) -> None:
    write, threads = getattr(TokenText, name), set()

    def watched(*args: Any) -> Any:
        threads.add(threading.get_ident())
        return write(*args)

    monkeypatch.setattr(TokenText, name, watched)
    for stream in (
        (False, True) if path == COMPLETIONS else (False,)
    ):  # a chat's stream has one token's at a time
        answer = await client.post(path, json={**body, "max_tokens": 2, "stream": stream})
        assert answer.status_code == 200
    assert threads
    assert threading.get_ident() not in threads


def test_more_messages_than_the_context_has_tokens_are_not_looked_at() -> None:
    state = SimpleNamespace(engine=SimpleNamespace(max_model_len=3))
    message = ChatMessage("user", "a")
    assert len(as_template_messages(state, [message] * 3)) == 3  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="4 messages have more") as refused:
        as_template_messages(state, [message] * 4)  # type: ignore[arg-type]
    assert refused.value.status == 400


async def test_too_many_ids_to_read_back_are_a_400(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.max_model_len = 10
    assert (await client.post("/detokenize", json={"tokens": [1] * 160})).status_code == 200
    check_error(await client.post("/detokenize", json={"tokens": [1] * 161}), 400, "tokens")


async def test_a_body_that_does_not_arrive_is_a_408(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxcel_ext.server.body.ARRIVAL_LIMIT", 0.05)

    async def chunks():  # type: ignore[no-untyped-def]
        yield b"{"
        await asyncio.sleep(1)

    check_error(
        await client.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"}), 408
    )


async def test_a_form_is_a_415(client: httpx.AsyncClient) -> None:
    check_error(await client.post(COMPLETIONS, data={"prompt": "a"}), 415)


async def test_a_compressed_body_is_a_415(client: httpx.AsyncClient) -> None:
    for encoding, status in (("gzip", 415), ("identity", 200)):
        response = await client.post(COMPLETIONS, json=TEXT, headers={"content-encoding": encoding})
        assert response.status_code == status


async def test_a_long_path_is_not_repeated(client: httpx.AsyncClient) -> None:
    response = await client.get("/" + "a" * 50_000)
    assert response.status_code == 404
    assert len(response.text) < 500


async def test_a_model_without_a_template_says_so(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeModel, "chat_template", None)
    assert check_error(await client.post(CHAT, json=USER), 400)["code"] == "no_chat_template"


@pytest.mark.parametrize(("path", "base"), [(COMPLETIONS, {"prompt": "DEADEND"}), (CHAT, {})])
async def test_a_request_to_blame_for_its_failure_gets_a_400(
    client: httpx.AsyncClient, path: str, base: dict
) -> None:
    body = base or {"messages": [{"role": "user", "content": "DEADEND"}]}
    error = check_error(await client.post(path, json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert "[grammar] nothing may follow" in error["message"]
    response = await client.post(path, json={**body, "stream": True})
    *_, failed, done = response.text.strip().split("\n\n")
    assert json.loads(failed.removeprefix("data: ")) == {"error": error}
    assert done == "data: [DONE]"


async def test_one_faulty_row_fails_alone(client: httpx.AsyncClient) -> None:
    error = check_error(await client.post(COMPLETIONS, json={"prompt": "ROWFAULT"}), 500)
    assert error["code"] == "engine_error"
    response = await client.post(COMPLETIONS, json={"prompt": "ROWFAULT", "stream": True})
    last_events = response.text.strip().split("\n\n")[-2:]
    assert json.loads(last_events[0].removeprefix("data: "))["error"]["code"] == "engine_error"
    assert last_events[1] == "data: [DONE]"
    assert (await client.post(COMPLETIONS, json=TEXT)).status_code == 200


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [name for name, _ in BAD_FIELDS]
    + [
        "prompt",
        "messages",
        "tools",
        "tool_choice",
        "echo",
        "logprobs",
        "top_logprobs",
        "stream_options",
        "user",
        "best_of",
        "truncate_prompt_tokens",
        "chat_template_kwargs",
        "tokens",
        "prompt_logprobs",
    ]
)


@hypothesis_settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    path=st.sampled_from(
        [(COMPLETIONS, TEXT), (CHAT, USER), ("/tokenize", TEXT), ("/detokenize", {"tokens": [4]})]
    ),
    extra=st.dictionaries(FIELDS, JSON, max_size=4),
    keep=st.booleans(),
)
def test_no_body_gives_a_server_error(
    fuzzed: Callable[[str, Any], httpx.Response], path: tuple, extra: dict, keep: bool
) -> None:
    route, base = path
    # max_tokens keeps accepted requests short; everything else is as wild as it comes.
    response = fuzzed(route, {**({"max_tokens": 2} | base if keep else {}), **extra})
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        check_error(response, response.status_code)


@pytest.fixture(scope="module")
def fuzzed():  # type: ignore[no-untyped-def]
    """post(route, body) against a server in a thread, shared by all examples."""
    from .conftest import RunningServer

    engine = FakeEngine()
    engine.start()
    server = RunningServer(engine, ServerSettings(served_model_name=("fake",), request_timeout=20))
    with httpx.Client(base_url=server.url) as client:
        yield lambda route, body: client.post(route, json=body)
    server.stop()
    engine.shutdown()

"""Disconnects, backpressure, time limits, keys, origins, health and shutdown, on real sockets where they matter."""

from __future__ import annotations

import asyncio
import json
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from mlxcel_ext.engine_config import EngineConfig
from mlxcel_ext.sampling_params import GrammarSpec, SamplingParams
from mlxcel_ext.server.app import create_app
from mlxcel_ext.server.generation import Generation, Work
from mlxcel_ext.server.settings import ServerSettings
from mlxcel_ext.server.state import ServerState
from tests.support.waiting import wait_until

from .conftest import RunningServer
from .fake_engine import FIRST_BYTE, FakeEngine, FakeModel

ROOT = pathlib.Path(__file__).parents[2]
COMPLETIONS = "/v1/completions"
Serve = Callable[..., RunningServer]


def raw_post(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    """A connection on which the request has been sent."""
    payload = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + payload)
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["abc", "STALL"])
def test_a_client_that_leaves_frees_its_rows(
    serve: Serve, engine: FakeEngine, stream: bool, prompt: str
) -> None:
    engine.step_seconds = 0.01
    server = serve()
    connection = raw_post(server, {"prompt": [prompt, prompt], "max_tokens": 2000, "stream": stream})
    wait_until(lambda: engine.stats().running == 2)
    connection.close()
    wait_until(lambda: engine.stats().running == 0, 2.0)
    assert len(engine.cancelled) == 2
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200


HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"\r\n" + HEAD])
def test_a_silent_connection_is_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr("mlxcel_ext.server.connection.SILENCE_LIMIT", 0.2)
    with socket.create_connection(("127.0.0.1", serve().port), timeout=10) as connection:
        connection.sendall(sent)
        answered = b""
        while piece := connection.recv(4096):
            answered += piece
    assert answered.count(b"200 OK") == sent.count(b"\r\n\r\n")


def test_a_connection_that_waits_for_its_answer_is_kept(
    serve: Serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxcel_ext.server.connection.SILENCE_LIMIT", 0.1)
    with raw_post(serve(), {"prompt": "SLOWPREFILL", "max_tokens": 1}) as connection:
        connection.settimeout(10)
        assert b"200 OK" in connection.recv(4096)


def test_the_frames_of_a_stream_are_exact(serve: Serve, engine: FakeEngine) -> None:
    engine.step_seconds = 0.01
    server = serve(keepalive_interval=0.25)
    request = {"prompt": "SLOWPREFILL é", "max_tokens": 20, "stream": True}
    with httpx.stream("POST", server.url + COMPLETIONS, json=request) as response:
        raw = b"".join(response.iter_raw())
    frames = raw.split(b"\n\n")
    assert frames.pop() == b""
    comments = [frame for frame in frames if frame.startswith(b":")]
    assert comments[0].startswith(b": keepalive ")
    assert comments[0].endswith(b"/14")
    assert frames[-1] == b"data: [DONE]"
    data = [frame for frame in frames[:-1] if not frame.startswith(b":")]
    assert all(frame.startswith(b"data: {") and b"\n" not in frame for frame in data)
    text = "".join(json.loads(frame[6:])["choices"][0]["text"] for frame in data)
    assert text.startswith("SLOWPREFILL é")


def test_the_headers_of_a_stream_come_before_its_first_token(serve: Serve) -> None:
    request = {"prompt": "STALL", "stream": True}
    with httpx.stream("POST", serve().url + COMPLETIONS, json=request) as response:
        assert response.status_code == 200


async def test_a_full_queue_is_a_429_that_says_when(settings: ServerSettings) -> None:
    engine = FakeEngine(EngineConfig(max_num_seqs=1, max_queue_depth=1))
    engine.start()
    state = ServerState(settings)
    state.attach(engine, FakeModel())
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(state)), base_url="http://s"
    ) as client:
        hanging = []
        for waiting in (0, 1):
            hanging.append(asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "STALL"})))
            while engine.stats().waiting != waiting or engine.stats().running != 1:
                await asyncio.sleep(0.005)
        for stream in (True, False):
            response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
            assert (response.status_code, response.headers["retry-after"]) == (429, "1")
            assert response.json()["error"]["code"] == "queue_full"
        assert (
            'mlxcel_requests_rejected_total{model_name="fake",reason="queue_full"} 2.0'
            in (await client.get("/metrics")).text
        )
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
    engine.shutdown()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_over_its_time_limit_ends(stream: bool, engine: FakeEngine) -> None:
    state = ServerState(ServerSettings(("fake",), request_timeout=0.15))
    state.attach(engine, FakeModel())
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(state)), base_url="http://s"
    ) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "STALL", "stream": stream})
        if stream:
            assert '"type":"timeout_error"' in response.text
            assert response.text.endswith("data: [DONE]\n\n")
        else:
            assert response.status_code == 504
            assert response.json()["error"]["type"] == "timeout_error"
    assert engine.stats().running == 0


async def test_a_dead_engine_fails_what_waits_and_what_comes(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    assert (await client.get("/health")).json() == {"status": "ok", "detail": ""}
    waiting = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "STALL"}))
    while not engine.stats().running:
        await asyncio.sleep(0.005)
    engine.kill("the thread died")
    assert (await waiting).status_code == 500
    health = await client.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "dead", "detail": "the thread died"})
    for path, body in (
        (COMPLETIONS, {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        response = await client.post(path, json=body)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "dead"


async def test_loading_and_draining_are_503_with_retry_after(
    settings: ServerSettings, engine: FakeEngine
) -> None:
    state = ServerState(settings)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(state)), base_url="http://s"
    ) as client:
        for path in ("/health", "/v1/models", "/v1/cache/stats"):
            response = await client.get(path)
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/dashboard/data")).json()["health"]["state"] == "loading"
        state.attach(engine, FakeModel())
        assert (await client.get("/health")).status_code == 200
        state.drain()
        assert (await client.get("/health")).json()["status"] == "draining"
        assert (await client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 503


class TestKeys:
    @pytest.fixture
    def settings(self) -> ServerSettings:
        return ServerSettings(("fake",), api_key=("first", "sécond"))

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic first"},
            {"authorization": "Bearer "},
        ],
    )
    async def test_a_request_without_a_key_is_a_401(
        self, client: httpx.AsyncClient, headers: dict[str, str]
    ) -> None:
        for path in ("/v1/models", "/v1/cache/stats", "/nothing"):
            response = await client.get(path, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"

    @pytest.mark.parametrize(
        "headers",
        [
            {"authorization": "Bearer first"},
            {"authorization": "bearer sécond".encode()},
            {"x-api-key": "first"},
        ],
    )
    async def test_any_of_the_keys_will_do(self, client: httpx.AsyncClient, headers: Any) -> None:
        assert (await client.get("/v1/models", headers=headers)).status_code == 200

    async def test_probes_need_no_key(self, client: httpx.AsyncClient) -> None:
        for path in ("/health", "/metrics", "/openapi.json", "/dashboard", "/dashboard/data"):
            assert (await client.get(path)).status_code == 200


async def test_request_ids_are_echoed_or_made(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health", headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
    made = {
        (await client.get("/nothing", headers=headers)).headers["x-request-id"]
        for headers in ({}, {"x-request-id": "a b"}, {"x-request-id": "x" * 200})
    }
    assert len(made) == 3
    assert all(len(value) == 32 for value in made)


@pytest.mark.parametrize(
    ("allowed", "origin", "answer"),
    [
        ((), "http://localhost:3000", "http://localhost:3000"),
        ((), "https://evil.example", None),
        ((), "http://localhost.evil.example", None),
        (("https://ui.example",), "https://ui.example", "https://ui.example"),
        (("https://ui.example",), "http://localhost", None),
        (("*",), "https://any.example", "*"),
    ],
)
async def test_cors(engine: FakeEngine, allowed: tuple[str, ...], origin: str, answer: str | None) -> None:
    state = ServerState(ServerSettings(("fake",), allowed_origins=allowed, api_key=("key",)))
    state.attach(engine, FakeModel())
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(state)), base_url="http://s"
    ) as client:
        response = await client.get("/v1/models", headers={"origin": origin})
        assert response.headers.get("access-control-allow-origin") == answer
        preflight = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        response = await client.options(COMPLETIONS, headers=preflight)
        assert response.headers.get("access-control-allow-origin") == answer


class Process:
    """A server process over the fake engine; its log is the lines of its stderr."""

    def __init__(self, **options: Any) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.server.serve_fake", json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,  # where `tests` is; the package is found as it is here
        )
        assert self.popen.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.popen.stdout.readline())}"

    def health(self) -> dict[str, str]:
        with httpx.Client() as client:
            for _ in range(200):
                try:
                    return client.get(self.url + "/health").json()
                except httpx.ConnectError:
                    time.sleep(0.02)
        raise AssertionError("the server never listened")

    def end(self) -> tuple[int, list[dict[str, Any]]]:
        _, log = self.popen.communicate(timeout=15)
        return self.popen.returncode, [json.loads(line) for line in log.splitlines()]


@pytest.fixture
def process() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(**options: Any) -> Process:
        started.append(Process(**options))
        return started[-1]

    yield start
    for one in started:
        one.popen.kill()
        one.popen.wait()


def test_sigterm_drains(process: Callable[..., Process]) -> None:
    server = process(step_seconds=0.05, load_seconds=1.5)
    assert server.health()["status"] == "loading"
    wait_until(lambda: server.health()["status"] == "ok")
    with (
        httpx.Client(base_url=server.url) as client,
        client.stream(
            "POST",
            COMPLETIONS,
            json={"prompt": "ab", "max_tokens": 20, "stream": True},
            headers={"x-request-id": "mine"},
        ) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        server.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: server.health()["status"] == "draining")
        assert httpx.post(server.url + COMPLETIONS, json={"prompt": "a"}).status_code == 503
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
    status, log = server.end()
    assert status == 0
    [entry] = [line for line in log if line.get("request_id") == "mine"]
    assert (entry["event"], entry["status"], entry["path"]) == ("request", 200, COMPLETIONS)
    assert (entry["prompt_tokens"], entry["completion_tokens"]) == (2, 20)
    assert entry["ttft"] > 0


def test_a_second_signal_does_not_wait(process: Callable[..., Process]) -> None:
    server = process()
    wait_until(lambda: server.health()["status"] == "ok")
    with (
        httpx.Client(base_url=server.url) as client,
        client.stream("POST", COMPLETIONS, json={"prompt": "STALL", "stream": True}),
    ):
        server.popen.send_signal(signal.SIGINT)
        wait_until(lambda: server.health()["status"] == "draining")
        server.popen.send_signal(signal.SIGINT)
        assert server.end()[0] == 0


def test_requests_that_outlast_the_drain_are_cut(process: Callable[..., Process]) -> None:
    server = process(settings={"shutdown_timeout": 0.2})
    wait_until(lambda: server.health()["status"] == "ok")
    with (
        httpx.Client(base_url=server.url) as client,
        client.stream("POST", COMPLETIONS, json={"prompt": "STALL", "stream": True}) as response,
    ):
        server.popen.send_signal(signal.SIGTERM)
        text = response.read().decode()
        status, log = server.end()
    assert '"message":"the server shuts down"' in text
    assert text.endswith("data: [DONE]\n\n")
    assert status == 0
    assert any("still running" in line["event"] for line in log)


def test_a_model_that_does_not_load_ends_the_server(process: Callable[..., Process]) -> None:
    status, log = process(fail="no such model").end()
    assert status == 1
    assert any("no such model" in line["event"] for line in log)


def test_a_dead_engine_ends_the_server(process: Callable[..., Process]) -> None:
    server = process(kill_after=0.5)
    wait_until(lambda: server.health()["status"] == "dead")
    status, log = server.end()
    assert status == 1
    assert any("injected death" in line["event"] for line in log)


async def test_a_client_that_leaves_while_its_grammar_compiles_leaves_no_request(
    state: ServerState, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, compiled = threading.Event(), threading.Event()
    submit = engine.submit

    def slow(*args: Any, **kwargs: Any) -> None:
        compiling.set()
        compiled.wait(5)
        submit(*args, **kwargs)

    monkeypatch.setattr(engine, "submit", slow)
    params = SamplingParams(grammar=GrammarSpec("regex", "a+"))
    generation = Generation(state, [Work(0, [FIRST_BYTE], params)], {})
    entering = asyncio.create_task(generation.__aenter__())
    await asyncio.to_thread(compiling.wait, 5)
    entering.cancel()
    await asyncio.gather(entering, return_exceptions=True)
    compiled.set()
    await asyncio.to_thread(wait_until, lambda: engine.seen and engine.cancelled)
    await asyncio.to_thread(wait_until, lambda: engine.stats().running + engine.stats().waiting == 0)

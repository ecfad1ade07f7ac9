"""A server over the fake engine: in process for most tests, on a real port where the wire matters."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest
import uvicorn

from mlxcel_ext.server.app import create_app
from mlxcel_ext.server.connection import Connection
from mlxcel_ext.server.settings import ServerSettings
from mlxcel_ext.server.state import ServerState

from .fake_engine import FakeEngine, FakeModel


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    fake.start()
    yield fake
    fake.shutdown()


@pytest.fixture
def settings() -> ServerSettings:
    """Override in a test module or by parametrize for other settings."""
    return ServerSettings(served_model_name=("fake", "alias"))


@pytest.fixture
async def state(engine: FakeEngine, settings: ServerSettings) -> ServerState:
    state = ServerState(settings)
    state.attach(engine, FakeModel())
    return state


@pytest.fixture
async def client(state: ServerState) -> AsyncIterator[httpx.AsyncClient]:
    """Speaks to the application without a socket."""
    transport = httpx.ASGITransport(create_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield client


class RunningServer:
    """A uvicorn server on an ephemeral port, in a thread with its own event loop."""

    def __init__(self, engine: FakeEngine, settings: ServerSettings) -> None:
        self.engine = engine
        self._settings = settings
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        self.url = f"http://127.0.0.1:{self.port}"

    async def _main(self) -> None:
        self.state = ServerState(self._settings)
        self.state.attach(self.engine, FakeModel())
        config = uvicorn.Config(
            create_app(self.state), port=0, http=Connection, log_level="warning", access_log=False
        )
        self.server = uvicorn.Server(config)
        serving = asyncio.create_task(self.server.serve())
        while not self.server.started:
            await asyncio.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self._ready.set()
        await serving

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(10)


@pytest.fixture
def serve(engine: FakeEngine) -> Iterator[Callable[..., RunningServer]]:
    """Start servers; all are stopped after the test."""
    with contextlib.ExitStack() as stack:

        def start(**settings: object) -> RunningServer:
            server = RunningServer(engine, ServerSettings(served_model_name=("fake",), **settings))  # type: ignore[arg-type]
            stack.callback(server.stop)
            return server

        yield start

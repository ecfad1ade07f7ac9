"""A server process: listens while the model loads, drains on SIGTERM, and goes when the engine has died."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from .app import create_app
from .connection import Connection
from .settings import EngineLike, ModelLike, ServerSettings
from .state import ServerState

log = logging.getLogger("mlxcel_ext.server")

#: Seconds between two looks at the engine's health, and how long a dead one answers 503 before the end.
WATCH_INTERVAL = 1.0
DEAD_LINGER = 5.0

Loader = Callable[[], tuple[EngineLike, ModelLike]]


class _Server(uvicorn.Server):
    """The first signal drains, while /health says so; the second stops at once."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain = drain
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals == 1:
            self._drain()
        else:
            self.should_exit = self.force_exit = True


class ServerProcess:
    """Runs one server until it is told to stop. `run` returns the exit status."""

    def __init__(self, settings: ServerSettings, load: Loader, host: str, port: int) -> None:
        self._settings = settings
        self._load = load
        self._host = host
        self._port = port
        self._status = 0
        self._engine: EngineLike | None = None

    def run(self) -> int:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(self._serve())

    async def _serve(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._state = ServerState(self._settings)
        self._stopping = asyncio.Event()
        listener = _listen(self._host, self._port)
        self._port = listener.getsockname()[1]  # port 0 asks for any that is free
        config = uvicorn.Config(
            create_app(self._state),
            http=Connection,
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=75,
            # What still hangs after the drain is cut: the drain has its own, longer limit.
            timeout_graceful_shutdown=2,
        )
        self._server = _Server(config, self._drain_soon)
        tasks = [asyncio.create_task(work()) for work in (self._attach, self._stop, self._watch)]
        try:
            await self._server.serve(sockets=[listener])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._engine is not None:
                await asyncio.to_thread(self._engine.shutdown, False, 5.0)
        return self._status

    def _drain_soon(self) -> None:
        """From a signal handler, which may run between any two lines of the loop's thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)

    async def _attach(self) -> None:
        """Load off the event loop, so that /health answers "loading" meanwhile."""
        try:
            self._engine, model = await self._loaded()
        except Exception as error:
            expected = isinstance(error, ValueError | OSError)
            log.error("the model did not load: %s", error, exc_info=None if expected else error)
            self._exit(1)
            return
        self._state.attach(self._engine, model)
        where = f"http://{self._host}:{self._port}"
        log.info(
            "ready",
            extra={"fields": {"model": self._settings.name, "url": where, "dashboard": f"{where}/dashboard"}},
        )

    async def _loaded(self) -> tuple[EngineLike, ModelLike]:
        """Result of the loader. Its thread is a daemon, so that a signal need not wait for a download."""
        result: asyncio.Future[tuple[EngineLike, ModelLike]] = self._loop.create_future()

        def tell(setter: Callable[[], None]) -> None:
            def set_once() -> None:
                if not result.done():
                    setter()

            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(set_once)

        def work() -> None:
            try:
                loaded = self._load()
                # Model and modules stay: looking through them takes 20 to 40 ms of the engine's time at each full collection.
                gc.collect()
                gc.freeze()
            except BaseException as error:
                failure = error
                tell(lambda: result.set_exception(failure))
            else:
                tell(lambda: result.set_result(loaded))

        threading.Thread(target=work, name="mlxcel-load", daemon=True).start()
        return await result

    async def _stop(self) -> None:
        await self._stopping.wait()
        self._state.drain()
        log.info("draining", extra={"fields": {"timeout": self._settings.shutdown_timeout}})
        if not await self._state.idle(self._settings.shutdown_timeout):
            log.warning("requests were still running at the end of the drain")
            if self._engine is not None:  # while uvicorn still serves: their clients learn what ended them
                await asyncio.to_thread(self._engine.shutdown, False, 5.0)
        self._exit(0)

    async def _watch(self) -> None:
        """Say for a moment that the engine is dead, then leave it to the supervisor."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL)
            health = self._state.health()
            if health.state == "dead":
                log.error("the engine is dead: %s", health.detail)
                await asyncio.sleep(DEAD_LINGER)
                if self._state.health().state == "dead":  # a step that hung may have come back
                    self._exit(1)

    def _exit(self, status: int) -> None:
        self._status = status
        self._server.should_exit = True


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where it is installed (it has no wheels for some platforms), else the standard one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound before the model loads: a port in use is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:  # a port above 65535 overflows
        listener.close()
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen on {host}:{port}: {why}") from None
    listener.set_inheritable(True)
    return listener


def serve(settings: ServerSettings, load: Loader, host: str, port: int) -> int:
    """Serve until a signal; the exit status. `load` makes the engine and the model, on a thread of its own."""
    return ServerProcess(settings, load, host, port).run()

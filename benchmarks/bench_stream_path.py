"""What a streamed token costs the event loop, without HTTP and sockets: from the engine's callback to ASGI's send.

    PYTHONPATH=python:. python benchmarks/bench_stream_path.py [--streams 64] [--steps 120] [--uvloop]

A stub stands for the engine and hands a token to every stream in each step. Prints the CPU time of the loop's thread a
token, medians of five runs. Asserts that every token was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
from tests.server.fake_engine import FakeModel

from mlxcel_ext.engine_config import EngineStats, Health
from mlxcel_ext.outputs import RequestOutput
from mlxcel_ext.sampling_params import SamplingParams
from mlxcel_ext.server import chat, completions
from mlxcel_ext.server.protocol import ChatCompletionRequest, CompletionRequest
from mlxcel_ext.server.respond import stream_response
from mlxcel_ext.server.settings import ServerSettings
from mlxcel_ext.server.state import ServerState

BODY = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 1000}
KINDS: dict[str, tuple[Any, Any]] = {
    "completions": (completions._Answer, msgspec.convert({**BODY, "prompt": "hi"}, CompletionRequest)),
    "chat": (
        chat._Answer,
        msgspec.convert({**BODY, "messages": [{"role": "user", "content": "hi"}]}, ChatCompletionRequest),
    ),
}


class Stub:
    """An engine whose outputs come when `step` is called."""

    max_model_len = 4096

    def __init__(self) -> None:
        self._jobs: list[tuple[str, Callable[[RequestOutput], None]]] = []
        self._count = 0

    def submit(
        self, request_id: str, prompt: list[int], params: SamplingParams, on_output: Any, **_: Any
    ) -> None:
        self._jobs.append((request_id, on_output))

    def cancel(self, request_id: str) -> None:
        pass

    def health(self) -> Health:
        return Health("ok")

    def stats(self) -> EngineStats:
        return EngineStats()

    def step(self) -> None:
        self._count += 1
        for request_id, on_output in self._jobs:
            on_output(RequestOutput(request_id, "wxyz", (5,), num_completion_tokens=self._count))


async def measure(kind: str, streams: int, steps: int) -> float:
    """Seconds of the thread's CPU time a token."""
    answer, request = KINDS[kind]
    engine, sent = Stub(), 0
    state = ServerState(ServerSettings(("fake",)))
    state.attach(engine, FakeModel())  # type: ignore[arg-type]

    async def send(message: Any) -> None:
        nonlocal sent
        sent += message.get("body", b"").count(b"wxyz")

    async def receive() -> Any:
        await asyncio.Event().wait()

    tasks = []
    for _ in range(streams):
        job = answer(state, request, {})
        await job.prepare()
        response = await stream_response(job.generation(), job.events)
        tasks.append(asyncio.ensure_future(response({}, receive, send)))
    started = time.thread_time()
    for step in range(steps):
        engine.step()
        while sent < (step + 1) * streams:  # else the pause after a delivery would put tokens together
            await asyncio.sleep(0.002)
    spent = time.thread_time() - started
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sent == steps * streams
    return spent / sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--uvloop", action="store_true")
    options = parser.parse_args()
    factory = None
    if options.uvloop:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        for kind in KINDS:
            times = [runner.run(measure(kind, options.streams, options.steps)) for _ in range(5)]
            print(f"{kind}: {options.streams} streams, {1e6 * statistics.median(times):.1f} us a token")


if __name__ == "__main__":
    main()

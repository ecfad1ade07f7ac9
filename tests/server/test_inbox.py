"""The way of outputs from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from mlxcel_ext.outputs import RequestOutput
from mlxcel_ext.server.inbox import MAX_PAUSE, Inbox


@pytest.fixture
def wake_ups(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the test's loop is asked to call from other threads."""
    asked: list[object] = []
    ask = asyncio.BaseEventLoop.call_soon_threadsafe

    def noted(self: Any, callback: Any, *args: Any, **options: Any) -> Any:
        asked.append(callback)
        return ask(self, callback, *args, **options)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", noted)
    return asked


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_step_wakes_the_loop_once(wake_ups: list[object]) -> None:
    inbox = Inbox(asyncio.get_running_loop())
    got: list[tuple[int, str]] = []
    for row in range(64):
        inbox.put(lambda output, now, row=row: got.append((row, output.text)), RequestOutput("r", str(row)))
    assert not got, "outputs are delivered by the loop"
    await until(lambda: len(got) == 64)
    assert got == [(row, str(row)) for row in range(64)]
    assert len(wake_ups) == 1


async def test_every_output_of_another_thread_comes_in_order(wake_ups: list[object]) -> None:
    inbox = Inbox(asyncio.get_running_loop())
    got: list[str] = []
    count = 20_000

    def engine() -> None:
        for i in range(count):
            inbox.put(lambda output, now: got.append(output.text), RequestOutput("r", str(i)))

    thread = threading.Thread(target=engine)
    thread.start()
    await until(lambda: len(got) == count)
    thread.join()
    assert got == list(map(str, range(count)))
    assert len(wake_ups) < count / 10


@pytest.mark.parametrize("work", [0.004, 0.05])
async def test_a_delivery_waits_as_long_as_the_last_took_to_send(work: float, wake_ups: list[object]) -> None:
    loop = asyncio.get_running_loop()
    inbox = Inbox(loop)
    times: list[float] = []
    ends: list[float] = []

    def send() -> None:
        time.sleep(work)
        ends.append(time.monotonic())

    def receive(output: RequestOutput, now: float) -> None:
        times.append(now)
        loop.call_soon(send)

    inbox.put(receive, RequestOutput("r"))
    await until(lambda: ends)
    for _ in range(3):
        inbox.put(receive, RequestOutput("r"))
    await until(lambda: len(times) == 4)
    assert times[1] - ends[0] >= min(work, MAX_PAUSE)
    assert times[1:] == [times[1]] * 3, "what comes during the pause is delivered together"
    assert len(wake_ups) == 2


def test_outputs_for_a_loop_that_has_ended_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    Inbox(loop).put(lambda output, now: pytest.fail("delivered"), RequestOutput("r"))

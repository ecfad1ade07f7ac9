"""Prompts before they reach the engine, and what comes back from it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mlxcel_ext.outputs import RequestOutput
from mlxcel_ext.sampling_params import GrammarSpec, SamplingParams
from mlxcel_ext.server.errors import ApiError
from mlxcel_ext.server.generation import Generation, Work, tokenize
from mlxcel_ext.server.settings import ServerSettings
from mlxcel_ext.server.state import ServerState

from .fake_engine import FakeEngine, FakeModel


def state(encode: Any) -> Any:
    tokenizer = SimpleNamespace(encode=encode, max_token_chars=4)
    return SimpleNamespace(
        model=SimpleNamespace(tokenizer=tokenizer), engine=SimpleNamespace(max_model_len=10)
    )


async def test_a_text_that_cannot_fit_is_refused_unread() -> None:
    def encode(text: str, add_special_tokens: bool) -> list[int]:
        raise AssertionError("tokenized")

    with pytest.raises(ApiError, match="a prompt of 41 characters has more") as caught:
        await tokenize(state(encode), "x" * 41, True)
    assert caught.value.status == 400


async def test_a_text_that_may_fit_or_is_truncated_is_read() -> None:
    served = state(lambda text, add_special_tokens: [len(text)])
    assert await tokenize(served, "x" * 40, True) == [40]
    assert await tokenize(served, "x" * 640, True, truncated=True) == [640]
    with pytest.raises(ApiError, match="641 characters"):
        await tokenize(served, "x" * 641, True, truncated=True)


class HandEngine(FakeEngine):
    """Its outputs come when the test says so."""

    send: Callable[[RequestOutput], None]
    at_once: tuple[RequestOutput, ...] = ()

    def submit(self, request_id, prompt_token_ids, params, on_output, **options) -> None:  # type: ignore[no-untyped-def]
        self.send = on_output
        for output in self.at_once:
            on_output(output)
        time.sleep(0.05 if self.at_once else 0)


def a_generation(
    engine: FakeEngine, *, stream: bool = True, grammar: bool = False, **settings: Any
) -> Generation:
    state = ServerState(ServerSettings(("fake",), **settings))
    state.attach(engine, FakeModel())
    params = SamplingParams(grammar=GrammarSpec("regex", "a") if grammar else None)
    return Generation(state, [Work(0, [3], params)], {}, stream=stream)


def token(count: int, **fields: Any) -> RequestOutput:
    return RequestOutput("r", "x", (5,), num_completion_tokens=count, **fields)


async def test_a_request_has_one_timer_not_one_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = []
    call_at = asyncio.BaseEventLoop.call_at

    def noted(self: Any, when: float, callback: Any, *args: Any, **options: Any) -> Any:
        if getattr(callback, "__self__", None) is generation:
            timers.append(callback)
        return call_at(self, when, callback, *args, **options)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_at", noted)
    engine = HandEngine()
    async with a_generation(engine, request_timeout=60) as generation:
        for count in range(1, 101):
            asyncio.get_running_loop().call_soon(engine.send, token(count))
            assert [output.text for _, output in await anext(generation)] == ["x"]
    assert len(timers) == 1
    assert generation._timer is not None
    assert generation._timer.cancelled()


async def test_silence_counts_from_the_last_output() -> None:
    engine = HandEngine()
    async with a_generation(engine, keepalive_interval=0.2) as generation:
        asyncio.get_running_loop().call_later(0.15, engine.send, token(1))
        assert len(await anext(generation)) == 1
        for _ in range(2):
            began = time.monotonic()
            assert await anext(generation) == []
            assert 0.2 <= time.monotonic() - began < 0.3


async def test_a_deadline_ends_a_wait_however_lately_a_token_came() -> None:
    engine = HandEngine()
    began = time.monotonic()
    async with a_generation(engine, request_timeout=0.2) as generation:
        for delay in (0.05, 0.1):
            asyncio.get_running_loop().call_later(delay, engine.send, token(1))
            await anext(generation)
        with pytest.raises(ApiError) as caught:
            await anext(generation)
    assert caught.value.status == 504
    assert 0.2 <= time.monotonic() - began < 0.3


async def test_what_came_before_a_failure_is_not_lost() -> None:
    engine = HandEngine()
    async with a_generation(engine) as generation:
        engine.send(token(1))
        engine.send(RequestOutput("r", finish_reason="error", error="broken"))
        assert [output.text for _, output in await anext(generation)] == ["x"]
        with pytest.raises(ApiError, match="broken"):
            await anext(generation)


async def test_an_answer_in_one_piece_waits_for_its_end() -> None:
    engine = HandEngine()
    async with a_generation(engine, stream=False) as generation:
        waiting = asyncio.ensure_future(anext(generation))
        for count in (1, 2):
            engine.send(token(count))
            await asyncio.sleep(0.02)
            assert not waiting.done()
        engine.send(token(3, finish_reason="length"))
        assert len(await waiting) == 3


async def test_a_choice_may_end_while_its_submission_is_under_way() -> None:
    engine = HandEngine()
    engine.at_once = (token(1, finish_reason="stop"),)
    async with asyncio.timeout(5), a_generation(engine, grammar=True) as generation:
        assert [batch async for batch in generation] == [[(0, engine.at_once[0])]]

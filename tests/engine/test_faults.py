"""Injected faults: who is to blame fails alone, and the engine never lies about its health."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlxcel_ext.engine import Engine, EngineConfig, EngineDeadError
from mlxcel_ext.models.batch import AttentionBatch
from mlxcel_ext.ops import rope_append
from mlxcel_ext.sampling_params import SamplingParams
from tests.engine.client import SMALL, WAIT, Answer, Client, serving
from tests.support.fake_model import fake_loaded, generate

POISON = 96


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logit_bias={POISON: -100.0}
    )


def expected(prompt: list[int], count: int) -> list[int]:
    answer = generate(prompt, count)
    assert POISON not in answer, "choose another prompt for this test"
    return answer


def poisoned(tokens: mx.array, batch: AttentionBatch) -> None:
    """The model raises whenever the poisonous token is among the new ones."""
    if POISON in tokens.tolist():
        raise RuntimeError("poison")


def test_a_poisonous_request_fails_alone() -> None:
    with serving(fake_loaded(on_call=poisoned)) as client:
        good = [client.send([n, 2, 3], greedy(30)) for n in range(3, 6)]
        while not all(a.token_ids for a in good):
            time.sleep(0.001)
        bad = client.send([1, POISON, 2], greedy(5))
        assert bad.wait().finish_reason == "error"
        assert "poison" in (bad.wait().error or "")
        for n, answer in zip(range(3, 6), good, strict=True):
            assert answer.wait().finish_reason == "length"
            assert answer.token_ids == expected([n, 2, 3], 30)
        assert client.engine.health().state == "ok"


def test_poison_after_poison_does_not_shut_the_engine_down() -> None:
    with serving(fake_loaded(on_call=poisoned), max_step_failures=2) as client:
        for _ in range(6):
            assert client.ask([POISON], greedy(3)).wait().finish_reason == "error"
        assert client.ask([3, 2, 3], greedy(8)).token_ids == expected([3, 2, 3], 8)
        assert client.engine.stats().counters["mlxcel_step_failures_total"] == {"submit": 6}


class Breaking:
    """Raises once it is switched on."""

    def __init__(self) -> None:
        self.on = False

    def __call__(self, *_: Any) -> None:
        if self.on:
            raise RuntimeError("the device is gone")


def test_a_broken_device_shuts_the_engine_down_with_a_message() -> None:
    fault = Breaking()
    engine = Engine(fake_loaded(on_call=fault), EngineConfig(**{**SMALL, "max_step_failures": 3}))  # type: ignore[arg-type]
    engine.start()
    client = Client(engine)
    answers = [client.send([n], greedy(400)) for n in range(1, 9)]
    while not answers[0].token_ids:
        time.sleep(0.001)
    fault.on = True
    assert {a.wait().finish_reason for a in answers} == {"error"}
    engine._thread.join(10)
    health = engine.health()
    assert health.state == "dead"
    assert "the engine gives up" in health.detail
    assert "the device is gone" in health.detail
    with pytest.raises(EngineDeadError):
        client.send([1])
    with pytest.raises(EngineDeadError):
        engine.reset_prefix_cache()


def test_a_bug_on_the_way_to_the_model_is_no_request_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(fake_loaded(), EngineConfig(**{**SMALL, "max_step_failures": 3}))  # type: ignore[arg-type]
    engine.start()
    client = Client(engine)
    client.ask([3, 5], greedy(2))

    def bug(plan: object) -> None:
        raise AttributeError("no such attribute")

    monkeypatch.setattr(engine._loop.runner, "_batch", bug)
    for _ in range(3):
        assert client.ask([3, 5], greedy(2)).wait().finish_reason == "error"
    engine._thread.join(10)
    assert engine.health().state == "dead"
    assert "no such attribute" in engine.health().detail


def test_a_model_that_never_worked_is_dead_from_the_start() -> None:
    fault = Breaking()
    fault.on = True
    engine = Engine(fake_loaded(on_call=fault), EngineConfig(**SMALL))  # type: ignore[arg-type]
    answer = Client(engine).send([1])
    engine.start()
    assert answer.wait().finish_reason == "error"
    engine._thread.join(10)
    assert engine.health().state == "dead"


def test_the_death_of_the_thread_fails_all_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(fake_loaded(), EngineConfig(**{**SMALL, "max_num_seqs": 2}))  # type: ignore[arg-type]
    engine.start()
    client = Client(engine)
    answers = [client.send([n], greedy(500)) for n in range(1, 7)]
    while not answers[0].token_ids:
        time.sleep(0.001)

    def bug() -> None:
        raise AssertionError("a bug in the scheduler")

    monkeypatch.setattr(engine._loop.scheduler, "schedule", bug)
    started = time.monotonic()
    for answer in answers:
        assert answer.wait().finish_reason == "error"
        assert "a bug in the scheduler" in (answer.wait().error or "")
    assert time.monotonic() - started < 5
    engine._thread.join(10)
    assert engine.health().state == "dead"


def test_an_answer_that_was_complete_survives_the_death_of_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(fake_loaded(), EngineConfig(**SMALL))  # type: ignore[arg-type]
    loop, schedule = engine._loop, engine._loop.scheduler.schedule

    def die_with_a_last_output_on_its_way() -> Any:
        if any(output.finished for _, output in loop._outputs):
            raise AssertionError("a bug in the scheduler")
        return schedule()

    monkeypatch.setattr(loop.scheduler, "schedule", die_with_a_last_output_on_its_way)
    client = Client(engine)
    short, long = client.send([3, 5], greedy(5)), client.send([4, 5], greedy(500))
    engine.start()
    assert short.wait().finish_reason == "length"
    assert short.token_ids == expected([3, 5], 5)
    assert long.wait().finish_reason == "error"
    assert long.token_ids == expected([4, 5], len(long.token_ids))
    engine._thread.join(10)


def inject_once(target: Any, name: str, monkeypatch: pytest.MonkeyPatch, when: Callable[[], bool]) -> None:
    """Make a method raise the first time that a condition holds."""
    original, done = getattr(target, name), []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not done and when():
            done.append(True)
            raise RuntimeError(f"injected into {name}")
        return original(*args, **kwargs)

    monkeypatch.setattr(target, name, wrapper)


@pytest.mark.parametrize("method", ["read", "submit", "draw"])
def test_a_step_that_fails_once_costs_nobody_an_answer(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(fake_loaded()) as client:
        answers = [client.send([n, 5], greedy(25)) for n in range(3, 7)]
        runner = client.engine._loop.runner
        inject_once(runner, method, monkeypatch, lambda: len(client.engine._loop.scheduler.running) == 4)
        for n, answer in zip(range(3, 7), answers, strict=True):
            assert answer.wait().finish_reason == "length", answer.wait().error
            assert answer.token_ids == expected([n, 5], 25)
        assert sum(client.engine.stats().counters["mlxcel_step_failures_total"].values()) == 1


def test_a_row_whose_processing_raises_fails_alone() -> None:
    with serving(fake_loaded()) as client:
        good, bad = client.send([3, 5], greedy(25)), client.send([4, 5], greedy(900))
        while not bad.token_ids:
            time.sleep(0.001)
        job = client.engine._jobs[bad.request_id]  # type: ignore[attr-defined]

        def broken(*_: Any, **__: Any) -> str:
            raise UnicodeError("cannot decode")

        job.detokenizer.push = broken  # type: ignore[method-assign]
        assert bad.wait().finish_reason == "error"
        assert "cannot decode" in (bad.wait().error or "")
        assert good.wait().finish_reason == "length"
        assert good.token_ids == expected([3, 5], 25)


def test_a_callback_that_raises_ends_its_own_request_only() -> None:
    with serving(fake_loaded()) as client:
        seen: list[int] = []

        def callback(output: Any) -> None:
            seen.extend(output.token_ids)
            if len(seen) == 3:
                raise ConnectionError("the client is gone")

        client.engine.submit("loud", [4, 5], greedy(500), callback)
        good = client.ask([3, 5], greedy(25))
        assert good.token_ids == expected([3, 5], 25)
        while "loud" in client.engine._jobs:
            time.sleep(0.001)
        assert len(seen) == 3
        assert client.engine.stats().counters["mlxcel_request_failures_total"] == {"callback": 1}


def test_rows_with_nan_logits_fail_alone() -> None:
    loaded = fake_loaded()
    model = loaded.model

    class Nan:
        config, dtype = model.config, model.dtype
        attention_path, kv_layout = model.attention_path, model.kv_layout

        def __call__(self, tokens: mx.array, batch: AttentionBatch, kv: object) -> mx.array:
            logits = model(tokens, batch, kv)
            rows = tokens if batch.logit_rows is None else tokens[batch.logit_rows]
            return mx.where((rows == POISON)[:, None], mx.nan, logits)

    loaded.model = Nan()
    with serving(loaded) as client:
        good, bad = client.send([3, 5], greedy(25)), client.send([4, POISON], greedy(25))
        assert bad.wait().finish_reason == "error"
        assert "NaN" in (bad.wait().error or "")
        good.wait()
        assert good.token_ids == expected([3, 5], 25)


def test_pages_of_a_failed_step_are_never_adopted() -> None:
    """The failed prompt's pages hold rubbish: the same prompt later must not find them."""
    calls = Breaking()
    with serving(fake_loaded(on_call=calls)) as client:
        client.ask([1], greedy(2))
        calls.on = True
        prompt = list(range(3, 30))
        assert client.ask(prompt, greedy(2)).wait().finish_reason == "error"
        calls.on = False
        again = client.ask(prompt, greedy(9))
        assert again.token_ids == expected(prompt, 9)
        assert again.wait().num_cached_tokens == 0


def test_answers_end_exactly_once_when_a_cancel_races_the_end() -> None:
    with serving(fake_loaded()) as client:
        for i in range(40):
            answer = Answer()
            client.engine.submit(f"c{i}", [3, 5], greedy(3), answer)
            if i % 2:
                time.sleep(0.001)
            client.engine.cancel(f"c{i}")
            assert answer.wait().finish_reason in ("abort", "length")


def test_a_step_that_hangs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(fake_loaded(), stall_seconds=0.2) as client:
        go, read = threading.Event(), client.engine._loop.runner.read
        monkeypatch.setattr(client.engine._loop.runner, "read", lambda step: (go.wait(WAIT), read(step))[1])
        answer = client.send([3, 5], greedy(4))
        deadline = time.monotonic() + WAIT
        while client.engine.health().state != "dead" and time.monotonic() < deadline:
            time.sleep(0.02)
        assert client.engine.health().state == "dead"
        assert "has been running for" in client.engine.health().detail
        go.set()
        assert answer.wait().finish_reason == "length"
        assert client.engine.health().state == "ok"


def test_a_request_that_cannot_be_planned_fails_instead_of_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(fake_loaded()) as client:
        client.ask([3, 5], greedy(2))
        monkeypatch.setattr(client.engine._loop.scheduler, "_admit", lambda *_, **__: 0)
        assert "no step can be planned" in (client.ask([4], greedy(2)).wait().error or "")
        monkeypatch.undo()
        assert client.ask([3, 5], greedy(4)).token_ids == expected([3, 5], 4)


def test_an_error_in_the_middle_of_an_evaluation_is_survived() -> None:
    """The graph is built, and a kernel then refuses: the pool must not keep a handle on what failed."""
    loaded = fake_loaded()
    model, armed = loaded.model, [False]

    class Refused:
        config, dtype = model.config, model.dtype
        attention_path, kv_layout = model.attention_path, model.kv_layout

        def __call__(self, tokens: mx.array, batch: AttentionBatch, kv: Any) -> mx.array:
            logits = model(tokens, batch, kv)
            if armed and armed.pop():
                nothing = mx.zeros((1, 1, 8))
                spread = [mx.broadcast_to(pool[:1], pool.shape) for pool in (kv.k_pages[0], kv.v_pages[0])]
                _, kv.k_pages[0], kv.v_pages[0] = rope_append(
                    nothing, nothing, nothing, *spread, mx.array([0]), mx.array([0]), inv_freq=mx.zeros((0,))
                )
            return logits

    loaded.model = Refused()
    with serving(loaded) as client:
        answers = [client.send([n, 5], greedy(40)) for n in range(3, 6)]
        while not all(a.token_ids for a in answers):
            time.sleep(0.001)
        armed.append(True)
        for n, answer in zip(range(3, 6), answers, strict=True):
            assert answer.wait().finish_reason == "length", answer.wait().error
            assert answer.token_ids == expected([n, 5], 40)
        assert client.engine.stats().counters["mlxcel_step_failures_total"] == {"submit": 1}

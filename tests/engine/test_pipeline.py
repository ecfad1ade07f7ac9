"""The structure of the hot path: nothing waits for the device between two submissions."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext.engine import Engine
from mlxcel_ext.outputs import RequestOutput
from mlxcel_ext.sampling_params import SamplingParams
from tests.engine.client import serving
from tests.support.fake_model import fake_loaded, generate
from tests.support.waiting import wait_until

PARAMETERS = [
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, top_p=0.9, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=5, min_p=0.1, max_tokens=30, ignore_eos=True, logprobs=2),
    SamplingParams(
        temperature=0.0,
        max_tokens=30,
        ignore_eos=True,
        presence_penalty=1.0,
        repetition_penalty=1.1,
        min_tokens=4,
    ),
    SamplingParams(temperature=0.0, max_tokens=30, logit_bias={3: 1.0}, stop_token_ids=(9,)),
]

BLOCKING = [
    "item",
    "tolist",
    "__array__",
    "__int__",
    "__float__",
    "__bool__",
    "__index__",
    "__iter__",
    "__buffer__",
]


class _Watch:
    """Counts what would wait for the device while a step is being submitted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.submitting = False
        self.found: list[str] = []
        self.submissions = 0
        for name in ("eval", "synchronize"):
            self._patch(monkeypatch, mx, name)
        for name in BLOCKING:
            if hasattr(mx.array, name):
                self._patch(monkeypatch, mx.array, name)
        original = np.array

        def from_array(value: Any, *args: Any, **kwargs: Any) -> Any:
            if self.submitting and isinstance(value, mx.array):
                self.found.append("numpy.array")
            return original(value, *args, **kwargs)

        monkeypatch.setattr(np, "array", from_array)

    def _patch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.submitting:
                self.found.append(f"{owner.__name__}.{name}")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    def over(self, method: Any) -> Any:
        def submit(*args: Any) -> Any:
            self.submitting = True
            self.submissions += 1
            try:
                return method(*args)
            finally:
                self.submitting = False

        return submit


@pytest.mark.parametrize("params", PARAMETERS, ids=["greedy", "top_p", "logprobs", "penalties", "bias"])
def test_the_hot_path_never_synchronises(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(fake_loaded()) as client:
        client.ask([1, 2], params)  # the first use of anything may prepare it
        watch = _Watch(monkeypatch)
        runner = client.engine._loop.runner
        monkeypatch.setattr(runner, "submit", watch.over(runner.submit))
        monkeypatch.setattr(runner, "draw", watch.over(runner.draw))
        answers = [client.send([3, 4, n], params) for n in range(3)]
        for answer in answers:
            assert answer.wait().error is None
        monkeypatch.undo()
        assert watch.submissions > 5
        assert watch.found == []


def test_the_watch_sees_a_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test: a model that looks at its tokens is caught."""
    with serving(fake_loaded(on_call=lambda tokens, batch: tokens.tolist())) as client:
        watch = _Watch(monkeypatch)
        runner = client.engine._loop.runner
        monkeypatch.setattr(runner, "submit", watch.over(runner.submit))
        client.ask([1, 2], PARAMETERS[0])
        monkeypatch.undo()
        assert "array.tolist" in watch.found


def _note_steps(monkeypatch: pytest.MonkeyPatch, engine: Engine, order: list[str]) -> None:
    """Have the engine's runner add its submissions and reads to order."""
    runner = engine._loop.runner
    submit, read = runner.submit, runner.read
    monkeypatch.setattr(runner, "submit", lambda *a: (order.append("submit"), submit(*a))[1])
    monkeypatch.setattr(runner, "read", lambda *a: (order.append("read"), read(*a))[1])


def test_step_n_plus_1_is_submitted_before_step_n_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    with serving(fake_loaded()) as client:
        _note_steps(monkeypatch, client.engine, order)
        answer = client.ask([1, 2], PARAMETERS[0])
        assert answer.token_ids == generate([1, 2], 30)
        monkeypatch.undo()
    assert order == ["submit", *["submit", "read"] * 29, "read"]


def test_outputs_are_handed_over_while_the_next_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their readers want the interpreter's lock, which this thread needs until a step is submitted."""
    order: list[str] = []
    with serving(fake_loaded()) as client:
        _note_steps(monkeypatch, client.engine, order)
        ended = threading.Event()

        def on_output(output: RequestOutput) -> None:
            order.append("output")
            if output.finished:
                ended.set()

        client.engine.submit("r", [1, 2], replace(PARAMETERS[0], max_tokens=4), on_output)
        assert ended.wait(60)
        monkeypatch.undo()
    first = ["submit", "submit", "read"]
    assert order == [*first, *["submit", "output", "read"] * 2, "output", "read", "output"]


def test_a_stop_that_nobody_foresaw_discards_the_row_in_flight() -> None:
    target = generate([1, 2], 6)[-1]
    with serving(fake_loaded()) as client:
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=(target,))
        client.ask([1, 2], params)
        # The answer is out before the step in flight, and the row in it, comes back.
        discarded = {"finished": 1}
        wait_until(lambda: client.engine.stats().counters["mlxcel_rows_discarded_total"] == discarded)
        # A length is foreseen: nothing is computed for nothing.
        client.ask([1, 2], PARAMETERS[0])
        assert client.engine.stats().counters["mlxcel_rows_discarded_total"] == discarded

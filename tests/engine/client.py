"""Collects what an engine sends, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlxcel_ext.engine import Engine, EngineConfig
from mlxcel_ext.outputs import RequestOutput
from mlxcel_ext.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SMALL = {
    "num_pages": 160,
    "page_size": 4,
    "prefill_chunk_size": 16,
    "max_num_seqs": 6,
    "max_queue_depth": 1000,
}
WAIT = 60.0


class Answer:
    """The stream of one request."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self._done = threading.Event()

    def __call__(self, output: RequestOutput) -> None:
        assert not self._done.is_set(), "an output after the last one"
        self.outputs.append(output)
        if output.finished:
            self._done.set()

    def wait(self) -> RequestOutput:
        assert self._done.wait(WAIT), "the request does not end"
        return self.outputs[-1]

    @property
    def token_ids(self) -> list[int]:
        return [t for o in self.outputs for t in o.token_ids]

    @property
    def text(self) -> str:
        return "".join(o.text for o in self.outputs)


class Client:
    """Submits to an engine under fresh ids."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._count = 0

    def send(self, prompt: Sequence[int], params: SamplingParams = GREEDY, **kwargs: Any) -> Answer:
        answer = Answer()
        answer.request_id = f"r{self._count}"  # type: ignore[attr-defined]
        self._count += 1
        self.engine.submit(answer.request_id, list(prompt), params, answer, **kwargs)  # type: ignore[attr-defined]
        return answer

    def ask(self, prompt: Sequence[int], params: SamplingParams = GREEDY, **kwargs: Any) -> Answer:
        answer = self.send(prompt, params, **kwargs)
        answer.wait()
        return answer


@contextmanager
def serving(loaded: Any, **config: Any) -> Iterator[Client]:
    """A client of a running engine, which must be sound at the end."""
    engine = Engine(loaded, EngineConfig(**{**SMALL, **config}))
    engine.start()
    try:
        yield Client(engine)
        engine.shutdown(timeout=WAIT)
        engine._loop.scheduler.check()
        assert engine.stats().pages_in_use == 0
    finally:
        engine.shutdown(drain=False)

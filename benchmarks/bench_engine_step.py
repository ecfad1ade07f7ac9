"""Host cost of one engine step, without the model's arithmetic: planning, tables, sampling set-up, text, callbacks.

    PYTHONPATH=python python benchmarks/bench_engine_step.py [--rows 32] [--context 1024] [--steps 400]
    PYTHONPATH=python:. python -m pytest benchmarks/bench_engine_step.py

The model hands out constant logits, so everything that is measured is the engine's own. Prints the median, p10
and p90 of a decode step and of its parts, in CPU time of the engine's thread (--wall: elapsed time, for an idle
machine). Asserts that every step decoded all rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlxcel_ext.engine_config import EngineConfig
from mlxcel_ext.engine_loop import EngineLoop
from mlxcel_ext.job import Job
from mlxcel_ext.outputs import RequestOutput
from mlxcel_ext.sampling_params import SamplingParams
from mlxcel_ext.scheduler.request import Request
from mlxcel_ext.text import Detokenizer

VOCAB = 512
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=1, stop=("\n\n",))
# Uneven: in every step two of 32 rows begin a page, so that no step shares its table with the one before.
CASES = {
    "greedy": (GREEDY, False),
    "sampled": (SAMPLED, False),
    "greedy, uneven": (GREEDY, True),
    "sampled, uneven": (SAMPLED, True),
}
clock: Callable[[], float] = time.thread_time


class ConstantModel:
    """No arithmetic at all."""

    dtype = mx.float32
    attention_path = "fused_v2"
    kv_layout = "NHD"

    def __init__(self) -> None:
        self.config = SimpleNamespace(
            num_layers=1,
            num_qo_heads=8,
            num_kv_heads=2,
            head_dim=64,
            vocab_size=VOCAB,
            max_position_embeddings=1 << 20,
            windows=(),
        )
        self._logits: dict[int, mx.array] = {}

    def _rows(self, count: int) -> mx.array:
        if count not in self._logits:
            self._logits[count] = mx.random.normal((count, VOCAB))
            mx.eval(self._logits[count])
        return self._logits[count]

    def __call__(self, tokens: mx.array, batch: Any, kv: Any) -> mx.array:
        batch.table.slots_on_device(batch.qo_indptr, kv.num_pages)
        batch.table.on_device(batch.qo_indptr)
        batch.plan.on_device()
        return self._rows(tokens.shape[0] if batch.logit_rows is None else batch.logit_rows.shape[0])


class Letters:
    """A detokenizer's stream."""

    def step(self, token_id: int) -> str:
        return chr(97 + token_id % 26)

    def flush(self) -> str:
        return ""


def timed(owner: Any, name: str, spent: dict[str, float]) -> None:
    method: Callable[..., Any] = getattr(owner, name)

    def wrapper(*args: Any) -> Any:
        started = clock()
        try:
            return method(*args)
        finally:
            spent[name] = spent.get(name, 0.0) + clock() - started

    setattr(owner, name, wrapper)


def decoding_loop(
    rows: int, context: int, steps: int, params: SamplingParams, *, uneven: bool
) -> tuple[EngineLoop, list[RequestOutput]]:
    """An engine's loop whose rows all decode, and where their outputs go."""
    config = EngineConfig(
        num_pages=rows * (context + steps + 64) // 16 + rows,
        max_num_seqs=rows,
        prefill_chunk_size=rows * context,
        enable_prefix_caching=True,
    )
    loop = EngineLoop(ConstantModel(), config)
    received: list[RequestOutput] = []
    for i in range(rows):
        length = context - i if uneven else context
        request = Request(str(i), [1 + (i + j) % 500 for j in range(length)], length + steps + 32, i)
        request.job = Job(
            request, params, received.append, Detokenizer(Letters(), params.stop), i, frozenset()
        )
        loop.add(request.job)
    loop.turn()
    for _ in range(16):
        loop.turn()
    received.clear()
    return loop, received


def run(
    rows: int, context: int, steps: int, params: SamplingParams, *, uneven: bool = False, parts: bool = False
) -> tuple[list[float], dict[str, float]]:
    loop, received = decoding_loop(rows, context, steps, params, uneven=uneven)
    spent: dict[str, float] = {}
    if parts:
        timed(loop.scheduler, "schedule", spent)
        timed(loop.runner, "submit", spent)
        timed(loop.runner, "read", spent)
        timed(loop, "_take", spent)
    times = []
    for _ in range(steps):
        started = clock()
        loop.turn()
        times.append(clock() - started)
    assert sum(len(o.token_ids) for o in received) == rows * steps, "a step did not decode all rows"
    return times, {name: total / steps for name, total in spent.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.benchmark(timer=time.thread_time)
def test_step(benchmark: Any, case: str) -> None:
    rows, steps = 32, 300
    params, uneven = CASES[case]
    loop, received = decoding_loop(rows, 1024, steps, params, uneven=uneven)
    benchmark.pedantic(loop.turn, rounds=steps)
    assert sum(len(o.token_ids) for o in received) == rows * steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--wall", action="store_true")
    options = parser.parse_args()
    if options.wall:
        global clock
        clock = time.perf_counter
    started = clock()
    for _ in range(200_000):
        pass
    print(
        f"yardstick: 200,000 turns of an empty Python loop take {1e3 * (clock() - started):.1f} ms here and now"
    )
    for name, (params, uneven) in CASES.items():
        size = options.rows, options.context, options.steps
        times, _ = run(*size, params, uneven=uneven)
        _, parts = run(*size, params, uneven=uneven, parts=True)
        deciles = statistics.quantiles(times, n=10)
        print(
            f"{name}: {options.rows} rows at {options.context} tokens: median {1e3 * statistics.median(times):.3f} ms "
            f"(p10 {1e3 * deciles[0]:.3f}, p90 {1e3 * deciles[-1]:.3f}); mean parts: "
            + ", ".join(f"{part} {1e3 * seconds:.3f}" for part, seconds in parts.items())
        )


if __name__ == "__main__":
    main()

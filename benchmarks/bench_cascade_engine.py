"""Decode throughput of the engine for clients behind one system prompt: MLXCEL_CASCADE_ATTENTION on against off.

    PYTHONPATH=python:. python benchmarks/bench_cascade_engine.py [--model llama|smollm2] [--json out.json]
        [--clients 8 16 32 64] [--prompts 2048 8192 32768] [--tail 256]

Weights are random and made on the device; prompts are not computed, so that only decoding is measured. Both arms are the
same engine, whose planner is exchanged between runs of steps. A ratio is printed only where the counters prove
the paths: every launch of the one arm says "cascade" and none of the other's does (where the cost model shares
nothing, it says so).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import time
from typing import Any

import mlx.core as mx
import numpy as np
from benchmarks.bench_step_cuda import LLAMA_3_8B, PAGE, Letters, RandomWeights, WithoutPrefill, fill

from mlxcel_ext.attention_planner import AttentionPlanner
from mlxcel_ext.engine_config import EngineConfig
from mlxcel_ext.engine_loop import EngineLoop
from mlxcel_ext.job import Job
from mlxcel_ext.models.llama import Model
from mlxcel_ext.outputs import RequestOutput
from mlxcel_ext.sampling_params import SamplingParams
from mlxcel_ext.scheduler.request import Request
from mlxcel_ext.text import Detokenizer

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SMOLLM2 = dataclasses.replace(
    LLAMA_3_8B,
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_qo_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    rotary_dim=64,
    tie_word_embeddings=True,
    windows=(-1,) * 30,
)
MODELS = {"llama": LLAMA_3_8B, "smollm2": SMOLLM2}


class Clients:
    """Requests that begin with the same prompt and all decode."""

    def __init__(self, model: Model, clients: int, prompt: int, tail: int, room: int) -> None:
        config = EngineConfig(
            page_size=PAGE,
            num_pages=prompt // PAGE + clients * (-(-(tail + room) // PAGE) + 2),
            max_num_seqs=clients,
            prefill_chunk_size=prompt + clients * tail,
            max_num_batched_tokens=prompt + clients * (tail + 1),
            watermark=0.0,
        )
        self.loop = EngineLoop(WithoutPrefill(model), config)
        fill(self.loop.runner._kv)
        self.clients = clients
        self._received: list[RequestOutput] = []
        rng = np.random.default_rng(0)
        system = rng.integers(0, model.config.vocab_size, prompt).tolist()
        for i in range(clients):
            tokens = system + rng.integers(0, model.config.vocab_size, tail).tolist()
            request = Request(str(i), tokens, prompt + tail + room - 1, i)
            request.job = Job(
                request, GREEDY, self._received.append, Detokenizer(Letters(), ()), i, frozenset()
            )
            self.loop.add(request.job)
        self._planners = {arm: self._planner(arm) for arm in ("off", "on")}
        self.ms: dict[str, list[float]] = {arm: [] for arm in self._planners}
        self.paths: dict[str, dict[str, int]] = {arm: {} for arm in self._planners}
        while self.loop.scheduler.waiting or any(r.prefilling for r in self.loop.scheduler.running):
            self.loop.turn()
        for _ in range(8):
            self.loop.turn()

    def _planner(self, switch: str) -> AttentionPlanner:
        os.environ["MLXCEL_CASCADE_ATTENTION"] = switch
        runner = self.loop.runner
        return AttentionPlanner(
            runner._model.config,
            runner._model.attention_path,
            batch_invariant=mx.default_device() == mx.cpu,
        )

    def run(self, arm: str, steps: int) -> None:
        """Steps in a row with the arm's planner; the first are not counted."""
        self.loop.runner._planner = self._planners[arm]
        for _ in range(3):
            self.loop.turn()
        mx.synchronize()
        self._received.clear()
        before = self._counted()
        began = time.perf_counter()
        for _ in range(steps):
            self.loop.turn()
        mx.synchronize()
        self.ms[arm].append((time.perf_counter() - began) / steps * 1e3)
        assert sum(len(o.token_ids) for o in self._received) == self.clients * steps
        for path, count in self._counted().items():
            if moved := count - before.get(path, 0):
                self.paths[arm][path] = self.paths[arm].get(path, 0) + moved

    def _counted(self) -> dict[str, int]:
        return self.loop.outcomes.snapshot()["mlxcel_paged_decode_launches_total"]


def measure(model: Model, clients: int, prompt: int, tail: int, steps: int, rounds: int) -> dict[str, Any]:
    gc.collect()
    mx.clear_cache()
    engine = Clients(model, clients, prompt, tail, rounds * 2 * (steps + 3) + 40)
    for turn in range(rounds):
        for arm in ("off", "on") if turn % 2 == 0 else ("on", "off"):
            engine.run(arm, steps)
    off, on = engine.paths["off"], engine.paths["on"]
    assert set(off) == {"fused_v2"}, f"the flat arm took {off}"
    assert len(on) == 1, f"the arm with cascade took several paths: {on}"
    ms = {arm: statistics.median(found) for arm, found in engine.ms.items()}
    return {
        "clients": clients,
        "prompt": prompt,
        "tail": tail,
        "path": next(iter(on)),
        "off_ms": ms["off"],
        "on_ms": ms["on"],
        "off_all_ms": engine.ms["off"],
        "on_all_ms": engine.ms["on"],
        "tokens_per_second": {arm: clients / value * 1e3 for arm, value in ms.items()},
        "outcomes": {
            name: counts
            for name, counts in engine.loop.outcomes.snapshot().items()
            if name.startswith("mlxcel_cascade")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="llama")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--tail", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json")
    args = parser.parse_args()
    room = args.rounds * 2 * (args.steps + 3) + 64
    longest = max(args.prompts) + args.tail + room
    config = dataclasses.replace(MODELS[args.model], max_position_embeddings=longest)
    model = Model(config, RandomWeights(0), mx.bfloat16, lambda done, of: None)
    results = []
    print("clients prompt |  off ms   on ms   gain | tokens/s off     on | path")
    for prompt in args.prompts:
        for clients in args.clients:
            r = measure(model, clients, prompt, args.tail, args.steps, args.rounds)
            results.append(r)
            rate = r["tokens_per_second"]
            print(
                f"{clients:7d} {prompt:6d} | {r['off_ms']:7.2f} {r['on_ms']:7.2f} {r['off_ms'] / r['on_ms']:6.3f} | "
                f"{rate['off']:12.0f} {rate['on']:6.0f} | {r['path']}",
                flush=True,
            )
            if args.json:
                with open(args.json, "w", encoding="utf-8") as file:
                    json.dump(results, file)


if __name__ == "__main__":
    main()

"""Whole decode steps of a Llama-3-8B-shaped model on a CUDA GPU, against their floor and against mlx-lm.

    PYTHONPATH=python python benchmarks/bench_step_cuda.py --out step.json [--bits 4] [--batch 1 8 32 64] [--context 1024 4096] [--mlx-lm]

Weights are random and made on the device, and so is what the pages hold: prompts are not computed. Times are wall
clock over steps in a row, in ms: the engine's (greedy, sampled with top-k 50 and top-p 0.9 on every row, and with the
draw left out), the engine's submission of a step while the device is busy for 40 ms (which shows that it waits for
nothing), the forward pass alone, what the host needs to submit it, and mlx-lm's forward pass on a
plain KVCache with argmax. The floor is (weight bytes + KV bytes) / --bandwidth. Takes about 16 GB of device memory and
the pages.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_ext.engine_config import EngineConfig
from mlxcel_ext.engine_loop import EngineLoop
from mlxcel_ext.job import Job
from mlxcel_ext.kvcache.pool import KVPool
from mlxcel_ext.models.batch import AttentionBatch
from mlxcel_ext.models.config import ModelConfig
from mlxcel_ext.models.llama import Model
from mlxcel_ext.models.weights import Weight
from mlxcel_ext.ops import PageTable, plan_attention
from mlxcel_ext.sampler import Sampled
from mlxcel_ext.sampling_params import SamplingParams
from mlxcel_ext.scheduler.request import Request
from mlxcel_ext.text import Detokenizer

LLAMA_3_8B = ModelConfig(
    model_type="llama",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_qo_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rotary_dim=128,
    tie_word_embeddings=False,
    windows=(-1,) * 32,
)
PAGE = 16
GROUP = 64


class RandomWeights:
    """Stands in for a checkpoint."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self.nbytes = 0

    def take(self, name: str, *shape: int) -> Weight:
        dense = (mx.random.normal(shape) * 0.02).astype(mx.bfloat16)
        if self._bits and name != "model.embed_tokens.weight":
            weight = Weight(*mx.quantize(dense, GROUP, self._bits), GROUP, self._bits)
        else:
            weight = Weight(dense)
        arrays = [a for a in (weight.weight, weight.scales, weight.biases) if a is not None]
        mx.eval(arrays)
        if name != "model.embed_tokens.weight":  # a step reads a few of its rows
            self.nbytes += sum(a.nbytes for a in arrays)
        return weight

    def vector(self, name: str, size: int, dtype: mx.Dtype) -> mx.array:
        return mx.ones(size, dtype)

    def rope_divisors(self, size: int) -> None:
        return None


class WithoutPrefill:
    """The model, but that a step with a prompt in it computes nothing."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.config, self.dtype = model.config, model.dtype
        self.attention_path, self.kv_layout = model.attention_path, model.kv_layout

    def __call__(self, tokens: mx.array, batch: AttentionBatch, kv: Any) -> mx.array:
        if batch.qo_indptr is None:
            return self._model(tokens, batch, kv)
        rows = tokens.shape[0] if batch.logit_rows is None else batch.logit_rows.shape[0]
        return mx.random.normal((rows, self.config.vocab_size)).astype(self.dtype)


class NoDraw:
    """The sampler, but that it draws nothing: logits are computed and looked at, no more."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: mx.array, *rows: Any) -> Sampled:
        ids = (logits[:, 0] * 0).astype(mx.int32)
        return Sampled(ids, ids == ids)


class Letters:
    """A detokenizer's stream."""

    def step(self, token_id: int) -> str:
        return "a"

    def flush(self) -> str:
        return ""


def fill(kv: KVPool) -> None:
    """Random keys and values in every page."""
    shape = kv.k_pages[0].shape
    for pages in (kv.k_pages, kv.v_pages):
        for i in range(len(pages)):
            pages[i] = mx.random.normal(shape, dtype=mx.bfloat16)
            mx.eval(pages[i])


def median_ms(step: Callable[[], object], steps: int, warm: int = 10, parts: int = 4) -> float:
    """Of `parts` runs of steps in a row."""
    for _ in range(warm):
        step()
    times = []
    for _ in range(parts):
        mx.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        mx.synchronize()
        times.append((time.perf_counter() - started) / steps * 1e3)
    return statistics.median(times)


def submit_behind(loop: EngineLoop, turns: int = 7) -> float:
    """Median ms that submitting a step takes while the device is busy for longer: the host waits for nothing."""
    matrix = mx.random.normal((24576, 24576), dtype=mx.bfloat16)
    mx.eval(matrix)
    times = []
    submit = loop.runner.submit

    def timed(*args: Any) -> Any:
        mx.async_eval(matrix @ matrix)
        started = time.perf_counter()
        step = submit(*args)
        times.append(time.perf_counter() - started)
        return step

    loop.runner.submit = timed
    for _ in range(turns):
        loop.turn()
    loop.runner.submit = submit
    return round(statistics.median(times) * 1e3, 3)


class Decoding:
    """An engine whose requests all decode."""

    def __init__(
        self, model: Model, batch: int, context: int, room: int, params: SamplingParams, *, draw: bool
    ) -> None:
        config = EngineConfig(
            page_size=PAGE,
            num_pages=batch * (-(-(context + room) // PAGE) + 1),
            max_num_seqs=batch,
            prefill_chunk_size=batch * context,
            max_num_batched_tokens=batch * (context + 1),
            enable_prefix_caching=False,
        )
        self.loop = EngineLoop(WithoutPrefill(model), config)
        fill(self.loop.runner._kv)
        if not draw:
            self.loop.runner._sampler = NoDraw(self.loop.runner._sampler)
        self.batch = batch
        self.received: list[Any] = []
        self.times: list[float] = []
        self.cpu: list[float] = []
        rng = np.random.default_rng(0)
        for i in range(batch):
            prompt = rng.integers(0, model.config.vocab_size, context).tolist()
            request = Request(str(i), prompt, context + room - 1, i)
            request.job = Job(
                request, params, self.received.append, Detokenizer(Letters(), ()), i, frozenset()
            )
            self.loop.add(request.job)
        for _ in range(8):
            self.loop.turn()

    def run(self, steps: int) -> None:
        self.received.clear()
        mx.synchronize()
        started, cpu = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            self.loop.turn()
        mx.synchronize()
        self.times.append((time.perf_counter() - started) / steps * 1e3)
        self.cpu.append((time.thread_time() - cpu) / steps * 1e3)
        assert sum(len(o.token_ids) for o in self.received) == self.batch * steps, (
            "a step did not decode all rows"
        )


def engines(model: Model, batch: int, context: int, steps: int, rounds: int) -> dict:
    """Steps of three engines in turn, so that what changes with time changes for all."""
    gc.collect()
    mx.clear_cache()
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    sampled = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=1, ignore_eos=True)
    room = steps * rounds + 40
    arms = {
        "no_draw": Decoding(model, batch, context, room, greedy, draw=False),
        "greedy": Decoding(model, batch, context, room, greedy, draw=True),
        "top_k_top_p": Decoding(model, batch, context, room, sampled, draw=True),
    }
    for _ in range(rounds):
        for arm in arms.values():
            arm.run(steps)
    out: dict[str, Any] = {
        name: {
            "ms": round(statistics.median(arm.times), 3),
            "min_ms": round(min(arm.times), 3),
            "thread_cpu_ms": round(statistics.median(arm.cpu), 3),
        }
        for name, arm in arms.items()
    }
    out["submit_behind_ms"] = submit_behind(arms["top_k_top_p"].loop)
    return out


def forward(model: Model, batch: int, context: int, steps: int) -> dict:
    """The forward pass at one length, without an engine."""
    gc.collect()
    mx.clear_cache()
    config = model.config
    each = -(-context // PAGE)
    kv = KVPool(config.num_layers, batch * each, PAGE, config.num_kv_heads, config.head_dim, mx.bfloat16)
    fill(kv)
    order = np.random.default_rng(0).permutation(batch * each).reshape(batch, each)
    table = PageTable.from_pages(order.tolist(), [context] * batch, PAGE)
    plan = plan_attention(
        table, None, num_qo_heads=config.num_qo_heads, num_kv_heads=config.num_kv_heads, batch_invariant=False
    )
    inputs = AttentionBatch(mx.array(np.full(batch, context - 1, np.int32)), table, None, plan)
    ids = mx.zeros((batch,), mx.int32)

    def step() -> None:
        nonlocal ids
        before = ids
        ids = mx.argmax(model(ids, inputs, kv), axis=-1).astype(mx.int32)
        mx.async_eval(ids, *kv.arrays)
        mx.eval(before)  # one step ahead, as the engine is

    wall = median_ms(step, steps)
    submits = []
    for _ in range(9):
        mx.synchronize()
        started = time.perf_counter()
        logits = model(ids, inputs, kv)
        built = time.perf_counter()
        mx.async_eval(logits, *kv.arrays)
        submits.append((built - started, time.perf_counter() - built))
    build, submit = (statistics.median(part) * 1e3 for part in zip(*submits, strict=True))
    return {"ms": round(wall, 3), "build_ms": round(build, 3), "submit_ms": round(submit, 3)}


def mlx_lm_forward(batch: int, context: int, steps: int, bits: int, made: dict[int, Any]) -> dict:
    import mlx.nn as nn
    from mlx_lm.models import llama
    from mlx_lm.models.cache import KVCache

    c = LLAMA_3_8B
    if bits not in made:
        made.clear()
        peer = llama.Model(
            llama.ModelArgs(
                model_type="llama",
                hidden_size=c.hidden_size,
                num_hidden_layers=c.num_layers,
                intermediate_size=c.intermediate_size,
                num_attention_heads=c.num_qo_heads,
                num_key_value_heads=c.num_kv_heads,
                rms_norm_eps=c.rms_norm_eps,
                vocab_size=c.vocab_size,
                rope_theta=c.rope_theta,
                tie_word_embeddings=False,
            )
        )
        peer.set_dtype(mx.bfloat16)
        if bits:
            nn.quantize(peer, GROUP, bits)
        mx.eval(peer.parameters())
        made[bits] = peer
    peer = made[bits]
    caches = []
    for _ in range(c.num_layers):
        cache = KVCache()
        shape = (batch, c.num_kv_heads, context, c.head_dim)
        cache.state = (
            mx.random.normal(shape, dtype=mx.bfloat16),
            mx.random.normal(shape, dtype=mx.bfloat16),
            context,
        )
        mx.eval(cache.keys, cache.values)
        caches.append(cache)
    ids = mx.zeros((batch, 1), mx.int32)

    def step() -> None:
        nonlocal ids
        before = ids
        ids = mx.argmax(peer(ids, cache=caches), axis=-1)
        mx.async_eval(ids)
        mx.eval(before)

    return {"ms": round(median_ms(step, steps), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--bits", type=int, default=0)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--layers", type=int, default=LLAMA_3_8B.num_layers)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bandwidth", type=float, default=4.2e12, help="of the device's memory, bytes/s")
    parser.add_argument("--mlx-lm", action="store_true")
    options = parser.parse_args()

    config = dataclasses.replace(LLAMA_3_8B, num_layers=options.layers, windows=(-1,) * options.layers)
    weights = RandomWeights(options.bits)
    model = Model(config, weights, mx.bfloat16, lambda done, total: None)
    results = []
    for context in options.context:
        for batch in options.batch:
            kv_bytes = 2 * config.num_layers * batch * context * config.num_kv_heads * config.head_dim * 2
            row: dict[str, Any] = {
                "batch": batch,
                "context": context,
                "bits": options.bits or 16,
                "floor_ms": round((weights.nbytes + kv_bytes) / options.bandwidth * 1e3, 3),
                "forward": forward(model, batch, context, options.steps),
                **engines(model, batch, context, options.steps, options.rounds),
            }
            mx.clear_cache()
            results.append(row)
            print(json.dumps(row), flush=True)
            with open(options.out, "w") as file:
                json.dump(results, file, indent=1)
    if options.mlx_lm:
        del model
        mx.clear_cache()
        made: dict[int, Any] = {}
        for row in results:
            row["mlx_lm"] = mlx_lm_forward(row["batch"], row["context"], options.steps, options.bits, made)
            print(row["batch"], row["context"], "mlx-lm", row["mlx_lm"]["ms"], flush=True)
            with open(options.out, "w") as file:
                json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()

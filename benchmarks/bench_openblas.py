"""Dense f32 layers with many rows: our kernel against numpy's OpenBLAS, one thread each; and a whole prompt against
OpenBLAS's products of the same layers.

OPENBLAS_NUM_THREADS=1 PYTHONPATH=python:. python -m pytest benchmarks/bench_openblas.py -s -k dense
OPENBLAS_NUM_THREADS=2 PYTHONPATH=python:. python -m pytest benchmarks/bench_openblas.py -s -k prompt
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from benchmarks.harness import check_equal, interleaved
from tests.support import tiny_model
from tests.support.device import default_device
from tests.support.generate import PagedRunner

from mlxcel_ext import PackedWeight, num_threads, set_num_threads
from mlxcel_ext.models import load

#: (n, k) of SmolLM2-135M and Llama-3.2-1B: merged qkv, gate and up, down.
SHAPES = [(960, 576), (3072, 576), (576, 1536), (3072, 2048), (16384, 2048), (2048, 8192)]


@pytest.fixture(autouse=True)
def as_many_threads() -> Iterator[None]:
    """Ours on the CPU, as many as OpenBLAS has."""
    before = num_threads()
    set_num_threads(int(os.environ["OPENBLAS_NUM_THREADS"]))
    with default_device(mx.cpu):
        yield
    set_num_threads(before)


@pytest.mark.parametrize("rows", [512, 2048])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_dense(benchmark, n, k, rows):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((rows, k), (n, k)))
    packed, x_mlx = PackedWeight(mx.array(w)), mx.array(x)
    mx.eval(packed.arrays, x_mlx)

    def ours() -> mx.array:
        return packed(x_mlx)

    check_equal(ours(), x @ w.T, 1e-3)
    arms = {"ours": ours, "ours again": ours, "openblas": lambda: x @ w.T}
    times = interleaved(arms, rounds=3 if n * k * rows > 1 << 31 else 7, warmup=1)
    ratio = times["openblas"].median / times["ours"].median
    print(f"\n{rows} x {k} x {n}: ours {times['ours']}, again {times['ours again']}")
    print(f"  openblas {times['openblas']}, openblas / ours {ratio:.2f}")
    benchmark.extra_info["openblas_over_ours"] = ratio
    benchmark.pedantic(lambda: mx.eval(ours()), rounds=1)


def test_prompt(benchmark, tmp_path):
    """512 tokens through 30 dense layers of SmolLM2's shape, attention and all, beside OpenBLAS's products alone."""
    rows, layers, hidden, inner, rounds, warmup = 512, 30, 576, 1536, 10, 2
    config = tiny_model.CONFIGS["llama"] | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": rows,
    }
    tiny_model.save(tmp_path, config, tiny_model.reference(config))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, tiny_model.VOCAB, rows).tolist()
    shapes = [(960, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)] * layers
    weights = [rng.standard_normal(shape, np.float32) for shape in shapes]
    inputs = {k: rng.standard_normal((rows, k), np.float32) for k in (hidden, inner)}
    model = load(str(tmp_path), dtype="float32", progress=False).model
    runner = PagedRunner(model, num_pages=(warmup + rounds + 1) * rows // 16, kv_dtype=mx.float32)
    names = map(str, itertools.count())

    def ours() -> mx.array:
        return runner.step({next(names): tokens})

    def openblas() -> None:
        for weight in weights:
            inputs[weight.shape[1]] @ weight.T

    times = interleaved({"ours": ours, "openblas": openblas}, rounds=rounds, warmup=warmup, pause=0.1)
    ratio = times["openblas"].median / times["ours"].median
    print(f"\nours {times['ours']}, openblas {times['openblas']}, openblas / ours {ratio:.2f}")
    benchmark.extra_info["openblas_over_whole_prompt"] = ratio
    benchmark.pedantic(lambda: mx.eval(ours()), rounds=1)

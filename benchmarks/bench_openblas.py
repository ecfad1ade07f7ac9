"""Dense f32 layers with many rows: our kernel against numpy's OpenBLAS, one thread each.

OPENBLAS_NUM_THREADS=1 PYTHONPATH=python:. python -m pytest benchmarks/bench_openblas.py -s
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from benchmarks.harness import check_equal, interleaved

from mlxcel_ext import PackedWeight, num_threads, set_num_threads

#: (n, k) of SmolLM2-135M and Llama-3.2-1B: merged qkv, gate and up, down.
SHAPES = [(960, 576), (3072, 576), (576, 1536), (3072, 2048), (16384, 2048), (2048, 8192)]


@pytest.fixture
def one_thread():
    before = num_threads()
    set_num_threads(1)
    yield
    set_num_threads(before)


@pytest.mark.parametrize("rows", [512, 2048])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_dense(benchmark, one_thread, n, k, rows):
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

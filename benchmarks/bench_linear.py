"""pytest-benchmark of the linear layers on CPU: pytest benchmarks/bench_linear.py --benchmark-only

extra_info has the bytes of the weight a second (few rows) and the multiply-adds a second (many rows).
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import PackedWeight
from mlxcel_ext.ops import reference_linear as reference

SHAPES = [(960, 576), (3072, 576), (576, 1536)]  # SmolLM2-135M: qkv, gate and up, down
COLD_BYTES = 64 << 20  # copies of the weight that are cycled through, as a model's layers are


@pytest.mark.parametrize("rows", [1, 4, 8, 32, 512])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("form", ["q4", "q8", "bfloat16", "float32"])
def test_linear(benchmark, form, n, k, rows):
    rng = np.random.default_rng(0)
    dense = mx.array(rng.standard_normal((n, k)), mx.float32)
    x = mx.array(rng.standard_normal((rows, k)), mx.float32)
    if form[0] == "q":
        w, scales, biases = mx.quantize(dense, 32, int(form[1]))
        args = (w, scales.astype(mx.float16), biases.astype(mx.float16), 32, int(form[1]))
    else:
        args = (dense.astype(getattr(mx, form)),)
    first = PackedWeight(*args)
    copies = [first] + [PackedWeight(*args) for _ in range(COLD_BYTES // first.nbytes)]
    mx.eval([c.arrays for c in copies], x)
    want = reference.linear(np.array(x), np.array(dense))
    error = np.abs(np.array(first(x)) - want).max() / np.sqrt(k)
    assert error < {"q4": 0.5, "q8": 0.05, "bfloat16": 0.02, "float32": 1e-4}[form]

    turn = iter(range(1 << 40))
    benchmark.pedantic(
        lambda: mx.eval(copies[next(turn) % len(copies)](x)), rounds=30 if rows < 512 else 5, warmup_rounds=1
    )
    seconds = benchmark.stats.stats.median
    benchmark.extra_info["weight_gbytes_per_s"] = first.nbytes / seconds / 1e9
    benchmark.extra_info["gflops"] = 2 * rows * n * k / seconds / 1e9

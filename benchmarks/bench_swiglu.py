"""swiglu against MLX's sigmoid and products.

PYTHONPATH=python:. python -m pytest benchmarks/bench_swiglu.py -s
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from benchmarks.harness import check_equal, interleaved

from mlxcel_ext import swiglu
from mlxcel_ext.ops import reference_linear as reference


@pytest.mark.parametrize(("rows", "features"), [(1, 1536), (4, 8192), (512, 1536)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["f32", "bf16"])
def test_swiglu(benchmark, rows, features, dtype):
    merged = mx.random.normal((rows, 2 * features)).astype(dtype)
    mx.eval(merged)

    def ours() -> mx.array:
        return swiglu(merged, stream=mx.cpu)

    def separate() -> mx.array:
        gate, up = mx.split(merged, 2, axis=-1, stream=mx.cpu)
        sigmoid = mx.sigmoid(gate, stream=mx.cpu)
        return mx.multiply(mx.multiply(gate, sigmoid, stream=mx.cpu), up, stream=mx.cpu)

    want = reference.swiglu(*np.split(np.asarray(merged.astype(mx.float32)), 2, axis=-1))
    check_equal(ours(), want, 1e-5 if dtype == mx.float32 else 0.07)
    times = interleaved({"ours": ours, "ours again": ours, "mlx": separate}, rounds=21)
    ratio = times["mlx"].median / times["ours"].median
    print(f"\nswiglu {rows} x {features} {dtype}: ours {times['ours']}, again {times['ours again']}")
    print(f"  mlx {times['mlx']}, mlx / ours {ratio:.1f}")
    benchmark.extra_info["mlx_over_ours"] = ratio
    benchmark.pedantic(lambda: mx.eval(ours()), rounds=10, warmup_rounds=2)

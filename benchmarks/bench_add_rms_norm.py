"""add_rms_norm against MLX's addition and norm.

PYTHONPATH=. python -m pytest benchmarks/bench_add_rms_norm.py -s
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from benchmarks.harness import check_equal, interleaved

from mlxcel_ext import add_rms_norm

EPS = 1e-5


@pytest.mark.parametrize(("rows", "hidden"), [(1, 576), (4, 4096), (32, 4096), (512, 576)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["f32", "bf16"])
def test_add_rms_norm(benchmark, rows, hidden, dtype):
    x, residual = (mx.random.normal((rows, hidden)).astype(dtype) for _ in range(2))
    weight = mx.random.normal((hidden,)).astype(dtype)
    mx.eval(x, residual, weight)

    def ours() -> list[mx.array]:
        return list(add_rms_norm(x, residual, weight, EPS))

    def separate() -> list[mx.array]:
        total = x + residual
        return [mx.fast.rms_norm(total, weight, EPS), total]

    want = np.asarray(separate()[0].astype(mx.float32))
    check_equal(ours()[0], want, 1e-4 if dtype == mx.float32 else 0.13)
    times = interleaved({"ours": ours, "ours again": ours, "mlx": separate}, rounds=41)
    ratio = times["mlx"].median / times["ours"].median
    gbps = 4 * x.nbytes / times["ours"].median / 1e3
    print(
        f"\nadd_rms_norm {rows} x {hidden} {dtype}: ours {times['ours']} ({gbps:.1f} GB/s), again {times['ours again']}"
    )
    print(f"  mlx {times['mlx']}, mlx / ours {ratio:.1f}")
    benchmark.extra_info["mlx_over_ours"] = ratio
    benchmark.pedantic(lambda: mx.eval(ours()), rounds=10, warmup_rounds=2)

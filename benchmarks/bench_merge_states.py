"""merge_states against the same formula in MLX's ops.

PYTHONPATH=python:. python -m pytest benchmarks/bench_merge_states.py -s
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from benchmarks.harness import check_equal, interleaved

from mlxcel_ext import merge_states
from mlxcel_ext.ops import reference


@pytest.mark.parametrize(("rows", "states"), [(1, 8), (32, 4), (512, 2)])
@pytest.mark.parametrize(("heads", "dim"), [(9, 64), (32, 128)])
def test_merge_states(benchmark, heads, dim, rows, states):
    v = mx.random.normal((rows * states, heads, dim))
    lse = mx.random.normal((rows * states, heads)) * 4
    indptr = mx.arange(rows + 1, dtype=mx.int32) * states
    mx.eval(v, lse, indptr)

    def ours() -> mx.array:
        return merge_states(v, lse, indptr, stream=mx.cpu)[0]

    def separate() -> mx.array:
        weights = mx.softmax(lse.reshape(rows, states, heads) * float(np.log(2)), axis=1, stream=mx.cpu)
        return mx.sum(v.reshape(rows, states, heads, dim) * weights[..., None], axis=1, stream=mx.cpu)

    want, _ = reference.merge_states(np.asarray(v), np.asarray(lse), np.asarray(indptr))
    check_equal(ours(), want, 1e-5)
    check_equal(separate(), want, 1e-5)
    times = interleaved({"ours": ours, "ours again": ours, "mlx": separate}, rounds=21)
    ratio = times["mlx"].median / times["ours"].median
    gbps = v.nbytes / times["ours"].median / 1e3
    print(f"\nmerge {rows} x {states} states, {heads} x {dim}: ours {times['ours']} ({gbps:.1f} GB/s)")
    print(f"  again {times['ours again']}, mlx {times['mlx']}, mlx / ours {ratio:.1f}")
    benchmark.extra_info["mlx_over_ours"] = ratio
    benchmark.pedantic(lambda: mx.eval(ours()), rounds=10, warmup_rounds=2)

"""rope_append against MLX's rope and scattered writes to the same pool.

PYTHONPATH=. python -m pytest benchmarks/bench_rope_append.py -s
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from benchmarks.harness import check_equal, interleaved

from mlxcel_ext import rope_append

THETA = 10000.0


@pytest.mark.parametrize(
    ("nnz", "heads", "kv_heads", "dim"), [(1, 9, 3, 64), (4, 32, 8, 128), (512, 9, 3, 64)]
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["f32", "bf16"])
def test_rope_append(benchmark, nnz, heads, kv_heads, dim, dtype):
    """Tokens of one request in a row: the one case that MLX's rope serves with a single call."""
    q, k, v = (mx.random.normal((nnz, h, dim)).astype(dtype) for h in (heads, kv_heads, kv_heads))
    slots = mx.array(np.random.default_rng(0).permutation(2048)[:nnz].astype(np.int32))
    positions = mx.arange(nnz, dtype=mx.int32)
    inv_freq = mx.array(THETA ** (-np.arange(0, dim, 2) / dim), mx.float32)
    ours_kv = [mx.zeros((128, 16, kv_heads, dim), dtype) for _ in "kv"]
    mlx_kv = [mx.zeros((2048, kv_heads, dim), dtype) for _ in "kv"]
    mx.eval(q, k, v, ours_kv, mlx_kv)

    def ours() -> list[mx.array]:
        q_rot, *ours_kv[:] = rope_append(q, k, v, *ours_kv, slots, positions, inv_freq=inv_freq)
        return [q_rot, *ours_kv]

    def separate() -> list[mx.array]:
        q_rot, k_rot = (
            mx.fast.rope(a.swapaxes(0, 1), dim, traditional=False, base=THETA, scale=1.0, offset=0).swapaxes(
                0, 1
            )
            for a in (q, k)
        )
        # Kept in a list that is emptied first: MLX writes in place only where nobody else holds the array.
        k_pool, v_pool = mlx_kv.pop(0), mlx_kv.pop(0)
        k_pool[slots], v_pool[slots] = k_rot, v
        mlx_kv[:] = [k_pool, v_pool]
        return [q_rot, k_pool, v_pool]

    tolerance = 1e-3 if dtype == mx.float32 else 0.05
    for got, want in zip(ours(), separate(), strict=True):
        check_equal(got.reshape(want.shape), np.asarray(want.astype(mx.float32)), tolerance)
    times = interleaved({"ours": ours, "mlx": separate}, rounds=31)
    ratio = times["mlx"].median / times["ours"].median
    print(
        f"\nrope_append {nnz} tokens, {heads}/{kv_heads} heads of {dim}, {dtype}: ours {times['ours']}, mlx {times['mlx']}"
    )
    print(f"  mlx / ours {ratio:.1f}")
    benchmark.extra_info["mlx_over_ours"] = ratio
    benchmark.pedantic(lambda: mx.eval(ours()), rounds=10, warmup_rounds=2)

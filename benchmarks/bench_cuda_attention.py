"""paged_attention through MLX on a CUDA GPU: time of a launch in a chain of dependent ones, against gather and SDPA.

PYTHONPATH=python:. python -m pytest benchmarks/bench_cuda_attention.py --benchmark-json=out.json

The L2 cache is warm, as the pools stay the same from link to link; benchmarks/bench_cuda_kernels.py times cold kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import PageTable, backends, paged_attention, plan_attention

HQ, HKV, DIM, PAGE = 32, 8, 128, 32
LINKS = 32
CASES = [(1, 128), (1, 1024), (1, 4096), (4, 1024), (4, 4096), (8, 4096), (32, 1024), (32, 4096), (64, 4096)]


@pytest.fixture(autouse=True)
def cuda_backend() -> None:
    assert backends()["cuda"] is None, f"the CUDA kernels are not in use: {backends()['cuda']}"


def chain(step: Callable[[mx.array], mx.array], q: mx.array) -> Callable[[], None]:
    def run() -> None:
        x = q
        for _ in range(LINKS):
            x = step(x)
        mx.eval(x)
        mx.synchronize()

    return run


@pytest.mark.parametrize("arm", ["paged", "gather"])
@pytest.mark.parametrize(("batch", "ctx"), CASES)
def test_decode_chain(benchmark, batch, ctx, arm):
    pages = ctx // PAGE
    ids = np.random.default_rng(0).permutation(batch * pages)
    table = PageTable(np.arange(batch + 1) * pages, ids, [PAGE] * batch, PAGE)
    k_pages, v_pages = (
        mx.random.normal((batch * pages, PAGE, HKV, DIM)).astype(mx.bfloat16) for _ in range(2)
    )
    q = mx.random.normal((batch, HQ, DIM)).astype(mx.bfloat16)
    indices = mx.array(ids.reshape(batch, pages))
    mx.eval(k_pages, v_pages, q, indices)
    plan = plan_attention(table, num_qo_heads=HQ, num_kv_heads=HKV)

    def paged(x: mx.array) -> mx.array:
        return paged_attention(x, k_pages, v_pages, table, plan=plan)

    def gather(x: mx.array) -> mx.array:
        k, v = (pool[indices].reshape(batch, ctx, HKV, DIM).swapaxes(1, 2) for pool in (k_pages, v_pages))
        return mx.fast.scaled_dot_product_attention(x[:, :, None], k, v, scale=DIM**-0.5)[:, :, 0]

    difference = mx.abs(paged(q).astype(mx.float32) - gather(q).astype(mx.float32)).max().item()
    assert difference < 0.02
    benchmark.extra_info.update(kv_bytes=2 * k_pages.nbytes, links=LINKS, tiles=len(plan.tiles))
    benchmark.pedantic(chain(paged if arm == "paged" else gather, q), rounds=7, warmup_rounds=2)

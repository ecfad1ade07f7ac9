"""paged_attention against gathering the pages and mx.fast.scaled_dot_product_attention, and the cost of planning.

PYTHONPATH=python:. python -m pytest benchmarks/bench_paged_attention.py -s
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from benchmarks.harness import check_equal, interleaved

from mlxcel_ext import AttentionPlan, PageTable, paged_attention, plan_attention

HQ, HKV, DIM, PAGE = 32, 8, 128, 16


def pools(batch: int, ctx: int, dtype: mx.Dtype = mx.float32) -> tuple[PageTable, mx.array, mx.array]:
    """Pages dealt in random order, as after hours of serving."""
    pages = -(-ctx // PAGE)
    ids = np.random.default_rng(0).permutation(batch * pages)
    table = PageTable(np.arange(batch + 1) * pages, ids, [ctx - (pages - 1) * PAGE] * batch, PAGE)
    k, v = (mx.random.normal((batch * pages, PAGE, HKV, DIM), dtype=dtype) for _ in range(2))
    mx.eval(k, v)
    return table, k, v


def gather_and_sdpa(
    q: mx.array, k_pages: mx.array, v_pages: mx.array, indices: mx.array, mask: str | None
) -> mx.array:
    """What MLX can do on the same pool: q [B, L, Hq, D], indices [B, pages]."""
    k, v = (
        mx.take(pool, indices, axis=0).reshape(q.shape[0], -1, HKV, DIM).swapaxes(1, 2)
        for pool in (k_pages, v_pages)
    )
    out = mx.fast.scaled_dot_product_attention(q.swapaxes(1, 2), k, v, scale=DIM**-0.5, mask=mask)
    return out.swapaxes(1, 2)


@pytest.mark.parametrize("ctx", [1024, 4096])
def test_decode(benchmark, ctx):
    batch = 4
    table, k_pages, v_pages = pools(batch, ctx)
    q = mx.random.normal((batch, HQ, DIM))
    indices = mx.array(table.kv_indices.reshape(batch, -1))
    plan = plan_attention(table, num_qo_heads=HQ, num_kv_heads=HKV)

    def ours() -> mx.array:
        return paged_attention(q, k_pages, v_pages, table, plan=plan)

    def mlx() -> mx.array:
        return gather_and_sdpa(q[:, None], k_pages, v_pages, indices, None)

    check_equal(ours(), mlx()[:, 0], 1e-5)
    times = interleaved({"ours": ours, "ours again": ours, "mlx": mlx}, rounds=9)
    gbps = 2 * k_pages.nbytes / times["ours"].median / 1e3
    print(f"\ndecode f32 B={batch} ctx={ctx} Hq={HQ} Hkv={HKV} D={DIM} page={PAGE}")
    print(
        f"  ours {times['ours']} ({gbps:.1f} GB/s of K and V), again {times['ours again']}, mlx {times['mlx']}"
    )
    print(f"  mlx / ours {times['mlx'].median / times['ours'].median:.1f}")
    benchmark.extra_info["mlx_over_ours"] = times["mlx"].median / times["ours"].median
    benchmark.pedantic(lambda: mx.eval(ours()), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize(("rows", "ctx"), [(256, 1024)])
def test_prefill_chunk(benchmark, rows, ctx):
    table, k_pages, v_pages = pools(1, ctx)
    q = mx.random.normal((rows, HQ, DIM))
    indices = mx.array(table.kv_indices.reshape(1, -1))
    qo_indptr = np.array([0, rows], np.int32)
    plan = plan_attention(table, qo_indptr, num_qo_heads=HQ, num_kv_heads=HKV)

    def ours() -> mx.array:
        return paged_attention(q, k_pages, v_pages, table, qo_indptr=qo_indptr, plan=plan)

    def mlx() -> mx.array:
        return gather_and_sdpa(q[None], k_pages, v_pages, indices, "causal")

    check_equal(ours(), mlx()[0], 1e-5)
    times = interleaved({"ours": ours, "mlx": mlx}, rounds=3, warmup=1)
    gflops = 4 * DIM * HQ * rows * (ctx - rows / 2) / times["ours"].median / 1e3
    print(f"\nprefill f32 {rows} rows over ctx={ctx}")
    print(f"  ours {times['ours']} ({gflops:.0f} GFLOP/s), mlx {times['mlx']}")
    print(f"  mlx / ours {times['mlx'].median / times['ours'].median:.1f}")
    benchmark.extra_info["mlx_over_ours"] = times["mlx"].median / times["ours"].median
    benchmark.pedantic(lambda: mx.eval(ours()), rounds=2)


@pytest.mark.parametrize("kind", ["decode", "skewed", "mixed"])
def test_plan(benchmark, kind):
    """64 requests; the table is validated before, as in a step where it also serves rope_append."""
    from mlxcel_ext.ops import cuda_target

    rng = np.random.default_rng(0)
    kv_len = rng.integers(64, 4096, 64)
    if kind == "skewed":
        kv_len[7] = 65536
    qo_len = np.ones(64, np.int64)
    if kind == "mixed":
        qo_len[3] = 512
        kv_len[3] = 2048
    counts = -(-kv_len // PAGE)
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    table = PageTable(indptr, np.arange(indptr[-1]), kv_len - (counts - 1) * PAGE, PAGE)
    table.validate()
    qo_indptr = None if kind != "mixed" else np.cumsum([0, *qo_len]).astype(np.int32)
    target = cuda_target(132)
    plan = benchmark(plan_attention, table, qo_indptr, num_qo_heads=HQ, num_kv_heads=HKV, target=target)
    print(f"\n{kind}: {plan}")
    check_covered(plan, qo_len, counts)


def check_covered(plan: AttentionPlan, qo_len: np.ndarray, pages: np.ndarray) -> None:
    """AssertionError unless each request's last query token meets each of its pages once."""
    met = [np.zeros(n, int) for n in pages]
    last = np.cumsum(qo_len) - 1
    for request, q_begin, q_len, page_begin, page_end, *_ in plan.tiles.tolist():
        if q_begin <= last[request] < q_begin + q_len:
            met[request][page_begin:page_end] += 1
    assert all((m == 1).all() for m in met), "a page is planned twice, or not at all"

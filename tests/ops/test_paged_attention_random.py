"""paged_attention over random tables, and what a batch-invariant plan promises."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel_ext import (
    PageTable,
    _ext,
    lse_to_natural,
    merge_states,
    num_threads,
    paged_attention,
    paged_attention_partial,
    plan_attention,
    rope_append,
    set_num_threads,
)
from mlxcel_ext.ops import PlanTarget
from tests.conftest import METAL_EMULATED, examples
from tests.support.compare import assert_close, to_numpy
from tests.support.paged import KV_DTYPES, PagedCase, each_kv_dtype

SMALL_CHUNKS = PlanTarget(
    slots=16,
    tile_rows=16,
    rows_per_token=4,
    min_chunk_tokens=16,
    tile_overhead=1,
    max_waves=8,
    invariant_chunk_tokens=128,
)


@st.composite
def launches(draw):
    requests = draw(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), min_size=1, max_size=5))
    page_size = draw(st.sampled_from([1, 2, 8, 16, 64, 256]))
    hkv, group = draw(st.sampled_from([(1, 1), (2, 3), (1, 7), (2, 4), (1, 8)]))
    return {
        "kv_len": [n for n, _ in requests],
        "qo_len": draw(st.sampled_from([None, [q for _, q in requests]])),
        "offsets": draw(st.sampled_from([None, [draw(st.integers(0, page_size - 1)) for _ in requests]])),
        "page_size": page_size,
        "hkv": hkv,
        "hq": hkv * group,
        "dim": draw(st.sampled_from([64, 80])),
        "layout": draw(st.sampled_from(["NHD", "HND"])),
        "kv_dtype": draw(st.sampled_from(KV_DTYPES)),
    }


@settings(max_examples=examples(80), deadline=None)
@given(
    launch=launches(),
    seed=st.integers(0, 2**32 - 1),
    options=st.fixed_dictionaries(
        {
            "causal": st.booleans(),
            "window_left": st.sampled_from([-1, 0, 20]),
            "logits_soft_cap": st.sampled_from([0.0, 5.0]),
        }
    ),
    batch_invariant=st.booleans(),
)
def test_random_launches(launch, seed, options, batch_invariant):
    case = PagedCase(np.random.default_rng(seed), **launch)
    plan = plan_attention(
        case.table,
        case.qo_indptr,
        target=SMALL_CHUNKS,
        batch_invariant=batch_invariant,
        causal=options["causal"],
        window_left=options["window_left"],
        **case.heads,
    )
    out, lse = paged_attention(
        *case.args, qo_indptr=case.qo_indptr, plan=plan, kv_layout=case.layout, return_lse=True, **options
    )
    want, want_lse = case.reference(**options)
    assert_close(out, want, ulps=16, scale=1.0)
    assert_close(lse, want_lse, ulps=16, scale=8.0)


@pytest.mark.parametrize("sinks", [None, mx.array([0.5, -1.0, 3.0, 0.0])])
@pytest.mark.parametrize("dim", [64, 80])
@each_kv_dtype
def test_invariant_plan_gives_the_same_bits_alone_batched_chunked_and_one_by_one(
    stream, dtype, kv_dtype, rng, sinks, dim
):
    # One request: all at once; in a batch with others; in three chunks, as chunked prefill or a prefix cache would;
    # and some of its last tokens in decode steps.
    n = 150 if METAL_EMULATED else 300
    case = PagedCase(rng, [n, 90], qo_len=[n, 90], dtype=dtype, kv_dtype=kv_dtype, dim=dim)
    pools = case.k_pages, case.v_pages
    row = case.table.kv_indices[: case.table.kv_indptr[1]]

    def run(q, kv_len, qo_indptr, extra: bool = False):
        pages = [list(row[: -(-kv_len // 16)])]
        lengths = [kv_len]
        if extra:
            start = int(case.table.kv_indptr[1])
            pages.append(list(case.table.kv_indices[start : int(case.table.kv_indptr[2])]))
            lengths.append(90)
        table = PageTable.from_pages(pages, lengths, 16)
        plan = plan_attention(table, qo_indptr, batch_invariant=True, target=SMALL_CHUNKS, **case.heads)
        return paged_attention(
            q, *pools, table, qo_indptr=qo_indptr, plan=plan, sinks=sinks, return_lse=True, stream=stream
        )

    q = case.q[:n]
    whole = run(q, n, np.array([0, n], np.int32))
    batched = run(case.q, n, np.array([0, n, n + 90], np.int32), extra=True)
    cuts = [0, 37, 2 * n // 3 + 1, n]
    chunks = [run(q[a:b], b, np.array([0, b - a], np.int32)) for a, b in itertools.pairwise(cuts)]
    steps = [0, 1, 15, 16, 127, 128, n // 2, n - 1]
    decoded = [run(q[i : i + 1], i + 1, None) for i in steps]
    for i in range(2):
        assert mx.array_equal(batched[i][:n], whole[i])
        assert mx.array_equal(mx.concatenate([c[i] for c in chunks]), whole[i])
        assert mx.array_equal(mx.concatenate([d[i] for d in decoded]), whole[i][mx.array(steps)])


@each_kv_dtype
def test_threads_do_not_change_bits(stream, dtype, kv_dtype, rng):
    case = PagedCase(
        rng,
        [700, 20, 64],
        qo_len=[3, 1, 64],
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    plan = plan_attention(case.table, case.qo_indptr, target=SMALL_CHUNKS, **case.heads)
    threads, outs = num_threads(), []
    try:
        for n in (1, 2, 5):
            set_num_threads(n)
            out = paged_attention(*case.args, qo_indptr=case.qo_indptr, plan=plan, stream=mx.cpu)
            mx.eval(out)
            outs.append(out)
    finally:
        set_num_threads(threads)
    assert mx.array_equal(outs[0], outs[1])
    assert mx.array_equal(outs[0], outs[2])


def test_natural_lse_between_partials_and_merge_is_wrong(stream, rng):
    case = PagedCase(rng, [500], scale=2.0)
    plan = plan_attention(case.table, partial=True, target=SMALL_CHUNKS, **case.heads)
    assert plan.num_partials > 1
    v, lse = paged_attention_partial(*case.args, plan=plan, stream=stream)
    want, _ = case.reference()
    right, _ = merge_states(v, lse, plan.merge_indptr, stream=stream)
    wrong, _ = merge_states(v, lse_to_natural(lse), plan.merge_indptr, stream=stream)
    assert_close(right, want, ulps=32, scale=1.0)  # scores of up to 20, rounded before they are exponents
    assert np.abs(to_numpy(wrong) - want).max() > 1e-2


def test_partial_merge_equals_the_fused_merge_bit_for_bit(rng):
    case = PagedCase(rng, [500, 30, 0], qo_len=[4, 30, 1])
    options = {"target": SMALL_CHUNKS, "batch_invariant": True}
    plan = plan_attention(case.table, case.qo_indptr, partial=True, **options, **case.heads)
    fused = plan_attention(case.table, case.qo_indptr, **options, **case.heads)
    run = {"qo_indptr": case.qo_indptr, "stream": mx.cpu}
    want, want_lse = paged_attention(*case.args, plan=fused, return_lse=True, **run)
    got, got_lse = merge_states(
        *paged_attention_partial(*case.args, plan=plan, **run), plan.merge_indptr, stream=mx.cpu
    )
    assert mx.array_equal(got, want)
    assert mx.array_equal(got_lse, want_lse)


def test_plan_serves_later_steps_while_page_counts_stay(stream, rng):
    case = PagedCase(rng, [33, 160, 17])
    plan = plan_attention(case.table, **case.heads)
    for grown in ([40, 160, 18], [48, 150, 32]):
        later = PagedCase(rng, grown)
        out = paged_attention(*later.args, plan=plan, stream=stream)
        assert_close(out, later.reference()[0], ulps=16, scale=1.0)


def test_pages_beyond_2_31_elements(stream, rng):
    # A launch without tiles writes nothing: its output is 8.6 GB of memory of which no page was ever touched.
    heads, dim, page_size = 1, 256, 256
    num_pages = 2**31 // (page_size * heads * dim) + 2
    tiles = _ext.AttentionTiles(
        mx.zeros((0, 8), mx.int32), mx.zeros((1,), mx.int32), None, num_pages * page_size, False, 0, 0, 0
    )
    nothing = PageTable([0], [], [], page_size).on_device(stream=stream)
    options = _ext.AttentionOptions(True, 1.0, -1, 0.0, "NHD")
    small = mx.zeros((1, page_size, heads, dim))

    def untouched() -> mx.array:
        pool, _ = _ext.paged_attention_partial(
            mx.zeros((0, heads, dim)), small, small, nothing, tiles, options, stream=stream
        )
        return pool.reshape(num_pages, page_size, heads, dim)

    k_pages, v_pages = untouched(), untouched()
    mx.eval(k_pages, v_pages)
    assert k_pages.size > 2**31

    table = PageTable([0, 2], [num_pages - 1, num_pages - 2], [3], page_size)
    kv = mx.array(rng.standard_normal((page_size + 3, heads, dim)), mx.float32)
    new = np.array([0, page_size + 3], np.int32)
    positions = mx.arange(page_size + 3, dtype=mx.int32)
    no_rotation = mx.zeros((0,))
    q, k_pages, v_pages = rope_append(
        kv, kv, kv, k_pages, v_pages, table, positions, inv_freq=no_rotation, qo_indptr=new, stream=stream
    )
    got = paged_attention(q[-1:], k_pages, v_pages, table, stream=stream)
    a = to_numpy(kv)[:, 0]
    weights = np.exp((a @ a[-1]) * dim**-0.5 - np.max(a @ a[-1]) * dim**-0.5)
    assert_close(got, (weights @ a / weights.sum())[None, None], ulps=16, scale=1.0)
    del k_pages, v_pages
    mx.clear_cache()

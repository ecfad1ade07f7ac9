"""cascade_attention against float64 and against flat attention, and what plan_cascade promises."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel_ext import (
    CascadeCosts,
    CascadeFloors,
    PageTable,
    cascade_attention,
    detect_shared_prefix,
    lse_to_natural,
    merge_states,
    paged_attention,
    paged_attention_partial,
    plan_attention,
    plan_cascade,
)
from mlxcel_ext.ops import PlanTarget, cpu_target, cuda_target
from mlxcel_ext.ops.cascade import default_costs
from mlxcel_ext.outcomes import CascadeDeclined, FusedCascade
from tests.conftest import examples
from tests.ops.test_attention_plan import check_cover
from tests.support.compare import to_numpy
from tests.support.paged import (
    CHUNK,
    KV_DTYPES,
    PAGE_BEGIN,
    PAGE_END,
    Q_LEN,
    SHARED,
    PagedCase,
    each_kv_dtype,
)

#: Sharing costs nothing, so that everything is shared.
FREE = CascadeCosts(reread=1.0, row=0.0, tile=0.0, merge=0.0, launch=0.0)
#: Tiles of 16 rows, chunks of 16 tokens and more (batch-invariant: 32 to 128).
SMALL = PlanTarget(16, 16, 4, 16, 1, 8, 128)
#: The largest error, of outputs of size 1, against float64 and against flat attention.
TOLERANCE = {mx.float32: 2e-5, mx.float16: 5e-3, mx.bfloat16: 4e-2}

#: A system prompt of 10 pages that four share, a tenant's 5 that three share, and a document of 4 that two share.
NESTED = [
    [*range(10), *range(20, 25), *range(30, 34)],
    [*range(10), *range(20, 25), *range(30, 34)],
    [*range(10), *range(20, 25)],
    [*range(10)],
    [],
]
NESTED_KV = [19 * 16 + 40, 19 * 16 + 3, 15 * 16 + 100, 10 * 16 + 17, 70]


def plan_of(case: PagedCase, **options):
    return plan_cascade(case.table, case.qo_indptr, **{"costs": FREE, "target": SMALL} | case.heads | options)


def check(case: PagedCase, plan, stream, **options) -> tuple[mx.array, mx.array]:
    """Close to float64 and to the flat plan's result."""
    run = {
        "qo_indptr": case.qo_indptr,
        "kv_layout": case.layout,
        "return_lse": True,
        "stream": stream,
        **options,
    }
    out, lse = cascade_attention(*case.args, plan=plan, **run)
    flat, flat_lse = paged_attention(*case.args, **run)
    want, want_lse = case.reference(**options)
    tolerance = TOLERANCE[out.dtype]
    for got, other, exact in ((out, flat, want), (lse, flat_lse, want_lse)):
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(np.isfinite(to_numpy(got)), finite)
        for reference in (exact, to_numpy(other)):
            np.testing.assert_allclose(to_numpy(got)[finite], reference[finite], rtol=0, atol=tolerance)
    return out, lse


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [(8, 2), (9, 3), (5, 1), (32, 1)])
@each_kv_dtype
def test_whole_batch_behind_one_prompt(stream, dtype, kv_dtype, rng, heads, dim, layout):
    prompt = list(range(12))
    case = PagedCase(
        rng,
        [200, 230, 193, 256],
        shared=[prompt] * 4,
        hq=heads[0],
        hkv=heads[1],
        dim=dim,
        layout=layout,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    plan = plan_of(case, target=PlanTarget(16, 64, 4, 16, 1, 8, 128))
    assert isinstance(plan.cascade, FusedCascade)
    assert (plan.cascade.batch, plan.cascade.members, plan.cascade.levels) == (4, 4, 1)
    assert (plan.cascade.shared_pages, plan.cascade.shared_tokens) == (12, 192)
    check(case, plan, stream)


@pytest.mark.parametrize("threads", [1, 2, 4, 6, 8, 10, 12, 16, 64])
def test_threads_take_turns_at_a_shared_span(threads):
    # One tile a KV head and thread left those that had none waiting: 12 threads, one chunk for 8 heads.
    rows = [[*range(128), 128 + m] for m in range(8)]
    table = PageTable.from_pages(rows, [2064] * 8, 16)
    plan = plan_cascade(table, num_qo_heads=32, num_kv_heads=8, target=cpu_target(threads), costs=FREE)
    shared = plan.tiles[plan.tiles[:, SHARED] == 1]
    tokens = (shared[:, PAGE_END] - shared[:, PAGE_BEGIN]) * 16
    assert tokens.sum() == 2048
    assert tokens.min() >= 256
    assert len(shared) * 8 >= min(3 * threads, 2048 // 256 * 8)
    assert len(shared) <= max(1, threads // 2)


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@each_kv_dtype
def test_nested_tree_of_three_levels(stream, dtype, kv_dtype, rng, with_sinks, cap):
    case = PagedCase(rng, NESTED_KV, shared=NESTED, dtype=dtype, kv_dtype=kv_dtype)
    plan = plan_of(case)
    assert plan.cascade == FusedCascade(5, 4, 3, 19, 19 * 16, plan.cascade.chunks)
    sinks = mx.array([0.5, -1.0, 3.0, 0.0]) if with_sinks else None
    check(case, plan, stream, sinks=sinks, logits_soft_cap=cap)


@pytest.mark.parametrize("causal", [True, False])
@each_kv_dtype
def test_prefill_chunks_and_verify_rows_are_members(stream, dtype, kv_dtype, rng, causal):
    # A chunk of 9 tokens, a verify row of 4, a decode row, a request that asks nothing, one that shares nothing.
    qo_len = [9, 4, 1, 0, 20]
    case = PagedCase(rng, NESTED_KV, qo_len=qo_len, shared=NESTED, dtype=dtype, kv_dtype=kv_dtype)
    plan = plan_of(case, causal=causal)
    assert plan.cascade.members == 3
    check_cover(plan, case.table, qo_len, causal, -1)
    assert plan.tiles[plan.tiles[:, SHARED] == 1, Q_LEN].max() > 4
    check(case, plan, stream, causal=causal)


def test_a_row_that_computes_what_others_read_shares_what_it_has_finished(stream, rng):
    # Request 0 computes tokens 100..160 of its prompt in this very step, whose pages request 1 has adopted. As far as
    # the plan knows, its first query may see 86 tokens: the last page may hold one.
    prompt = list(range(10))
    case = PagedCase(rng, [160, 170], qo_len=[60, 1], shared=[prompt, prompt])
    plan = plan_of(case)
    assert plan.cascade.shared_pages == 86 // 16
    check(case, plan, stream)


@pytest.mark.parametrize("window_left", [40, 100, 170, 1000])
def test_windows_share_what_all_members_see(stream, rng, window_left):
    case = PagedCase(rng, [200, 230, 193], shared=[list(range(11))] * 3)
    plan = plan_of(case, window_left=window_left)
    check_cover(plan, case.table, [1] * 3, True, window_left)
    assert isinstance(plan.cascade, FusedCascade if window_left > 40 else CascadeDeclined)
    check(case, plan, stream, window_left=window_left)


def test_first_pages_that_start_in_the_middle(stream, rng):
    case = PagedCase(rng, [150, 180, 160], shared=[list(range(8))] * 3, offsets=[5, 5, 5])
    plan = plan_of(case)
    assert plan.cascade.members == 3
    check(case, plan, stream)


def test_groups_of_one_member_are_flat(rng):
    case = PagedCase(rng, [200, 230, 193])
    plan = plan_of(case)
    flat = plan_attention(case.table, target=SMALL, **case.heads)
    assert plan.cascade == CascadeDeclined("nothing_shared")
    np.testing.assert_array_equal(plan.tiles, flat.tiles)
    np.testing.assert_array_equal(plan.merge_indptr, flat.merge_indptr)


@st.composite
def trees(draw):
    """Shared pages of up to seven requests: each continues a prefix of one before it, or starts anew."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(2, 7))):
        above = draw(st.sampled_from([[], *rows]))
        keep = draw(st.integers(0, len(above)))
        fresh = draw(st.integers(0, 6))
        begin = 1000 * len(rows)
        rows.append([*above[:keep], *range(begin, begin + fresh)])
    return rows


@settings(max_examples=examples(120), deadline=None)
@given(rows=trees(), data=st.data(), seed=st.integers(0, 2**32 - 1), batch_invariant=st.booleans())
def test_random_trees(rows, data, seed, batch_invariant):
    size = data.draw(st.sampled_from([1, 4, 16]))
    tails = data.draw(st.lists(st.integers(1, 3 * size), min_size=len(rows), max_size=len(rows)))
    kv_len = [len(row) * size + tail for row, tail in zip(rows, tails, strict=True)]
    qo_len = data.draw(st.none() | st.tuples(*(st.integers(0, min(n, 25)) for n in kv_len)).map(list))
    options = {"causal": data.draw(st.booleans()), "window_left": data.draw(st.sampled_from([-1, -1, 9, 60]))}
    case = PagedCase(
        np.random.default_rng(seed), kv_len, qo_len=qo_len, shared=rows, page_size=size, hq=6, hkv=2
    )
    target = data.draw(
        st.sampled_from([SMALL, PlanTarget(16, 16, 4, 4, 1, 8, 16), cpu_target(2), cuda_target(132)])
    )
    plan = plan_of(case, target=target, batch_invariant=batch_invariant, **options)
    check_cover(plan, case.table, [1] * len(rows) if qo_len is None else qo_len, **options)
    check(case, plan, mx.cpu, **options)


@settings(max_examples=examples(60), deadline=None)
@given(rows=trees(), data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_batch_invariant_plans_give_the_bits_of_flat_ones(rows, data, seed):
    qo_len = data.draw(st.none() | st.lists(st.integers(0, 20), min_size=len(rows), max_size=len(rows)))
    kv_len = [len(row) * 16 + 20 for row in rows]
    target = PlanTarget(16, 16, 4, 16, 1, 8, 32)  # chunks of 8 to 32 tokens: less than the shared prefixes
    case = PagedCase(
        np.random.default_rng(seed),
        kv_len,
        qo_len=qo_len,
        shared=rows,
        hq=6,
        hkv=2,
        kv_dtype=data.draw(st.sampled_from(KV_DTYPES)),
    )
    options = {"batch_invariant": True, "target": target, **case.heads}
    run = {"qo_indptr": case.qo_indptr, "return_lse": True, "stream": mx.cpu}
    flat = plan_attention(case.table, case.qo_indptr, **options)
    plan = plan_cascade(case.table, case.qo_indptr, costs=FREE, **options)
    for got, want in zip(
        cascade_attention(*case.args, plan=plan, **run),
        paged_attention(*case.args, plan=flat, **run),
        strict=True,
    ):
        assert mx.array_equal(got, want)


def test_batch_invariant_plans_do_share(rng):
    case = PagedCase(rng, [2500, 2600], shared=[list(range(150))] * 2)
    plan = plan_cascade(case.table, batch_invariant=True, costs=FREE, target=cpu_target(2), **case.heads)
    assert plan.cascade.shared_tokens == 2048  # of 2400: whole chunks of 512
    windowed = plan_cascade(
        case.table, batch_invariant=True, costs=FREE, target=cpu_target(2), window_left=4000, **case.heads
    )
    assert windowed.cascade == CascadeDeclined("costs")


# -- negative controls: what a wrong implementation would give is far off ---------------------------------------


def test_natural_lse_between_levels_is_wrong(stream, rng):
    case = PagedCase(rng, NESTED_KV, shared=NESTED, scale=2.0)
    plan = plan_of(case, partial=True)
    v, lse = paged_attention_partial(*case.args, plan=plan, stream=stream)
    right, _ = merge_states(v, lse, plan.merge_indptr, stream=stream)
    wrong, _ = merge_states(v, lse_to_natural(lse), plan.merge_indptr, stream=stream)
    want, _ = case.reference()
    np.testing.assert_allclose(to_numpy(right), want, rtol=0, atol=1e-4)
    assert np.abs(to_numpy(wrong) - want).max() > 1e-2


@pytest.mark.parametrize("stacking", ["kv_head_major", "member_major"])
def test_rows_are_stacked_by_kv_head(stream, rng, stacking):
    # The members' queries as heads of one token: KV head h reads stacked heads h*M*G .. (h + 1)*M*G. Member-major
    # stacking sends a member's queries to another KV head.
    members, hkv, group, dim = 3, 2, 4, 64
    case = PagedCase(
        rng, [160] * members, shared=[list(range(10))] * members, hq=hkv * group, hkv=hkv, dim=dim
    )
    q = case.q.reshape(members, hkv, group, dim)
    stacked = q.transpose(1, 0, 2, 3) if stacking == "kv_head_major" else q
    one = PageTable(case.table.kv_indptr[:2], case.table.kv_indices, [16], 16)
    out = paged_attention(
        stacked.reshape(1, -1, dim), case.k_pages, case.v_pages, one, causal=False, stream=stream
    )
    shape = (hkv, members, group, dim) if stacking == "kv_head_major" else (members, hkv, group, dim)
    out = out.reshape(shape)
    if stacking == "kv_head_major":
        out = out.transpose(1, 0, 2, 3)
    error = np.abs(to_numpy(out.reshape(members, -1, dim)) - case.reference()[0]).max()
    assert error < 2e-5 if stacking == "kv_head_major" else error > 0.1


# -- the plan ----------------------------------------------------------------------------------------------------


def test_levels_and_flat_rows_conserve_the_pages_of_the_table(rng):
    case = PagedCase(rng, NESTED_KV, shared=NESTED)
    plan = plan_of(case)
    check_cover(plan, case.table, [1] * 5, True, -1)
    pages = plan.tiles[:, PAGE_END] - plan.tiles[:, PAGE_BEGIN]
    times = np.where(plan.tiles[:, SHARED] == 1, plan.tiles[:, Q_LEN], 1)
    assert (pages * times).sum() == case.table.kv_indptr[-1]  # seen by tokens: as in the flat table
    assert pages.sum() == case.table.kv_indptr[-1] - (3 * 10 + 2 * 5 + 1 * 4)  # read


def test_tiles_of_all_levels_are_balanced_together(rng):
    case = PagedCase(rng, [8192 + 40] * 8, shared=[list(range(512))] * 8, hq=4, hkv=1)
    plan = plan_cascade(case.table, costs=FREE, target=cuda_target(132), **case.heads)
    pages = plan.tiles[:, PAGE_END] - plan.tiles[:, PAGE_BEGIN]
    assert (np.diff(pages) <= 0).all() or (np.diff(pages) <= 1).all()  # longest first, to a bucket
    shared = pages[plan.tiles[:, SHARED] == 1]
    assert shared.size > 16  # the prompt is cut too
    assert shared.max() - shared.min() <= 1
    assert plan.tiles[:, CHUNK].max() == np.diff(plan.merge_indptr).max() - 1


def costs_of(rows, kv_len, **costs):
    table = PageTable.from_pages(rows, kv_len, 16)
    return plan_cascade(
        table,
        num_qo_heads=8,
        num_kv_heads=2,
        target=cpu_target(2),
        costs=CascadeCosts(**{"reread": 1.0, "row": 0.0, "tile": 0.0, "merge": 0.0, "launch": 0.0} | costs),
    ).cascade


def test_costs_decide():
    def rows(members: int, pages: int) -> tuple[list[list[int]], list[int]]:
        return [[*range(pages), 1000 + m] for m in range(members)], [16 * pages + 1] * members

    assert isinstance(costs_of(*rows(4, 8)), FusedCascade)
    # 3 * 128 tokens are saved; 4 members * 4 heads * 2 rows are merged.
    assert isinstance(costs_of(*rows(4, 8), merge=11.0), FusedCascade)
    assert costs_of(*rows(4, 8), merge=13.0) == CascadeDeclined("costs")
    assert isinstance(costs_of(*rows(4, 8), tile=383.0), FusedCascade)
    assert costs_of(*rows(4, 8), tile=385.0) == CascadeDeclined("costs")
    # Reading again is cheap: (4 - 1) * 128 * 0.25.
    assert isinstance(costs_of(*rows(4, 8), reread=0.25, tile=95.0), FusedCascade)
    assert costs_of(*rows(4, 8), reread=0.25, tile=97.0) == CascadeDeclined("costs")
    # Arithmetic that sharing does not save: 16 rows at 1 / 16 of a token each.
    assert costs_of(*rows(4, 8), row=1 / 4) == CascadeDeclined("costs")
    # 4 * 16 tokens are not shared.
    assert isinstance(costs_of(*rows(4, 8), other=6.9), FusedCascade)
    assert costs_of(*rows(4, 8), other=7.1) == CascadeDeclined("costs")
    # A launch is worth 384 tokens * 2 heads / 2 threads.
    assert isinstance(costs_of(*rows(4, 8), launch=383.0), FusedCascade)
    assert costs_of(*rows(4, 8), launch=385.0) == CascadeDeclined("costs")


def test_a_level_that_does_not_pay_is_read_by_those_below_it():
    # All four share one page, and two of them 20 more. The page alone is not worth a tile; with the 20 it is.
    rows = [[0, *range(1, 21), 100], [0, *range(1, 21), 101], [0, 50, 102], [0, 51, 103]]
    kv_len = [22 * 16 - 3] * 2 + [3 * 16 - 3] * 2
    both = costs_of(rows, kv_len)
    assert (both.levels, both.members, both.shared_pages) == (2, 4, 21)
    one = costs_of(rows, kv_len, tile=100.0)
    assert (one.levels, one.members, one.shared_pages) == (1, 2, 21)


def test_floors_replace_the_costs(monkeypatch):
    rows = [[*range(8), 100], [*range(8), 101], [*range(8), 102]]
    table = PageTable.from_pages(rows, [8 * 16 + 1] * 3, 16)
    options = {"num_qo_heads": 8, "num_kv_heads": 2, "target": cpu_target(2)}
    for pages, members, shares in ((8, 3, True), (9, 3, False), (8, 4, False), (1, 1, True)):
        by_argument = plan_cascade(table, costs=CascadeFloors(pages, members), **options)
        assert isinstance(by_argument.cascade, FusedCascade) == shares
        monkeypatch.setenv("MLXCEL_CASCADE_MIN_SHARED_PAGES", str(pages))
        monkeypatch.setenv("MLXCEL_CASCADE_MIN_MEMBERS", str(members))
        assert plan_cascade(table, **options).cascade == by_argument.cascade


def test_packaged_costs_share_a_long_prompt_and_not_a_short_one(stream):
    def outcome(members: int, pages: int):
        table = PageTable.from_pages(
            [[*range(pages), 10_000 + m] for m in range(members)], [16 * pages + 1] * members, 16
        )
        return plan_cascade(
            table, num_qo_heads=32, num_kv_heads=8, costs=default_costs(stream), target=cuda_target(132)
        ).cascade

    assert isinstance(outcome(64, 512), FusedCascade)
    assert outcome(2, 1) == CascadeDeclined("costs")


def test_a_plan_holds_for_its_shared_pages_alone(rng):
    case = PagedCase(rng, [200, 230], shared=[list(range(12))] * 2)
    plan = plan_of(case)
    assert plan.matches(case.table.advance())
    other = case.table.kv_indices.copy()
    other[3] = other[4]
    table = PageTable(case.table.kv_indptr, other, case.table.kv_last_page_len, 16)
    assert not plan.matches(table)
    with pytest.raises(ValueError, match="or for other shared pages: plan again"):
        cascade_attention(case.q, case.k_pages, case.v_pages, table, plan=plan)
    with pytest.raises(ValueError, match=r"for causal=True and window_left=-1 alone, got causal=False and"):
        cascade_attention(*case.args, plan=plan, causal=False)
    with pytest.raises(ValueError, match=r"alone, got causal=True and window_left=50"):
        cascade_attention(*case.args, plan=plan, window_left=50)
    with pytest.raises(ValueError, match=r"^\[plan_cascade\] tree must be detect_shared_prefix's of table"):
        plan_cascade(table, tree=detect_shared_prefix(case.table), **case.heads)


def test_a_plan_is_made_where_none_is_given(stream, rng):
    case = PagedCase(rng, [4000 + 9, 4000 + 30, 4000], shared=[list(range(240))] * 3)
    out = cascade_attention(*case.args, stream=stream)
    np.testing.assert_allclose(to_numpy(out), case.reference()[0], rtol=0, atol=2e-5)


@each_kv_dtype
def test_empty_batch(stream, dtype, kv_dtype):
    pool = mx.zeros((2, 16, 2, 64), kv_dtype)
    out = cascade_attention(
        mx.zeros((0, 4, 64), dtype), pool, pool, PageTable([0], [], [], 16), stream=stream
    )
    assert out.shape == (0, 4, 64)
    mx.eval(out)

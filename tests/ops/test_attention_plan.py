"""plan_attention: every query token sees each of its pages exactly once, and the work is even."""

from __future__ import annotations

import heapq

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel_ext import PageTable, num_threads, plan_attention, set_num_threads
from mlxcel_ext.ops import PlanTarget, cpu_target, cuda_target
from mlxcel_ext.ops.attention_plan import default_target
from tests.support.paged import CHUNK, GROUP, PAGE_BEGIN, PAGE_END, Q_BEGIN, Q_LEN, REQUEST, SHARED

HEADS = {"num_qo_heads": 8, "num_kv_heads": 2}


def table_of(kv_len: list[int], page_size: int = 16) -> PageTable:
    pages, next_id = [], 0
    for n in kv_len:
        count = -(-n // page_size)
        pages.append(range(next_id, next_id + count))
        next_id += count
    return PageTable.from_pages(pages, kv_len, page_size)


def check_cover(plan, table: PageTable, qo_len: list[int], causal: bool, window_left: int) -> None:
    """Tiles cover exactly the pages that a token may see; partial rows are used once and in order."""
    indptr = np.cumsum([0, *qo_len])
    rows = [table.kv_indices[a:b] for a, b in zip(table.kv_indptr[:-1], table.kv_indptr[1:], strict=True)]
    nnz = int(indptr[-1])
    owner = np.repeat(np.arange(len(qo_len)), qo_len)
    seen = [np.zeros(int(n), int) for n in table.num_pages[owner]]
    partial_owner = np.full(plan.num_partials, -1)
    tiles_of = np.zeros(nnz, int)
    for t in plan.tiles:
        for i in range(t[Q_LEN]):
            token = plan.token_order[t[Q_BEGIN] + i] if t[SHARED] else t[Q_BEGIN] + i
            span = slice(t[PAGE_BEGIN], t[PAGE_END])
            if t[SHARED]:
                np.testing.assert_array_equal(rows[owner[token]][span], rows[t[REQUEST]][span])
                assert t[GROUP] == -1
                assert t[CHUNK] >= 0
            else:
                assert owner[token] == t[REQUEST]
            seen[token][span] += 1
            tiles_of[token] += 1
            if t[CHUNK] >= 0:
                row = plan.merge_indptr[token] + t[CHUNK]
                assert partial_owner[row] == -1
                partial_owner[row] = token
    assert (tiles_of >= 1).all()
    counts = np.diff(plan.merge_indptr)
    np.testing.assert_array_equal(partial_owner, np.repeat(np.arange(nnz), counts))
    assert (tiles_of[counts == 0] == 1).all()  # written by its one tile
    assert (tiles_of[counts > 0] == counts[counts > 0]).all()
    size = table.page_size
    for token in range(nnz):
        r = owner[token]
        own = int(table.kv_len[r]) - qo_len[r] + token - int(indptr[r])
        end = own + 1 if causal else int(table.kv_len[r])
        begin = max(own - window_left, 0) if window_left >= 0 else 0
        assert (seen[token] <= 1).all()
        if end > begin:
            assert (seen[token][begin // size : -(-end // size)] == 1).all()
    for t in plan.tiles[
        plan.tiles[:, SHARED] == 1
    ]:  # not masked: all see all of it, whatever the last pages hold
        for token in plan.token_order[t[Q_BEGIN] : t[Q_BEGIN] + t[Q_LEN]]:
            r = owner[token]
            shortest = (int(table.num_pages[r]) - 1) * size + 1 - qo_len[r] + token - int(indptr[r])
            longest = shortest + size - 1
            assert t[PAGE_END] < table.num_pages[r]
            assert not causal or t[PAGE_END] * size <= shortest + 1
            assert window_left < 0 or t[PAGE_BEGIN] * size >= longest - window_left


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 90)), min_size=1, max_size=8),
    page_size=st.sampled_from([1, 4, 16, 128]),
    causal=st.booleans(),
    window_left=st.sampled_from([-1, 0, 50]),
    batch_invariant=st.booleans(),
    partial=st.booleans(),
    target=st.sampled_from(
        [cpu_target(2), cuda_target(132), PlanTarget(64, 8, 4, 1, 1, 8, 64), PlanTarget(1, 1, 1, 1, 1, 1, 1)]
    ),
)
def test_every_token_sees_its_pages_once(
    requests, page_size, causal, window_left, batch_invariant, partial, target
):
    table = table_of([n for n, _ in requests], page_size)
    qo_len = [min(q, n) if n else q % 3 for n, q in requests]
    plan = plan_attention(
        table,
        np.cumsum([0, *qo_len]),
        causal=causal,
        window_left=window_left,
        batch_invariant=batch_invariant,
        partial=partial,
        target=target,
        **HEADS,
    )
    check_cover(plan, table, qo_len, causal, window_left)
    if partial:
        assert (np.diff(plan.merge_indptr) >= 1).all()


def makespan(plan, slots: int, num_kv_heads: int, overhead: float) -> float:
    """Time of `slots` workers that take (tile, head) pairs in order, in KV tokens."""
    free = [0.0] * slots
    for t in plan.tiles:
        for _ in range(num_kv_heads):
            heapq.heappush(free, heapq.heappop(free) + float(t[PAGE_END] - t[PAGE_BEGIN]) * 16 + overhead)
    return max(free)


@pytest.mark.parametrize(
    "kv_len",
    [
        [65536] + [512] * 31,
        [8192] * 4,
        [4096],
        [1024] * 64,
        [100_000, 50_000, 200, 100],
        list(range(64, 8256, 128)),
    ],
)
@pytest.mark.parametrize("slots", [2, 16, 264])
def test_workers_finish_close_together(kv_len, slots):
    table = table_of(kv_len)
    plan = plan_attention(table, target=PlanTarget(slots, 64, 16, 256, 32, 8, 2048), **HEADS)
    ideal = max(sum(kv_len) * 2 / slots, 256)
    assert makespan(plan, slots, 2, 32) <= 1.35 * ideal + 300


def test_longest_tiles_come_first():
    plan = plan_attention(table_of([16, 4096, 160, 1600]), target=cpu_target(1), **HEADS)
    pages = plan.tiles[:, PAGE_END] - plan.tiles[:, PAGE_BEGIN]
    assert (np.diff(pages) <= 0).all()


@pytest.mark.parametrize("kv_len", [[2000], [3000, 10, 0], [1024] * 8, [700] * 30])
def test_few_requests_are_cut_alike(kv_len):
    """The CUDA kernel merges them by itself: neighbouring tiles, which all run at once."""
    table = table_of(kv_len)
    plan = plan_attention(table, target=cuda_target(132), **HEADS)
    each = plan._plan.chunks_each
    assert 1 < each <= 8
    assert len(plan.tiles) * HEADS["num_kv_heads"] <= 132
    sets = plan.tiles.reshape(len(kv_len), each, 8)
    assert (sets[:, :, CHUNK] == np.arange(each)).all()
    assert (sets[:, :, REQUEST] == np.arange(len(kv_len))[:, None]).all()
    assert (sets[:, 1:, PAGE_BEGIN] == sets[:, :-1, PAGE_END]).all()
    check_cover(plan, table, [1] * len(kv_len), True, -1)


@pytest.mark.parametrize(
    ("kv_len", "change"),
    [
        ([100], {}),  # one chunk
        ([32768], {}),  # more chunks than a cluster has blocks
        ([4096] * 64, {}),  # more tiles than run at once
        ([2000], {"batch_invariant": True}),
        ([2000], {"target": cpu_target(8)}),
        ([2000], {"qo_indptr": np.array([0, 40], np.int32)}),  # the kernel for many query rows
    ],
)
def test_other_requests_are_not_cut_alike(kv_len, change):
    plan = plan_attention(table_of(kv_len), **({"target": cuda_target(132)} | HEADS | change))
    assert plan._plan.chunks_each == 0


def test_prefill_beside_decode_is_cut_as_if_alone():
    """The CUDA kernel runs both kinds side by side: prefill that fills the machine uncut stays uncut."""
    heads = {"num_qo_heads": 32, "num_kv_heads": 8}
    table = table_of([4096] * 8 + [8704])
    qo_indptr = np.array([*range(9), 520], np.int32)
    plan = plan_attention(table, qo_indptr, target=cuda_target(132), **heads)
    large, decode = plan.tiles[: plan._plan.num_large], plan.tiles[plan._plan.num_large :]
    assert (large[:, REQUEST] == 8).all()
    assert (decode[:, REQUEST] < 8).all()
    assert len(large) == 16
    assert (large[:, CHUNK] == -1).all()
    assert (np.bincount(decode[:, REQUEST]) > 1).all()
    check_cover(plan, table, [1] * 8 + [512], True, -1)


@pytest.mark.parametrize(
    ("kv_len", "qo_len", "mixed"),
    [
        ([512], [512], True),  # one round
        ([512] * 16, [512] * 16, False),  # many short tiles, which hide each other's ends
        ([1024] * 8, [1024] * 8, True),  # longer ones
        ([2048, 4096], [2048, 1], True),  # beside decode
        ([8192], [8192], True),  # long tiles
        ([4096] * 32, [16] * 32, False),  # 64 rows: another kernel
    ],
)
def test_large_tiles_run_beside_decode_tiles_where_that_pays(kv_len, qo_len, mixed):
    qo_indptr = np.concatenate([[0], np.cumsum(qo_len)]).astype(np.int32)
    plan = plan_attention(
        table_of(kv_len), qo_indptr, target=cuda_target(132), num_qo_heads=32, num_kv_heads=8
    )
    large = plan.tiles[:, Q_LEN] > 2
    assert plan._plan.num_large == (np.count_nonzero(large) if mixed else 0)
    assert not mixed or large[: plan._plan.num_large].all()


@pytest.mark.parametrize("page_size", [8, 16, 256])
def test_large_tiles_are_cut_between_blocks_of_keys(page_size):
    """128 keys: part of a block would cost the CUDA kernel as much as a whole one."""
    table = table_of([20000], page_size)
    plan = plan_attention(
        table, np.array([0, 96], np.int32), target=cuda_target(132), num_qo_heads=32, num_kv_heads=8
    )
    assert plan._plan.num_large == len(plan.tiles)
    begins = np.unique(plan.tiles[:, PAGE_BEGIN])
    assert len(begins) > 2
    assert (begins * page_size % 128 == 0).all()
    check_cover(plan, table, [96], True, -1)


def test_batch_invariant_chunks_depend_on_the_request_alone():
    def chunks(kv_len, request, slots):
        plan = plan_attention(
            table_of(kv_len), batch_invariant=True, target=PlanTarget(slots, 64, 4, 64, 32, 8, 256), **HEADS
        )
        mine = plan.tiles[plan.tiles[:, REQUEST] == request]
        return sorted(map(tuple, mine[:, [PAGE_BEGIN, PAGE_END]].tolist()))

    alone = chunks([1000], 0, 2)
    # Chunks of a quarter of what lies before them, 4 to 16 pages long.
    assert alone == [
        *((i, i + 4) for i in range(0, 32, 4)),
        *((i, min(i + 8, 63)) for i in range(32, 63, 8)),
    ]
    assert chunks([5, 1000, 60_000], 1, 2) == alone
    assert chunks([1000] * 40, 17, 264) == alone


def test_plan_is_reusable_while_page_counts_stay():
    plan = plan_attention(table_of([20, 40]), **HEADS)
    assert plan.matches(table_of([32, 33]))
    assert not plan.matches(table_of([33, 40]))
    assert not plan.matches(table_of([20, 40], 8))
    assert not plan.matches(table_of([20]))
    indptr = np.array([0, 3, 5], np.int32)
    assert not plan.matches(table_of([20, 40]), indptr)
    ragged = plan_attention(table_of([20, 40]), indptr, **HEADS)
    assert ragged.matches(table_of([21, 41]), [0, 3, 5])
    assert not ragged.matches(table_of([21, 41]), [0, 2, 5])
    assert not ragged.matches(table_of([21, 41]))


def test_plan_is_immutable_and_printable():
    plan = plan_attention(table_of([20, 40]), target=cpu_target(2), **HEADS)
    assert str(plan) == (
        "AttentionPlan(requests=2, pages=5, query_tokens=2, tiles=2, chunks<=1, partial_rows=0, causal=True, "
        "window_left=-1, batch_invariant=False)"
    )
    with pytest.raises(ValueError, match="read-only"):
        plan.tiles[0, 0] = 7
    with pytest.raises(AttributeError):
        plan.tiles = None
    tiles = plan.tiles
    del plan
    assert tiles[:, REQUEST].tolist() == [1, 0]


def test_default_target_follows_the_device_and_the_threads():
    threads = num_threads()
    try:
        set_num_threads(3)
        assert default_target(mx.cpu).slots == 3
        assert default_target(mx.default_stream(mx.cpu)).slots == 3
    finally:
        set_num_threads(threads)
    assert default_target(mx.gpu).slots == cuda_target(132).slots
    assert default_target().slots == default_target(mx.default_device()).slots


def test_empty_plans():
    plan = plan_attention(PageTable([0], [], [], 16), **HEADS)
    assert plan.tiles.shape == (0, 8)
    assert plan.merge_indptr.tolist() == [0]
    plan = plan_attention(table_of([0, 0]), [0, 0, 2], **HEADS)
    assert plan.tiles[:, [REQUEST, Q_LEN, PAGE_BEGIN, PAGE_END, CHUNK]].tolist() == [[1, 2, 0, 0, -1]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"qo_indptr": [0, 1]}, r"qo_indptr must have batch \+ 1 = 3 elements, got 2"),
        ({"qo_indptr": [1, 1, 2]}, r"qo_indptr must start at 0, got 1"),
        ({"num_qo_heads": 7}, r"num_qo_heads must be a multiple of num_kv_heads, got 7 and 2"),
        ({"num_kv_heads": 0}, r"num_qo_heads must be a multiple of num_kv_heads, got 8 and 0"),
        ({"window_left": -2}, r"window_left must be -1 or more, got -2"),
    ],
)
def test_bad_input_is_a_value_error(change, text):
    with pytest.raises(ValueError, match=r"^\[plan_attention\] " + text):
        plan_attention(table_of([20, 40]), **(HEADS | change))


def test_a_plan_does_not_follow_what_the_caller_writes_later():
    indptr = np.array([0, 1, 10], np.int32)
    plan = plan_attention(PageTable([0, 1, 2], [0, 1], [16, 16], 16), indptr, num_qo_heads=4, num_kv_heads=2)
    indptr[:] = [0, 9, 10]
    assert not plan.matches(PageTable([0, 1, 2], [0, 1], [16, 16], 16), indptr)


def test_a_plan_cannot_be_changed_nor_taken_for_another_s():
    table = PageTable.from_pages([[0, 1], [2]], [20, 7], page_size=16)
    indptr = np.array([0, 3, 5], np.int32)
    plan = plan_attention(table, indptr, num_qo_heads=4, num_kv_heads=2)
    for name in ("qo_indptr", "partial", "cascade", "tiles"):
        with pytest.raises(AttributeError):
            setattr(plan, name, getattr(plan, name))
    with pytest.raises(ValueError, match="read-only"):
        plan.qo_indptr[1] = 2
    assert plan.matches(table, indptr)
    indptr[1] = 2
    assert not plan.matches(table, indptr)
    assert plan.matches(table, [0, 3, 5])

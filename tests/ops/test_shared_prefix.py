"""detect_shared_prefix against an obvious oracle: pairs of rows and the pages that they begin with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel_ext import PageTable, detect_shared_prefix

SIZE = 4


def table_of(rows: list[list[int]], last: list[int] | None = None, **kwargs) -> PageTable:
    indptr = np.cumsum([0, *map(len, rows)])
    return PageTable(indptr, [page for row in rows for page in row], last or [1] * len(rows), SIZE, **kwargs)


def shareable(row: list[int], queries: int, causal: bool) -> int:
    """Pages that all query tokens see even if the last page holds but one token."""
    if not row or queries == 0:
        return 0
    first_sees = (len(row) - 1) * SIZE + 1 - queries + 1
    return min(len(row) - 1, max(first_sees, 0) // SIZE) if causal else len(row) - 1


def groups(rows: list[list[int]], limits: list[int]) -> set[tuple[frozenset[int], int, int]]:
    """(members, page_begin, page_end) of every node: the sets of rows that share a page, with the pages they share."""
    held: dict[frozenset[int], list[int]] = {}
    for depth in range(1, max(limits, default=0) + 1):
        by_prefix: dict[tuple[int, ...], set[int]] = {}
        for r, row in enumerate(rows):
            if limits[r] >= depth:
                by_prefix.setdefault(tuple(row[:depth]), set()).add(r)
        for members in by_prefix.values():
            if len(members) > 1:
                held.setdefault(frozenset(members), []).append(depth)
    return {(members, depths[0] - 1, depths[-1]) for members, depths in held.items()}


def nodes(tree) -> set[tuple[frozenset[int], int, int]]:
    return {
        (frozenset(tree.order[first:last].tolist()), int(begin), int(end))
        for first, last, begin, end, _ in tree.nodes
    }


# Few ids, so that rows often agree for a while.
ROWS = st.lists(st.lists(st.integers(0, 1), max_size=7), max_size=7)


def as_pages(rows: list[list[int]]) -> list[list[int]]:
    """Ids under which rows of digits are page rows: equal from the front on, and nowhere else."""
    ids: dict[tuple[int, ...], int] = {}
    return [[ids.setdefault(tuple(row[: i + 1]), len(ids)) for i in range(len(row))] for row in rows]


@settings(max_examples=200, deadline=None)
@given(rows=ROWS, data=st.data(), causal=st.booleans())
def test_nodes_are_the_sets_of_rows_that_share_pages(rows, data, causal):
    rows = as_pages(rows)
    queries = data.draw(st.none() | st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows)))
    indptr = None if queries is None else np.cumsum([0, *queries])
    tree = detect_shared_prefix(table_of(rows), indptr, causal=causal)
    counts = [1] * len(rows) if queries is None else queries
    limits = [shareable(row, q, causal) for row, q in zip(rows, counts, strict=True)]
    assert nodes(tree) == groups(rows, limits)
    for first, last, begin, _, parent in tree.nodes:
        above = [i for i, n in enumerate(tree.nodes) if n[0] <= first and last <= n[1] and n[3] == begin]
        assert ([parent] if parent >= 0 else []) == above[:1]


def test_a_request_that_grew_past_its_neighbour_shares_with_the_next():
    rows = [[0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 1, 0, 0]]
    tree = detect_shared_prefix(table_of(as_pages(rows)))
    rows[0] = [0, 0, 1, 0, 0]
    table = table_of(as_pages(rows))
    kept = detect_shared_prefix(table, previous=tree)
    assert (frozenset({0, 2}), 3, 4) in nodes(kept)
    assert nodes(kept) == nodes(detect_shared_prefix(table))


@settings(max_examples=200, deadline=None)
@given(rows=ROWS, data=st.data())
def test_a_tree_that_is_kept_is_the_tree_that_would_be_made(rows, data):
    tree = detect_shared_prefix(table_of(as_pages(rows)))
    changed = [list(row) for row in rows]
    for _ in range(data.draw(st.integers(0, 3))):
        if changed:
            row = changed[data.draw(st.integers(0, len(changed) - 1))]
            if data.draw(st.booleans()) or not row:
                row.append(data.draw(st.integers(0, 1)))
            else:
                row[data.draw(st.integers(0, len(row) - 1))] ^= 1
    table = table_of(as_pages([*rows, *changed])[len(rows) :])
    kept = detect_shared_prefix(table, previous=tree)
    assert nodes(kept) == nodes(detect_shared_prefix(table))


def test_a_tree_is_kept_while_rows_grow_at_their_ends():
    table = table_of([[0, 1, 2, 10], [0, 1, 2, 11], [0, 5, 6], [7]])
    tree = detect_shared_prefix(table)
    assert detect_shared_prefix(table, previous=tree) is tree
    assert detect_shared_prefix(table.advance(), previous=tree) is tree
    grown = table_of([[0, 1, 2, 10, 12], [0, 1, 2, 11], [0, 5, 6], [7]])
    assert detect_shared_prefix(grown, previous=tree) is tree
    for other in (
        table_of([[0, 1, 3, 10], [0, 1, 2, 11], [0, 5, 6], [7]]),  # another page in a shared place
        table_of([[0, 1, 2, 10], [0, 1, 2, 11], [0, 5, 6]]),  # a row less
        table_of([[0, 1, 2, 10], [0, 1, 2, 11], [0, 5, 6], [0, 1]]),  # a new member
        table_of([[0, 1, 2, 10], [0, 1, 2], [0, 5, 6], [7]]),  # a row that has lost a page
        table_of([[0, 1, 2, 10], [0, 1, 2, 11], [0, 5, 6], [7]], first_page_offset=[0, 1, 0, 0]),
    ):
        assert detect_shared_prefix(other, previous=tree) is not tree
    assert detect_shared_prefix(table, [0, 1, 2, 2, 3], previous=tree) is not tree
    assert detect_shared_prefix(table, causal=False, previous=tree) is not tree


def test_rows_that_ended_together_may_share_more_when_they_grow():
    tree = detect_shared_prefix(table_of([[0, 1], [0, 1, 2]]))
    assert nodes(tree) == {(frozenset({0, 1}), 0, 1)}
    later = table_of([[0, 1, 2, 3], [0, 1, 2, 4]])
    assert nodes(detect_shared_prefix(later, previous=tree)) == {(frozenset({0, 1}), 0, 3)}


def test_early_divergence_does_not_shorten_what_others_share():
    tree = detect_shared_prefix(table_of([[0, 1, 2, 3, 4], [0, 9, 8], [0, 1, 2, 3, 5], [0, 1, 7, 6]]))
    assert nodes(tree) == {
        (frozenset({0, 1, 2, 3}), 0, 1),
        (frozenset({0, 2, 3}), 1, 2),
        (frozenset({0, 2}), 2, 4),
    }
    assert str(tree) == (
        "SharedPrefixTree([0, 2, 3, 1]: pages 0..0, [0, 2, 3]: pages 1..1, [0, 2]: pages 2..3)"
    )


def test_rows_whose_first_page_starts_elsewhere_share_nothing():
    rows = [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    tree = detect_shared_prefix(table_of(rows, first_page_offset=[2, 0, 2]))
    assert nodes(tree) == {(frozenset({0, 2}), 0, 2)}


def test_bad_input_is_a_value_error():
    with pytest.raises(ValueError, match=r"^\[detect_shared_prefix\] qo_indptr must start at 0, got 1"):
        detect_shared_prefix(table_of([[0], [1]]), [1, 1, 2])
    with pytest.raises(ValueError, match=r"^\[page_table\] kv_last_page_len of request 0"):
        detect_shared_prefix(table_of([[0]], last=[9]))

"""Page accounting: free + in use + cached = total, whatever happens."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mlxcel_ext.kvcache.page_allocator import PageAllocator


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from("arlhd"), st.integers(0, 30)), max_size=60))
def test_counts_equal_the_tables_after_every_operation(
    num_pages: int, operations: list[tuple[str, int]]
) -> None:
    allocator = PageAllocator(num_pages)
    tables: list[list[int]] = []
    held: set[int] = set()
    for kind, n in operations:
        used = sorted({page for table in tables for page in table})
        if kind == "a":
            pages = allocator.allocate(n % 4)
            if pages is not None:
                tables.append(pages)
        elif kind == "r" and (shared := sorted(set(used) | held)):
            page = shared[n % len(shared)]
            allocator.retain(page)
            tables.append([page])
        elif kind == "l" and tables:
            for page in tables.pop(n % len(tables)):
                allocator.release(page)
        elif kind == "h" and (loose := [p for p in used if p not in held]):
            page = loose[n % len(loose)]
            allocator.hold(page)
            held.add(page)
        elif kind == "d" and held:
            page = sorted(held)[n % len(held)]
            allocator.drop(page)
            held.remove(page)
        allocator.check(tables, held)


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    allocator = PageAllocator(3)
    assert allocator.allocate(4) is None
    assert allocator.num_free == 3
    assert allocator.allocate(3) is not None


def test_misuse_is_refused() -> None:
    allocator = PageAllocator(2)
    with pytest.raises(ValueError, match="page 0 is free"):
        allocator.retain(0)
    with pytest.raises(ValueError, match="no user"):
        allocator.release(0)
    with pytest.raises(ValueError, match="not in use"):
        allocator.hold(0)
    with pytest.raises(ValueError, match="not held"):
        allocator.drop(0)
    with pytest.raises(ValueError, match="at least 1"):
        PageAllocator(0)

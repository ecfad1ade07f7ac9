"""The prefix tree against a plain list of what was inserted."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from mlxcel_ext.kvcache.page_allocator import PageAllocator
from mlxcel_ext.kvcache.prefix_tree import Cursor, PrefixTree

PAGE = 3


def store(
    tree: PrefixTree, allocator: PageAllocator, tokens: list[int], salt: str | None = None
) -> list[int]:
    """What a request that computed these tokens leaves behind; returns the pages it had."""
    count = -(-len(tokens) // PAGE)
    if allocator.num_free < count:
        tree.evict(count - allocator.num_free)
    pages = allocator.allocate(count)
    assert pages is not None
    table = list(pages)
    for page in (*tree.insert(tokens, table, salt, with_tail=True), *table):
        allocator.release(page)
    tree.begin_step()
    return pages


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


sequences = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(sequences, st.sampled_from([None, "x"])), max_size=10), sequences)
def test_match_finds_the_longest_prefix_that_was_stored(
    stored: list[tuple[list[int], str | None]], query: list[int]
) -> None:
    allocator = PageAllocator(200)
    tree = PrefixTree(allocator, PAGE)
    for tokens, salt in stored:
        store(tree, allocator, tokens, salt)
    best = max((common(tokens, query) for tokens, salt in stored if salt is None), default=0)
    match = tree.match(query)
    assert match.num_tokens == best
    assert len(match.pages) == best // PAGE
    assert (match.partial_page is None) == (best % PAGE == 0)
    allocator.check([], tree.pages())
    assert tree.num_pages == len(list(tree.pages()))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(sequences, min_size=1, max_size=6),
    sequences,
    st.lists(st.sampled_from(["insert", "look", "store", "evict", "clear"]), max_size=12),
    st.data(),
)
def test_a_cursor_changes_what_is_looked_at_and_nothing_else(
    stored: list[list[int]], tokens: list[int], events: list[str], data: st.DataObject
) -> None:
    """Two trees with the same history; in one of them a growing request goes on from its cursor."""
    cursor, count = Cursor(), 0
    allocators = [PageAllocator(100), PageAllocator(100)]
    trees = [PrefixTree(allocator, PAGE) for allocator in allocators]
    tables = [allocator.allocate(-(-len(tokens) // PAGE)) or [] for allocator in allocators]
    for event in events:
        if event == "insert":
            count = data.draw(st.integers(count, len(tokens)))
        other = data.draw(st.sampled_from(stored))
        most = data.draw(st.integers(0, len(tokens)))
        found = []
        for tree, allocator, table, mine in zip(trees, allocators, tables, (cursor, None), strict=True):
            if event == "insert":
                for page in tree.insert(tokens, table, count=count, cursor=mine):
                    allocator.release(page)
            elif event == "look":
                found.append(tree.match_length(tokens, None, mine or Cursor(), count=max(most, count)))
                assert mine is None or found[-1] == tree.match(tokens, count=max(most, count)).num_tokens
            elif event == "store":
                store(tree, allocator, other)
            elif event == "evict":
                tree.evict(2)
            else:
                tree.clear()
            allocator.check([table], tree.pages())
        assert len(set(found)) <= 1
        assert tables[0] == tables[1]
    assert sorted(trees[0].pages()) == sorted(trees[1].pages())


@settings(max_examples=150, deadline=None)
@given(st.lists(sequences, min_size=1, max_size=12), st.integers(0, 8))
def test_every_cached_page_can_be_evicted(stored: list[list[int]], count: int) -> None:
    allocator = PageAllocator(100)
    tree = PrefixTree(allocator, PAGE)
    for tokens in stored:
        store(tree, allocator, tokens)
    cached = allocator.num_cached
    assert tree.evict(count) == min(count, cached)
    allocator.check([], tree.pages())
    assert tree.evict(1000) == cached - min(count, cached)
    assert allocator.num_free == 100
    assert tree.match(stored[0]).num_tokens == 0


class CountingToken(int):
    """A token that counts how often it is compared."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        CountingToken.compared += 1
        return int(self) == other

    def __lt__(self, other: int) -> bool:
        CountingToken.compared += 1
        return int(self) < int(other)


def test_thousands_of_short_prompts_do_not_slow_the_next_one_down() -> None:
    """They are children of one node: looking for a neighbour must not look at all of them."""
    count = 3000
    allocator = PageAllocator(count + 10)
    tree = PrefixTree(allocator, PAGE)
    for n in range(count):
        store(tree, allocator, [CountingToken(n), CountingToken(n % 7)])
    CountingToken.compared = 0
    store(tree, allocator, [CountingToken(count // 2), CountingToken(99)])
    assert tree.match([CountingToken(count // 3), CountingToken(50)]).num_tokens == 1
    assert tree.match([CountingToken(5), CountingToken(5), CountingToken(1)]).num_tokens == 2
    assert CountingToken.compared < 400


def test_the_oldest_of_thousands_is_still_found() -> None:
    allocator = PageAllocator(500)
    tree = PrefixTree(allocator, PAGE)
    for n in range(400):
        store(tree, allocator, [n, 1])
    assert all(tree.match([n, 2]).num_tokens == 1 for n in range(400))


def test_the_least_recently_used_leaf_goes_first() -> None:
    allocator = PageAllocator(20)
    tree = PrefixTree(allocator, PAGE)
    store(tree, allocator, [1, 1, 1, 2, 2, 2])
    store(tree, allocator, [1, 1, 1, 3, 3, 3])
    tree.match([1, 1, 1, 2, 2, 2])
    tree.evict(1)
    assert tree.match([1, 1, 1, 3, 3, 3]).num_tokens == 3
    assert tree.match([1, 1, 1, 2, 2, 2]).num_tokens == 6


def test_a_page_in_use_survives_eviction() -> None:
    allocator = PageAllocator(20)
    tree = PrefixTree(allocator, PAGE)
    store(tree, allocator, [1, 1, 1, 2, 2, 2])
    pages = tree.match([1, 1, 1, 2, 2, 2]).pages
    for page in pages:
        allocator.retain(page)
    assert tree.evict(10) == 0
    for page in pages:
        allocator.release(page)
    assert tree.evict(10) == 2


def test_the_budget_trims_what_no_request_uses() -> None:
    allocator = PageAllocator(20)
    tree = PrefixTree(allocator, PAGE, max_pages=2)
    store(tree, allocator, [1] * 9)
    tree.trim()
    assert (tree.num_pages, allocator.num_cached) == (2, 2)
    none = PrefixTree(PageAllocator(4), PAGE, max_pages=0)
    assert none.insert([1, 2, 3], [0]) == []
    assert none.num_pages == 0


def test_a_longer_tail_replaces_a_shorter_one() -> None:
    allocator = PageAllocator(20)
    tree = PrefixTree(allocator, PAGE)
    store(tree, allocator, [5])
    store(tree, allocator, [5, 6])
    store(tree, allocator, [5])
    assert tree.num_pages == 1
    store(tree, allocator, [5, 6, 7, 8])
    assert tree.num_pages == 2
    assert tree.match([5, 6, 9]).num_tokens == 2


def test_an_equal_prefix_computed_twice_is_kept_once() -> None:
    allocator = PageAllocator(20)
    tree = PrefixTree(allocator, PAGE)
    first = store(tree, allocator, [1, 2, 3])
    mine = allocator.allocate(1)
    assert mine is not None
    table = list(mine)
    assert tree.insert([1, 2, 3], table) == mine
    assert table == first
    allocator.release(mine[0])
    allocator.check([table], tree.pages())


def test_stale_heap_entries_stay_bounded() -> None:
    allocator = PageAllocator(20)
    tree = PrefixTree(allocator, PAGE)
    for i in range(1000):
        store(tree, allocator, [1, 2][: 1 + i % 2])
        if i % 2:
            tree.evict(1)
    assert len(tree._leaves) <= 2 * tree.num_pages + 65


def test_clear_forgets_pages_in_use_too() -> None:
    allocator = PageAllocator(20)
    tree = PrefixTree(allocator, PAGE)
    store(tree, allocator, [1, 2, 3, 4])
    page = tree.match([1, 2, 3]).pages[0]
    allocator.retain(page)
    tree.clear()
    assert tree.match([1, 2, 3]).num_tokens == 0
    allocator.check([[page]], [])


def test_a_cursor_never_says_more_than_was_asked_for() -> None:
    """Hypothesis found both: a look at fewer tokens than an earlier one, and a look at pages not adopted since."""
    allocator = PageAllocator(100)
    tree, tokens, cursor = PrefixTree(allocator, PAGE), list(range(3 * PAGE)), Cursor()
    store(tree, allocator, tokens)
    tree.begin_step()
    assert tree.match_length(tokens, None, cursor) == 3 * PAGE
    assert tree.match_length(tokens, None, cursor, count=PAGE) == PAGE
    assert tree.match_length(tokens, None, cursor) == 3 * PAGE
    own = allocator.allocate(3)
    assert own is not None
    for page in (replaced := tree.insert(tokens, own, cursor=cursor)):
        allocator.release(page)
    assert len(replaced) == 3
    assert sorted(own) == sorted(tree.pages())

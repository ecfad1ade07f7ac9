"""Prefix cache: which page holds the KV of which token prefix. Pure: no arrays."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass

from .page_allocator import PageAllocator


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Pages whose KV a request may adopt: whole pages to share, and one to copy of which it uses a part."""

    pages: tuple[int, ...] = ()
    partial_page: int | None = None
    num_tokens: int = 0


class _Node:
    """One page. Its path from the root spells the tokens whose KV the page completes."""

    __slots__ = ("born", "children", "depth", "key", "keys", "page", "parent", "salt", "stamp")

    def __init__(self, key: tuple[int, ...], page: int, parent: _Node | None, stamp: int, born: int) -> None:
        self.key = key
        self.page = page
        self.parent = parent  # None: a root, or out of the tree
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.stamp = stamp
        self.born = born
        self.salt: str | None = None  # of a root
        # The tokens of a child -> the child. A key shorter than a page is a tail: it has no children.
        self.children: dict[tuple[int, ...], _Node] = {}
        self.keys: list[
            tuple[int, ...]
        ] = []  # of the children, sorted: those that begin alike are neighbours

    @property
    def is_leaf(self) -> bool:
        return self.parent is not None and not self.children


@dataclass(slots=True)
class Cursor:
    """The deepest whole page to which a request's tokens were followed: the next look goes on from there."""

    node: _Node | None = None

    def pages(self) -> list[int]:
        """The pages up to here; none where the node has left the tree."""
        pages: list[int] = []
        node = self.node
        while node is not None and node.parent is not None:
            pages.append(node.page)
            node = node.parent
        return pages[::-1]


class PrefixTree:
    """A radix tree with pages for digits; one root per cache salt.

    The tree adds nothing to a page's users: a page that only the tree holds is *cached* and may be evicted,
    least recently used leaf first. A request uses every page on its path, so a page in use never hangs
    below a page that can be evicted, and every cached page can be; but for requests that have dropped pages behind
    a sliding window: what they dropped can be evicted when they have ended.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, max_pages: int | None = None) -> None:
        self.max_pages = allocator.num_pages if max_pages is None else max_pages
        self.num_pages = 0
        self.evictions = 0
        #: Changes with every insertion: what did not match before may match now.
        self.version = 0
        self._allocator = allocator
        self._page_size = page_size
        self._roots: dict[str | None, _Node] = {}
        self._clock = 0
        self._order = 0
        self._step = 0
        # (stamp, order, node): at least one entry for each leaf; stale ones are skipped or renewed when popped.
        self._leaves: list[tuple[int, int, _Node]] = []

    def begin_step(self) -> None:
        """A new step is planned: pages inserted from now on are written in it, not before it."""
        self._step += 1

    def match(
        self, tokens: Sequence[int], salt: str | None = None, *, count: int | None = None
    ) -> PrefixMatch:
        """Find the longest cached prefix of the first ``count`` tokens. Nothing is consumed; the caller retains.

        Whole pages may be shared in the step that writes them. A page to copy from must be older: copies
        come first in a step.
        """
        node, partial, num_tokens = self._follow(self._roots.get(salt), tokens, count)
        return PrefixMatch(tuple(Cursor(node).pages()), None if partial is None else partial.page, num_tokens)

    def match_length(
        self, tokens: Sequence[int], salt: str | None, cursor: Cursor, *, count: int | None = None
    ) -> int:
        """The num_tokens of match(); looks only at what lies behind the cursor, and moves it on."""
        node = self._resume(cursor, salt)
        while count is not None and node is not None and node.depth * self._page_size > count:
            node = node.parent  # an earlier look went further
        cursor.node, _, num_tokens = self._follow(node, tokens, count)
        return num_tokens

    def _resume(self, cursor: Cursor | None, salt: str | None) -> _Node | None:
        """The cursor's node, or the root where that has left the tree."""
        if cursor is None or cursor.node is None or cursor.node.parent is None:
            return self._roots.get(salt)
        return cursor.node

    def _follow(
        self, node: _Node | None, tokens: Sequence[int], count: int | None
    ) -> tuple[_Node | None, _Node | None, int]:
        """From a node on: the last whole page, the page that holds a part more, and the tokens up to its end."""
        if node is None:
            return None, None, 0
        self._clock += 1
        node.stamp = self._clock
        count = len(tokens) if count is None else count
        size = self._page_size
        position = node.depth * size
        while count - position >= size:
            child = node.children.get(tuple(tokens[position : position + size]))
            if child is None:
                break
            child.stamp = self._clock
            node, position = child, position + size
        partial, shared = self._most_in_common(node, tuple(tokens[position : min(position + size, count)]))
        if partial is not None:
            partial.stamp = self._clock
        return node, partial, position + shared

    def _most_in_common(self, node: _Node, tail: tuple[int, ...]) -> tuple[_Node | None, int]:
        """The child, older than this step, with the longest common beginning, and its length."""
        best, shared = None, 0
        place = bisect_left(node.keys, tail)
        # The further from its place, to either side, the less a key has in common with the tail.
        for places in (range(place - 1, -1, -1), range(place, len(node.keys))):
            for i in places:
                common = _common_prefix(node.keys[i], tail)
                if common <= shared:
                    break
                child = node.children[node.keys[i]]
                if child.born < self._step:
                    best, shared = child, common
                    break
        return best, shared

    def insert(
        self,
        tokens: Sequence[int],
        pages: MutableSequence[int],
        salt: str | None = None,
        *,
        count: int | None = None,
        first: int = 0,
        with_tail: bool = False,
        cursor: Cursor | None = None,
    ) -> list[int]:
        """Hold the pages of a request whose KV of the first ``count`` tokens is written, in the present step at the
        latest.

        Where the tree has another page for the same prefix, that one takes the place of the request's in
        ``pages``; the replaced pages are returned, for the caller to release once nothing planned uses them.
        Pages before ``first`` are the request's no more: where the tree does not hold them, it takes nothing.
        With a cursor, only what lies behind it is looked at, and it moves on.
        with_tail also holds a last page that is not full, for others to copy from; the request must not
        write to it any more.
        """
        size = self._page_size
        count = len(tokens) if count is None else count
        full = count // size
        tail = tuple(tokens[full * size : count]) if with_tail else ()
        if self.max_pages == 0 or not (full or tail):
            return []
        self._clock += 1
        self.version += 1
        node = self._resume(cursor, salt)
        if node is None:
            node = self._roots[salt] = _Node((), -1, None, 0, 0)
            node.salt = salt
        while node.parent is not None and (
            node.depth > full or (node.depth > first and pages[node.depth - 1] != node.page)
        ):
            node = node.parent  # a look has moved the cursor over pages that the request did not adopt
        replaced: list[int] = []
        for i in range(node.depth, full):
            key = tuple(tokens[i * size : (i + 1) * size])
            child = node.children.get(key)
            if child is None:
                if i < first:
                    tail = ()
                    break
                child = self._add(node, key, pages[i])
            elif i >= first and child.page != pages[i]:
                self._allocator.retain(child.page)
                replaced.append(pages[i])
                pages[i] = child.page
            child.stamp = self._clock
            node = child
        if cursor is not None:
            cursor.node = node
        if tail:
            place = bisect_left(node.keys, tail)
            if place < len(node.keys) and node.keys[place][: len(tail)] == tail:
                node.children[node.keys[place]].stamp = self._clock  # it says all that the tail says
            else:
                self._add(node, tail, pages[full])
        return replaced

    def _add(self, parent: _Node, key: tuple[int, ...], page: int) -> _Node:
        child = _Node(key, page, parent, self._clock, self._step)
        parent.children[key] = child
        insort(parent.keys, key)
        self._allocator.hold(page)
        self.num_pages += 1
        self._push(child)
        for size in range(1, len(key)):
            tail = parent.children.get(key[:size])
            if tail is not None and self._allocator.users(tail.page) == 0:
                self._remove(tail)  # the new page says all that the tail says
        return child

    def _push(self, leaf: _Node) -> None:
        self._order += 1
        heapq.heappush(self._leaves, (leaf.stamp, self._order, leaf))
        if len(self._leaves) > 2 * self.num_pages + 64:
            live = {id(node): (node.stamp, order, node) for _, order, node in self._leaves if node.is_leaf}
            self._leaves = list(live.values())
            heapq.heapify(self._leaves)

    def _remove(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[node.key]
        del parent.keys[bisect_left(parent.keys, node.key)]
        node.parent = None
        self.num_pages -= 1
        self._allocator.drop(node.page)
        if parent.children:
            return
        if parent.parent is not None:
            self._push(parent)
        else:
            del self._roots[parent.salt]

    def evict(self, count: int) -> int:
        """Free up to ``count`` cached pages, least recently used first; returns how many."""
        freed = 0
        in_use: list[_Node] = []
        while freed < count and self._leaves:
            stamp, _, node = heapq.heappop(self._leaves)
            if not node.is_leaf:
                continue
            if stamp != node.stamp:
                self._push(node)
            elif self._allocator.users(node.page):
                in_use.append(node)
            else:
                self._remove(node)
                freed += 1
        for node in in_use:
            self._push(node)
        self.evictions += freed
        return freed

    def trim(self) -> None:
        """Evict what exceeds the budget; pages in use count, and go when they are released."""
        if self.num_pages > self.max_pages:
            self.evict(self.num_pages - self.max_pages)

    def clear(self) -> None:
        """Forget everything, pages in use too: for when their contents cannot be trusted."""
        nodes = list(self._nodes())
        self._roots = {}
        self._leaves = []
        self.num_pages = 0
        for node in nodes:
            node.parent = None
            self._allocator.drop(node.page)

    def pages(self) -> Iterator[int]:
        """Every page that the tree holds."""
        return (node.page for node in self._nodes())

    def _nodes(self) -> Iterator[_Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count

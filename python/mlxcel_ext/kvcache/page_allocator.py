"""Who holds which page of the pool. Pure: no arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class PageAllocator:
    """Counts the users of every page.

    A page is *free*, *in use* (by at least one request), or *cached* (held by the prefix tree alone), so
    ``num_free + num_in_use + num_cached == num_pages`` always. A page in use may be held by the tree too.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"[page_allocator] num_pages must be at least 1; got {num_pages}.")
        self.num_pages = num_pages
        self.num_cached = 0
        #: Grows whenever a page stops being in use: a failed admission is worth another try only then.
        self.releases = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._users = [0] * num_pages
        self._held = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        return self.num_pages - len(self._free) - self.num_cached

    def users(self, page: int) -> int:
        """Requests that use the page."""
        return self._users[page]

    def allocate(self, count: int) -> list[int] | None:
        """Take pages for one request, or None (and nothing taken) where too few are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def retain(self, page: int) -> None:
        """Add a user to a page that is in use or cached."""
        if self._users[page] == 0:
            if not self._held[page]:
                raise ValueError(f"[page_allocator] page {page} is free: it cannot be shared.")
            self.num_cached -= 1
        self._users[page] += 1

    def release(self, page: int) -> None:
        """Take a user away; a page without users is cached where the tree holds it, else free."""
        if self._users[page] == 0:
            raise ValueError(f"[page_allocator] page {page} has no user to release.")
        self._users[page] -= 1
        if self._users[page] == 0:
            self.releases += 1
            if self._held[page]:
                self.num_cached += 1
            else:
                self._free.append(page)

    def hold(self, page: int) -> None:
        """The prefix tree takes a page that a request uses."""
        if self._users[page] == 0 or self._held[page]:
            raise ValueError(f"[page_allocator] page {page} is not in use, or is held already.")
        self._held[page] = 1

    def drop(self, page: int) -> None:
        """The prefix tree lets go of a page; without users it becomes free."""
        if not self._held[page]:
            raise ValueError(f"[page_allocator] page {page} is not held by the tree.")
        self._held[page] = 0
        if self._users[page] == 0:
            self.num_cached -= 1
            self._free.append(page)

    def check(self, tables: Iterable[Iterable[int]], held: Iterable[int]) -> None:
        """Raise AssertionError unless the counts equal the requests' tables and the tree's pages."""
        users = Counter(page for table in tables for page in table)
        tree = set(held)
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        for page in range(self.num_pages):
            assert self._users[page] == users[page], (
                f"page {page}: {self._users[page]} users, tables say {users[page]}"
            )
            assert bool(self._held[page]) == (page in tree), f"page {page}: the tree disagrees"
            assert (page in free) == (users[page] == 0 and page not in tree), (
                f"page {page}: free list disagrees"
            )
        assert self.num_cached == sum(1 for page in tree if not users[page]), "the cached count is off"
        assert self.num_free + self.num_in_use + self.num_cached == self.num_pages

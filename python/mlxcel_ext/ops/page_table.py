"""The page table of a batch: which pages hold the keys and values of each request."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .. import _ext
from .device import Stream, on_cpu, to_device

Int32 = npt.NDArray[np.int32]

_INT32_MAX = 2**31 - 1


def as_int32(op: str, name: str, value: npt.ArrayLike) -> Int32:
    """``value`` as a contiguous one-dimensional int32 array; ValueError where it does not fit."""
    if isinstance(value, np.ndarray) and value.dtype == np.int32 and value.ndim == 1:
        return np.ascontiguousarray(value)
    a = np.asarray(value)
    if a.size == 0:
        a = a.astype(np.int32)
    if a.ndim != 1 or a.dtype.kind not in "iu":
        raise ValueError(
            f"[{op}] {name} must be integers of one dimension, got {a.dtype} of shape {a.shape}."
        )
    if a.size and (a.max() > _INT32_MAX or a.min() < -_INT32_MAX - 1):
        raise ValueError(f"[{op}] {name} must fit int32, got values from {a.min()} to {a.max()}.")
    return np.ascontiguousarray(a, np.int32)


def as_int(op: str, name: str, value: object) -> int:
    """``value`` as an int; ValueError where it is none: a float, a bool, an array."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"[{op}] {name} must be an integer, got {value!r}.")
    return int(value)


def check_indptr(op: str, name: str, indptr: Int32, batch: int) -> None:
    """ValueError unless ``indptr`` has ``batch + 1`` elements, starts at 0 and never falls."""
    if indptr.size != batch + 1:
        raise ValueError(f"[{op}] {name} must have batch + 1 = {batch + 1} elements, got {indptr.size}.")
    if indptr[0] != 0:
        raise ValueError(f"[{op}] {name} must start at 0, got {indptr[0]}.")
    falls = indptr[1:] < indptr[:-1]
    if falls.any():
        r = int(falls.argmax())
        raise ValueError(f"[{op}] {name} must not fall, got {indptr[r]} then {indptr[r + 1]} at request {r}.")


class PageTable:
    """Pages of each request of a batch, in compressed rows, on the host and (made once) on the device.

    Token ``t`` of request ``r`` lies at flat place ``first_page_offset[r] + t`` of the row of pages
    ``kv_indices[kv_indptr[r]:kv_indptr[r + 1]]``: page ``place // page_size``, offset ``place % page_size``.
    Immutable: do not write to the arrays after construction.

    Parameters
    ----------
    kv_indptr : array_like
        int32 ``[batch + 1]``, starts at 0; request ``r`` has ``kv_indptr[r + 1] - kv_indptr[r]`` pages.
    kv_indices : array_like
        int32, page ids; entries from ``kv_indptr[-1]`` on are never read.
    kv_last_page_len : array_like
        int32 ``[batch]``, tokens up to the end in the last page, 1 to ``page_size``; ignored for a request
        without pages, which has ``kv_len`` 0.
    page_size : int
        Tokens a page, a power of two from 1 to 256.
    first_page_offset : array_like, optional
        int32 ``[batch]``, tokens at the front of the first page that are no longer the request's (a sliding
        window that has moved on).

    Notes
    -----
    Nothing is checked but array forms: ``validate`` checks the contents, and every op calls it once a table.
    Arrays that can be written to are copied, and the table's own are read-only.

    Examples
    --------
    >>> table = PageTable([0, 2, 3], [7, 1, 4], [3, 16], page_size=16)
    >>> table.kv_len
    array([19, 16], dtype=int32)
    """

    __slots__ = (
        "_attention_table",
        "_checked_pages",
        "_device",
        "_first_page_offset",
        "_kv_indices",
        "_kv_indptr",
        "_kv_last_page_len",
        "_kv_len",
        "_page_size",
        "_room",
        "_slots",
        "_slots_on_device",
    )

    def __init__(
        self,
        kv_indptr: npt.ArrayLike,
        kv_indices: npt.ArrayLike,
        kv_last_page_len: npt.ArrayLike,
        page_size: int,
        first_page_offset: npt.ArrayLike | None = None,
    ) -> None:
        self._kv_indptr = _frozen("kv_indptr", kv_indptr)
        self._kv_indices = _frozen("kv_indices", kv_indices)
        self._kv_last_page_len = _frozen("kv_last_page_len", kv_last_page_len)
        self._first_page_offset = (
            None if first_page_offset is None else _frozen("first_page_offset", first_page_offset)
        )
        self._page_size = as_int("page_table", "page_size", page_size)
        self._checked_pages: int | None = None
        self._kv_len: Int32 | None = None
        self._room: int | None = None
        self._slots: Int32 | None = None  # of decode
        self._device: dict[tuple[str, bool], mx.array] = {}  # by name and whether the CPU reads it
        self._slots_on_device: tuple[Int32 | None, bool, mx.array] | None = None
        self._attention_table: tuple[Int32 | None, bool, _ext.AttentionTable] | None = None

    @property
    def kv_indptr(self) -> Int32:
        return self._kv_indptr

    @property
    def kv_indices(self) -> Int32:
        return self._kv_indices

    @property
    def kv_last_page_len(self) -> Int32:
        return self._kv_last_page_len

    @property
    def first_page_offset(self) -> Int32 | None:
        return self._first_page_offset

    @property
    def page_size(self) -> int:
        return self._page_size

    @classmethod
    def from_pages(
        cls,
        pages: Sequence[Sequence[int]],
        kv_len: Sequence[int],
        page_size: int,
        first_page_offset: Sequence[int] | None = None,
    ) -> PageTable:
        """Table of requests given as lists of page ids and token counts.

        A request must have exactly the pages that its tokens need; ValueError otherwise.
        """
        page_size = as_int("page_table", "page_size", page_size)
        if page_size < 1:
            raise ValueError(f"[page_table] page_size must be a power of two from 1 to 256, got {page_size}.")
        if len(pages) != len(kv_len):
            raise ValueError(
                f"[page_table] pages and kv_len must have one entry a request, got {len(pages)} and {len(kv_len)}."
            )
        offsets = [0] * len(pages) if first_page_offset is None else first_page_offset
        last = []
        for r, (ids, n, offset) in enumerate(zip(pages, kv_len, offsets, strict=True)):
            wanted = -(-(n + offset) // page_size) if n > 0 else 0
            if len(ids) != wanted:
                raise ValueError(
                    f"[page_table] request {r}: {n} tokens need {wanted} pages of {page_size}, got {len(ids)}."
                )
            last.append(n + offset - (wanted - 1) * page_size if wanted else 0)
        indptr = np.zeros(len(pages) + 1, np.int32)
        np.cumsum([len(ids) for ids in pages], out=indptr[1:])
        indices = np.fromiter((i for ids in pages for i in ids), np.int64, int(indptr[-1]))
        return cls(indptr, indices, last, page_size, first_page_offset)

    def __repr__(self) -> str:
        try:
            self.validate()
        except ValueError as error:
            return f"PageTable(malformed: {error})"
        return (
            f"PageTable(batch={self.batch}, pages={int(self.kv_indptr[-1])}, page_size={self.page_size}, "
            f"tokens={int(self.kv_len.sum())})"
        )

    @property
    def batch(self) -> int:
        """Number of requests."""
        return self._kv_last_page_len.size

    @property
    def num_pages(self) -> Int32:
        """int32 ``[batch]``, pages of each request."""
        return self._kv_indptr[1:] - self._kv_indptr[:-1]

    @property
    def kv_len(self) -> Int32:
        """int32 ``[batch]``, tokens of each request."""
        if self._kv_len is None:
            pages = self.num_pages
            n = (pages - 1) * self.page_size + self.kv_last_page_len
            if self.first_page_offset is not None:
                n = n - self.first_page_offset
            self._kv_len = np.where(pages > 0, n, 0).astype(np.int32)
        return self._kv_len

    def validate(self, num_pages: int | None = None) -> None:
        """Check the contents; with ``num_pages``, the pool's, the page ids too.

        Raises
        ------
        ValueError
            Naming the request and the field. A table that passed is not checked again.
        """
        limit = _INT32_MAX if num_pages is None else num_pages
        if self._checked_pages is not None and self._checked_pages <= limit:
            return
        op = "page_table"
        size, batch = self.page_size, self.kv_last_page_len.size
        if not 1 <= size <= 256 or size & (size - 1):
            raise ValueError(f"[{op}] page_size must be a power of two from 1 to 256, got {size}.")
        check_indptr(op, "kv_indptr", self.kv_indptr, batch)
        used = int(self.kv_indptr[-1])
        if used > self.kv_indices.size:
            raise ValueError(
                f"[{op}] kv_indices must have kv_indptr[-1] = {used} ids, got {self.kv_indices.size}."
            )
        if used * size > _INT32_MAX:
            raise ValueError(f"[{op}] a batch must have less than 2^31 tokens, got {used} pages of {size}.")
        last = self.kv_last_page_len
        # Of 1 to size, and nothing else, the predecessor has neither a bit of size or above nor a sign.
        wrong = (last - 1) & -size
        if wrong.any():
            owns = self.num_pages > 0
            _check_requests(owns & (wrong != 0), "kv_last_page_len", last, f"in 1..{size}")
        offset = self.first_page_offset
        if offset is not None:
            if offset.size != batch:
                raise ValueError(f"[{op}] first_page_offset must have {batch} elements, got {offset.size}.")
            pages = self.num_pages
            room = np.where(pages == 1, last, size)
            wanted = "0 or more and less than the first page's tokens"
            _check_requests(
                (pages > 0) & ((offset < 0) | (offset >= room)), "first_page_offset", offset, wanted
            )
        ids = self.kv_indices[:used]
        most = int(ids.view(np.uint32).max(initial=0))  # negative ids are the largest
        if used and most >= limit:
            i = int((ids.view(np.uint32) >= limit).argmax())
            r = int(np.searchsorted(self.kv_indptr, i, "right")) - 1
            raise ValueError(
                f"[{op}] kv_indices of request {r} must be page ids in 0..{limit - 1}, got {ids[i]} at its "
                f"page {i - self.kv_indptr[r]}."
            )
        self._checked_pages = most + 1 if used else 0

    @property
    def room(self) -> int:
        """Tokens that fit into the last page of every request; 0 where a request has no page."""
        if self._room is None:
            self.validate()
            most = int(self._kv_last_page_len.max(initial=0))
            self._room = self._page_size - most if (self.num_pages > 0).all() else 0
        return self._room

    def advance(self) -> PageTable:
        """The table of the next decode step: one token more for each request, in the page that is its last.

        What stays the same is shared with this table, checks and device arrays included. ValueError where
        ``room`` is 0.
        """
        if self.room < 1:
            raise ValueError(
                f"[page_table] advance: room must be 1 or more, got {self.room}: a page is full."
            )
        table = PageTable.__new__(PageTable)
        table._kv_indptr = self._kv_indptr
        table._kv_indices = self._kv_indices
        table._kv_last_page_len = _read_only(self._kv_last_page_len + 1)
        table._first_page_offset = self._first_page_offset
        table._page_size = self._page_size
        table._checked_pages = self._checked_pages
        table._kv_len = None
        table._room = self.room - 1
        table._slots = None if self._slots is None else _read_only(self._slots + 1)
        table._device = {key: a for key, a in self._device.items() if key[0] != "kv_last_page_len"}
        table._slots_on_device = None
        table._attention_table = None
        return table

    def slots(self, qo_indptr: npt.ArrayLike | None = None) -> Int32:
        """Flat slots ``page * page_size + offset`` of the new tokens, the last ``qo_len`` of each request.

        Parameters
        ----------
        qo_indptr : array_like, optional
            int32 ``[batch + 1]``, new tokens of each request; None: one token a request.

        Returns
        -------
        numpy.ndarray
            int32 ``[qo_indptr[-1]]``.

        Raises
        ------
        ValueError
            Where a request has more new tokens than tokens, or a slot does not fit int32.
        """
        self.validate()
        if qo_indptr is None:
            if self._slots is None:
                self._slots = self._decode_slots()
            return self._slots
        indptr = as_int32("page_table", "qo_indptr", qo_indptr)
        check_indptr("page_table", "qo_indptr", indptr, self.batch)
        counts = np.diff(indptr)
        lacking = self.kv_len < counts
        if lacking.any():
            r = int(lacking.argmax())
            raise ValueError(
                f"[page_table] qo_indptr: request {r} has {counts[r]} new tokens, but only {self.kv_len[r]} tokens."
            )
        size = self._page_size
        ends = self._kv_indptr[1:] * size + (
            self._kv_last_page_len - size
        )  # flat places in kv_indices * page_size
        places = np.repeat(ends - indptr[1:], counts) + np.arange(indptr[-1], dtype=np.int32)
        return self._slots_of(self._kv_indices[places // size], places % size)

    def _decode_slots(self) -> Int32:
        lacking = self.num_pages == 0
        if lacking.any():
            r = int(lacking.argmax())
            raise ValueError(f"[page_table] qo_indptr: request {r} has 1 new tokens, but only 0 tokens.")
        return self._slots_of(self._kv_indices[self._kv_indptr[1:] - 1], self._kv_last_page_len - 1)

    def _slots_of(self, pages: Int32, offsets: Int32) -> Int32:
        assert self._checked_pages is not None
        if self._checked_pages * self._page_size > _INT32_MAX:
            slots = pages.astype(np.int64) * self._page_size + offsets
            if slots.size and slots.max() > _INT32_MAX:
                raise ValueError(f"[page_table] slots must fit int32, got {slots.max()}.")
            return _read_only(slots.astype(np.int32))
        return _read_only(pages * self._page_size + offsets)

    def slots_on_device(self, qo_indptr: Int32 | None, num_pages: int, stream: Stream = None) -> mx.array:
        """``slots`` as an mx.array for ops on ``stream``, made once for one ``qo_indptr``; checks ids against the
        pool."""
        self.validate(num_pages)
        made, cpu = self._slots_on_device, on_cpu(stream)
        if made is None or made[1] != cpu or not _same(made[0], qo_indptr):
            slots = to_device(self.slots(qo_indptr), stream)
            made = self._slots_on_device = (unchanging(qo_indptr), cpu, slots)
        return made[2]

    def on_device(self, qo_indptr: Int32 | None = None, stream: Stream = None) -> _ext.AttentionTable:
        """The arrays that attention on ``stream`` reads, made once (for one ``qo_indptr``)."""
        made, cpu = self._attention_table, on_cpu(stream)
        if made is None or made[1] != cpu or not _same(made[0], qo_indptr):
            table = _ext.AttentionTable(
                self._array("kv_indptr", self._kv_indptr, stream),
                self._array("kv_indices", self._kv_indices, stream),
                self._array("kv_last_page_len", self._kv_last_page_len, stream),
                None if qo_indptr is None else to_device(qo_indptr, stream),
                None
                if self._first_page_offset is None
                else self._array("first_page_offset", self._first_page_offset, stream),
            )
            made = self._attention_table = (unchanging(qo_indptr), cpu, table)
        return made[2]

    def _array(self, name: str, host: Int32, stream: Stream) -> mx.array:
        key = name, on_cpu(stream)
        made = self._device.get(key)
        if made is None:
            made = self._device[key] = to_device(host, stream)
        return made


def unchanging(qo_indptr: Int32 | None) -> Int32 | None:
    """Itself where nobody can write to it, else a copy: what was made for it must not be taken for another."""
    if qo_indptr is None or not qo_indptr.flags.writeable:
        return qo_indptr
    return _read_only(qo_indptr.copy())


def _same(kept: Int32 | None, given: Int32 | None) -> bool:
    if kept is given:
        return True
    return kept is not None and given is not None and np.array_equal(kept, given)


def _read_only(a: Int32) -> Int32:
    a.flags.writeable = False
    return a


def _frozen(name: str, value: npt.ArrayLike) -> Int32:
    """``value`` as int32 that nobody can change any more: what validate() has checked is what kernels read."""
    a = as_int32("page_table", name, value)
    if isinstance(value, list | tuple):
        return _read_only(a)
    base = a.base  # what owns the memory of a view, an array or another library's buffer
    owned = base is None or (isinstance(base, np.ndarray) and not base.flags.writeable)
    return a if owned and not a.flags.writeable else _read_only(a.copy())


def _check_requests(bad: npt.NDArray[np.bool_], field: str, values: Int32, wanted: str) -> None:
    if bad.any():
        r = int(bad.argmax())
        raise ValueError(f"[page_table] {field} of request {r} must be {wanted}, got {values[r]}.")

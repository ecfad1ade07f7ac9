"""Planning of attention launches on the host: tiles, chunks of long requests, and their merges."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .. import _ext
from ..outcomes import CascadeDeclined, FusedCascade
from .arguments import argument_errors
from .device import Stream, on_cpu, to_device
from .page_table import Int32, PageTable, as_int32, check_indptr, unchanging

PlanTarget = _ext.PlanTarget


@functools.cache
def cpu_target(threads: int) -> _ext.PlanTarget:
    """Target of the CPU kernels with that many threads."""
    return _ext.PlanTarget(
        slots=threads,
        tile_rows=64,
        rows_per_token=4,
        min_chunk_tokens=256,
        tile_overhead=32,
        max_waves=8,
        invariant_chunk_tokens=2048,
        takes_turns=True,
    )


@functools.cache
def cuda_target(num_sms: int) -> _ext.PlanTarget:
    """Target of the CUDA kernels on a GPU with ``num_sms`` multiprocessors."""
    # H200, 2026-11-29: chunks of 128 tokens cost 10 % at 4096 tokens of one request (more states to merge); fewer
    # than 8 waves leave skewed batches unbalanced (2,850 instead of 4,060 GB/s).
    return _ext.PlanTarget(
        slots=num_sms,
        tile_rows=128,
        rows_per_token=64,
        min_chunk_tokens=256,
        tile_overhead=128,
        max_waves=16,
        invariant_chunk_tokens=2048,
        small_rows=32,  # more take the ragged kernels, two blocks a multiprocessor
        large_slots=2 * num_sms,
        mixed_rows=64,  # one block a multiprocessor, which runs large tiles and decode tiles
        max_cluster=8,  # clusters of 16 take 20 % longer than merging through memory (2026-11-30)
    )


@functools.cache
def metal_target(gpu_cores: int) -> _ext.PlanTarget:
    """Target of the Metal kernels on an Apple GPU with ``gpu_cores`` cores. Not tuned: it has never run on one."""
    return _ext.PlanTarget(
        slots=gpu_cores * 4,  # threadgroups of 256 threads that a core holds at once
        tile_rows=32,  # rows of the matrix kernel's threadgroup: more would read K and V again
        rows_per_token=16,
        min_chunk_tokens=256,
        tile_overhead=64,
        max_waves=8,
        invariant_chunk_tokens=2048,
    )


def default_target(stream: mx.Stream | mx.Device | None = None) -> _ext.PlanTarget:
    """Target of the device that ``stream`` (default: MLX's default device) runs on."""
    if on_cpu(stream):
        return cpu_target(_ext.num_threads())
    if mx.metal.is_available():
        return metal_target(_apple_gpu_cores())
    return cuda_target(_multiprocessors())


@functools.cache
def _apple_gpu_cores() -> int:
    # MLX tells the architecture, not the count of cores: g base, s Pro, c Max, d Ultra. It steers only how many
    # chunks long requests are cut into.
    cores = {"p": 5, "g": 10, "s": 16, "c": 36, "d": 64}
    return cores.get(str(mx.device_info()["architecture"])[-1:], 10)


@functools.cache
def _multiprocessors() -> int:
    # MLX does not tell the count; an H200 has 132, and a plan for it suits its neighbours.
    return 132


class AttentionPlan:
    """Tiles of an attention launch, from ``plan_attention`` or ``plan_cascade``. Immutable.

    Holds page spans, not token counts: it serves every layer of a step, and every later step as long as no
    request gains or loses a page or a query token (``matches``) and shared pages stay where they are.

    Attributes
    ----------
    tiles : numpy.ndarray
        int32 ``[num_tiles, 8]``, longest first: request, q_begin, q_len, page_begin, page_end, chunk,
        shared, group (csrc/params/paged_attention.h).
    token_order : numpy.ndarray
        int32, the query tokens of tiles that are shared: those that ``q_begin`` and ``q_len`` of such a tile say.
    merge_indptr : numpy.ndarray
        int32 ``[num_q + 1]``, the partial rows of each query token; an empty range: its tile writes the output.
    num_partials : int
        Rows that ``paged_attention_partial`` returns.
    cascade : FusedCascade | CascadeDeclined | None
        What ``plan_cascade`` chose; None: ``plan_attention``'s.
    """

    __slots__ = (
        "_cascade",
        "_causal",
        "_first_page_offset",
        "_group_size",
        "_invariant",
        "_kv_indices",
        "_kv_indptr",
        "_matched",
        "_num_kv_heads",
        "_on_device",
        "_page_size",
        "_partial",
        "_plan",
        "_qo_indptr",
        "_window_left",
    )

    def __init__(
        self,
        plan: _ext.AttentionPlan,
        table: PageTable,
        qo_indptr: Int32 | None,
        num_kv_heads: int,
        group_size: int,
        causal: bool,
        window_left: int,
        invariant: bool,
        partial: bool,
        cascade: FusedCascade | CascadeDeclined | None = None,
    ) -> None:
        self._plan = plan
        self._kv_indptr = table.kv_indptr
        self._cascade = cascade
        # Tiles that are shared hold for these pages alone.
        self._kv_indices = table.kv_indices if plan.num_members else None
        self._first_page_offset = table.first_page_offset
        self._page_size = table.page_size
        # The tiles are cut for these values: the caller may write to its own array.
        self._qo_indptr = unchanging(qo_indptr)
        self._matched: tuple[PageTable, object] = (table, self._qo_indptr)
        #: By whether the CPU reads them.
        self._on_device: dict[bool, _ext.AttentionTiles] = {}
        self._num_kv_heads, self._group_size = num_kv_heads, group_size
        self._causal, self._window_left, self._invariant = causal, window_left, invariant
        self._partial = partial

    @property
    def cascade(self) -> FusedCascade | CascadeDeclined | None:
        return self._cascade

    @property
    def partial(self) -> bool:
        """Every tile writes partial states."""
        return self._partial

    @property
    def qo_indptr(self) -> Int32 | None:
        return self._qo_indptr

    @property
    def tiles(self) -> Int32:
        return self._plan.tiles

    @property
    def token_order(self) -> Int32:
        return self._plan.token_order

    @property
    def merge_indptr(self) -> Int32:
        return self._plan.merge_indptr

    @property
    def num_partials(self) -> int:
        return self._plan.num_partials

    def matches(self, table: PageTable, qo_indptr: npt.ArrayLike | None = None) -> bool:
        """Whether the plan serves ``table`` and ``qo_indptr``: equal page counts and query counts, and equal pages
        where some are shared."""
        if self._matched[0] is table and self._matched[1] is qo_indptr:
            return True
        if table.page_size != self._page_size or not _equal(table.kv_indptr, self._kv_indptr):
            return False
        if (qo_indptr is None) != (self.qo_indptr is None):
            return False
        if qo_indptr is not None and not _equal(np.asarray(qo_indptr), self.qo_indptr):
            return False
        if self._kv_indices is not None and not (
            _equal(table.kv_indices, self._kv_indices)
            and _equal(table.first_page_offset, self._first_page_offset)
        ):
            return False
        self._matched = (table, self._qo_indptr)
        return True

    def check(
        self,
        op: str,
        table: PageTable,
        qo_indptr: npt.ArrayLike | None,
        num_qo_heads: int,
        num_kv_heads: int,
        causal: bool,
        window_left: int,
    ) -> None:
        """ValueError unless the plan serves this launch."""
        if not self.matches(table, qo_indptr):
            raise ValueError(
                f"[{op}] plan was made for other page counts or query counts than table's, or for other shared pages: "
                f"plan again, got {self}."
            )
        if (num_kv_heads, num_qo_heads) != (self._num_kv_heads, self._num_kv_heads * self._group_size):
            raise ValueError(
                f"[{op}] plan is for {self._num_kv_heads * self._group_size} query heads and {self._num_kv_heads} KV "
                f"heads, got {num_qo_heads} and {num_kv_heads}."
            )
        if self._plan.num_members and (causal, window_left) != (self._causal, self._window_left):
            raise ValueError(
                f"[{op}] plan shares pages for causal={self._causal} and window_left={self._window_left} alone, got "
                f"causal={causal} and window_left={window_left}."
            )
        if self._causal and not causal:
            raise ValueError(f"[{op}] plan is for causal attention, got causal=False.")
        if self._window_left >= 0 and not 0 <= window_left <= self._window_left:
            raise ValueError(
                f"[{op}] plan covers window_left up to {self._window_left}, got window_left={window_left}."
            )

    def on_device(self, stream: Stream = None) -> _ext.AttentionTiles:
        """The arrays that kernels on ``stream`` read, made once."""
        cpu = on_cpu(stream)
        made = self._on_device.get(cpu)
        if made is None:
            p = self._plan
            made = self._on_device[cpu] = _ext.AttentionTiles(
                to_device(p.tiles, stream),
                to_device(p.merge_indptr, stream),
                to_device(p.token_order, stream) if p.num_members else None,
                p.num_partials,
                self._invariant,
                p.max_q_len,
                p.chunks_each,
                p.num_large,
            )
        return made

    def __repr__(self) -> str:
        p = self._plan
        return (
            f"AttentionPlan(requests={self._kv_indptr.size - 1}, pages={int(self._kv_indptr[-1])}, "
            f"query_tokens={p.merge_indptr.size - 1}, tiles={len(p.tiles)}, chunks<={p.max_chunks}, "
            f"partial_rows={p.num_partials}, causal={self._causal}, window_left={self._window_left}, "
            f"batch_invariant={self._invariant})"
        )


def _equal(a: npt.NDArray[np.generic] | None, b: Int32 | None) -> bool:
    if a is b:
        return True
    return a is not None and b is not None and a.size == b.size and bool((a == b).all())


def check_qo_indptr(op: str, table: PageTable, qo_indptr: npt.ArrayLike | None) -> Int32 | None:
    """``qo_indptr`` as an array; ValueError unless it and the table are sound."""
    table.validate()
    if qo_indptr is None:
        return None
    indptr = as_int32(op, "qo_indptr", qo_indptr)
    check_indptr(op, "qo_indptr", indptr, table.batch)
    return indptr


def check_problem(
    op: str,
    table: PageTable,
    qo_indptr: npt.ArrayLike | None,
    num_qo_heads: int,
    num_kv_heads: int,
    window_left: int,
) -> Int32 | None:
    """ValueError unless these can be planned; ``qo_indptr`` as an array."""
    indptr = check_qo_indptr(op, table, qo_indptr)
    if num_kv_heads < 1 or num_qo_heads < 1 or num_qo_heads % num_kv_heads:
        raise ValueError(
            f"[{op}] num_qo_heads must be a multiple of num_kv_heads, got {num_qo_heads} and {num_kv_heads}."
        )
    if window_left < -1:
        raise ValueError(f"[{op}] window_left must be -1 or more, got {window_left}.")
    return indptr


@argument_errors("plan_attention")
def plan_attention(
    table: PageTable,
    qo_indptr: npt.ArrayLike | None = None,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    causal: bool = True,
    window_left: int = -1,
    batch_invariant: bool = False,
    partial: bool = False,
    target: _ext.PlanTarget | None = None,
) -> AttentionPlan:
    """Cut a launch of ``paged_attention`` into tiles, on the host alone.

    Query tokens are grouped into tiles of ``target.tile_rows`` rows (tokens times heads of a KV head), and long
    requests are split into chunks of pages whose results are merged, so that all workers of the target finish
    close together. The longest tiles come first.

    Parameters
    ----------
    table : PageTable
        Pages of each request, the new tokens included.
    qo_indptr : array_like, optional
        int32 ``[batch + 1]``, query tokens of each request; None: one a request (decode).
    num_qo_heads, num_kv_heads : int
        Heads of ``q`` and of the pools.
    causal : bool
        A plan for causal launches leaves out pages that no query of a tile sees; it refuses others.
    window_left : int
        Largest window of the launches that share the plan; -1: any.
    batch_invariant : bool
        Chunks of fixed length at fixed places: the result of a query token then depends, bit for bit, on its own
        request and position alone, not on what else is in the batch, nor on how a prompt was cut into steps.
    partial : bool
        Every tile writes partial states, as ``paged_attention_partial`` needs.
    target : PlanTarget, optional
        ``cpu_target(threads)`` or ``cuda_target(num_sms)``; default: that of MLX's default device.

    Returns
    -------
    AttentionPlan

    Raises
    ------
    ValueError
        On a malformed table or ``qo_indptr``, or heads that do not divide.

    Examples
    --------
    >>> table = PageTable.from_pages([[0, 1], [2]], [20, 7], page_size=16)
    >>> plan = plan_attention(table, num_qo_heads=4, num_kv_heads=2, target=cpu_target(2))
    >>> plan.tiles[:, 0].tolist()
    [0, 1]
    """
    indptr = check_problem("plan_attention", table, qo_indptr, num_qo_heads, num_kv_heads, window_left)
    group = num_qo_heads // num_kv_heads
    plan = _ext.plan_attention(
        table.kv_indptr,
        indptr,
        table.page_size,
        num_kv_heads,
        group,
        window_left,
        causal,
        batch_invariant,
        partial,
        target or default_target(),
    )
    return AttentionPlan(
        plan, table, indptr, num_kv_heads, group, causal, window_left, batch_invariant, partial
    )

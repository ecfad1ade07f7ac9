"""Cascade attention: pages that several requests share are read once for all of them."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy.typing as npt

from .. import _ext, env, tuning
from ..outcomes import CascadeDeclined, FusedCascade
from .arguments import argument_errors
from .attention import paged_attention
from .attention_plan import AttentionPlan, check_problem, check_qo_indptr, default_target
from .device import on_cpu
from .page_table import Int32, PageTable, unchanging

CascadeCosts = _ext.CascadeCosts
CascadeFloors = _ext.CascadeFloors

_NO_COSTS = CascadeCosts(0.0, 0.0, 0.0, 0.0, 0.0)
_NO_FLOORS = CascadeFloors(0, 0)


def default_costs(stream: mx.Stream | mx.Device | None = None) -> _ext.CascadeCosts | _ext.CascadeFloors:
    """What decides on the device that ``stream`` (default: MLX's default device) runs on: its costs, or the floors of
    MLXCEL_CASCADE_MIN_SHARED_PAGES and MLXCEL_CASCADE_MIN_MEMBERS where one is set."""
    pages, members = (env.count(f"MLXCEL_CASCADE_MIN_{name}") or 0 for name in ("SHARED_PAGES", "MEMBERS"))
    return CascadeFloors(pages, members) if pages or members else _costs(on_cpu(stream))


@functools.cache
def _costs(cpu: bool) -> _ext.CascadeCosts:
    constants = tuning.load("cascade", cpu)
    try:
        return CascadeCosts(**constants)
    except TypeError:
        raise ValueError(
            f"[cascade] the tuning file of {tuning.device_name(cpu)} has other constants than this version's, got "
            f"{sorted(constants)}: delete it, or tune again."
        ) from None


class SharedPrefixTree:
    """Which requests of a batch begin with the same pages, from ``detect_shared_prefix``. Immutable.

    Attributes
    ----------
    order : numpy.ndarray
        int32, requests in depth-first order: the members of a node are neighbours.
    nodes : numpy.ndarray
        int32 ``[num_nodes, 5]``, parents before children: ``first``, ``last`` (members are ``order[first:last]``),
        ``page_begin``, ``page_end`` (pages that the nodes above do not hold), ``parent`` (-1: none).
    """

    __slots__ = ("_arrays", "_causal", "_page_size", "_tree")

    def __init__(self, table: PageTable, qo_indptr: Int32 | None, causal: bool) -> None:
        self._arrays = _arrays_of(table, qo_indptr)
        self._page_size, self._causal = table.page_size, causal
        self._tree = _ext.SharedPrefixTree(*self._arrays, table.page_size, causal)

    @property
    def order(self) -> Int32:
        return self._tree.order

    @property
    def nodes(self) -> Int32:
        return self._tree.nodes

    def holds_for(self, table: PageTable, qo_indptr: Int32 | None, causal: bool = True) -> bool:
        """Whether this is the tree of ``table``, as far as that is cheap to tell."""
        if (table.page_size, causal) != (self._page_size, self._causal):
            return False
        arrays = _arrays_of(table, qo_indptr)
        if all(a is b for a, b in zip(arrays, self._arrays, strict=True)):
            return True
        if not self._tree.holds_for(*arrays, self._page_size, causal):
            return False
        self._arrays = arrays
        return True

    def __repr__(self) -> str:
        nodes = ", ".join(
            f"{self.order[first:last].tolist()}: pages {begin}..{end - 1}"
            for first, last, begin, end, _ in self.nodes
        )
        return f"SharedPrefixTree({nodes})"


def _arrays_of(table: PageTable, qo_indptr: Int32 | None) -> tuple[Int32, Int32, Int32 | None, Int32 | None]:
    return table.kv_indptr, table.kv_indices, table.first_page_offset, unchanging(qo_indptr)


@argument_errors("detect_shared_prefix")
def detect_shared_prefix(
    table: PageTable,
    qo_indptr: npt.ArrayLike | None = None,
    *,
    causal: bool = True,
    previous: SharedPrefixTree | None = None,
) -> SharedPrefixTree:
    """Find the common prefixes of a batch's page rows: equal page ids at equal positions, on the host alone.

    A tree, so that a system prompt that all share, a prefix that some share and a document that two share are
    nodes under each other, and nobody's early divergence shortens what others share. A page counts where every
    query token of its request sees all of it, however long the last page grows: never the last page, nor the
    part of a prompt that this step computes.

    Parameters
    ----------
    table : PageTable
        Pages of each request. Rows whose ``first_page_offset`` differs share nothing.
    qo_indptr : array_like, optional
        int32 ``[batch + 1]``, query tokens of each request; None: one a request.
    causal : bool
        The last query token of a request is its last KV token.
    previous : SharedPrefixTree, optional
        The tree of an earlier step: returned as it is where nothing that it says has changed, which costs a few
        microseconds. A row that grows at its end changes nothing.

    Returns
    -------
    SharedPrefixTree

    Examples
    --------
    >>> table = PageTable.from_pages([[7, 8, 1], [7, 8, 2], [7, 3]], [40, 40, 20], page_size=16)
    >>> detect_shared_prefix(table)
    SharedPrefixTree([2, 0, 1]: pages 0..0, [0, 1]: pages 1..1)
    """
    indptr = check_qo_indptr("detect_shared_prefix", table, qo_indptr)
    if previous is not None and previous.holds_for(table, indptr, causal):
        return previous
    return SharedPrefixTree(table, indptr, causal)


@argument_errors("plan_cascade")
def plan_cascade(
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
    tree: SharedPrefixTree | None = None,
    costs: _ext.CascadeCosts | _ext.CascadeFloors | None = None,
) -> AttentionPlan:
    """``plan_attention`` with tiles of their own for common prefixes: one list of tiles, one launch, one merge.

    A shared tile holds query tokens of all members of a node of the tree, and reads the node's pages once for all of
    them. Which nodes get such tiles is chosen so that the estimated cost of the whole launch is least (``costs``);
    pages of the others are read by the nodes below, or by each request itself. Where sharing does not pay, the plan
    is ``plan_attention``'s; ``plan.cascade`` says what was chosen and why.

    Parameters
    ----------
    table, qo_indptr, num_qo_heads, num_kv_heads, partial, target
        As in ``plan_attention``.
    causal, window_left
        As in ``plan_attention``; a plan that shares serves launches with just these.
    batch_invariant : bool
        Only whole chunks of the fixed length are shared, so that results are those of the flat plan (on CPU bit for
        bit); nothing is, where there is a window.
    tree : SharedPrefixTree, optional
        From ``detect_shared_prefix`` of this table; default: made here.
    costs : CascadeCosts or CascadeFloors, optional
        What sharing costs, or the least pages and members of a node that is shared whatever it costs. Default: the
        costs of the device, measured by ``mlxcel-ext tune cascade``, or the floors that
        ``MLXCEL_CASCADE_MIN_SHARED_PAGES`` and ``MLXCEL_CASCADE_MIN_MEMBERS`` set.

    Returns
    -------
    AttentionPlan

    Raises
    ------
    ValueError
        On a malformed table or ``qo_indptr``, heads that do not divide, or the tree of another table.
    """
    op = "plan_cascade"
    indptr = check_problem(op, table, qo_indptr, num_qo_heads, num_kv_heads, window_left)
    if tree is None:
        tree = SharedPrefixTree(table, indptr, causal)
    elif not tree.holds_for(table, indptr, causal):
        raise ValueError(f"[{op}] tree must be detect_shared_prefix's of table and qo_indptr, got {tree}.")
    if costs is None:
        costs = default_costs()
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
        tree._tree,
        *((_NO_COSTS, costs) if isinstance(costs, CascadeFloors) else (costs, _NO_FLOORS)),
    )
    outcome: FusedCascade | CascadeDeclined
    if plan.num_members:
        outcome = FusedCascade(
            table.batch,
            plan.num_members,
            plan.num_levels,
            plan.shared_pages,
            plan.shared_pages * table.page_size,
            plan.shared_chunks,
        )
    else:
        outcome = CascadeDeclined("costs" if len(tree.nodes) else "nothing_shared")
    return AttentionPlan(
        plan, table, indptr, num_kv_heads, group, causal, window_left, batch_invariant, partial, outcome
    )


@argument_errors("cascade_attention")
def cascade_attention(
    q: mx.array,
    k_pages: mx.array,
    v_pages: mx.array,
    table: PageTable,
    *,
    qo_indptr: npt.ArrayLike | None = None,
    causal: bool = True,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: mx.array | None = None,
    return_lse: bool = False,
    plan: AttentionPlan | None = None,
    kv_layout: str = "NHD",
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """``paged_attention`` that reads pages which several requests share once for all of them.

    The same primitive: all levels of the prefix tree are tiles of one launch, and one merge joins what each query
    token has met on its levels. Nothing is gathered or transposed around it.

    Parameters
    ----------
    q, k_pages, v_pages, table, qo_indptr, causal, sm_scale, window_left, logits_soft_cap, sinks, return_lse, kv_layout
        As in ``paged_attention``.
    plan : AttentionPlan, optional
        From ``plan_cascade``, to share over layers and steps; default: made here.

    Returns
    -------
    out, lse
        As in ``paged_attention``, up to rounding: the same sum in another order.

    Raises
    ------
    ValueError
        On a shape, dtype, table or plan mismatch.
    """
    if plan is None:
        plan = plan_cascade(
            table,
            qo_indptr,
            num_qo_heads=q.shape[1],
            num_kv_heads=k_pages.shape[1 if kv_layout == "HND" else 2],
            causal=causal,
            window_left=window_left,
            target=default_target(stream),
            costs=default_costs(stream),
        )
    return paged_attention(
        q,
        k_pages,
        v_pages,
        table,
        qo_indptr=qo_indptr,
        causal=causal,
        sm_scale=sm_scale,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        return_lse=return_lse,
        plan=plan,
        kv_layout=kv_layout,
        stream=stream,
    )

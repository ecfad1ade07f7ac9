"""Attention over paged keys and values."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .. import _ext
from .arguments import argument_errors
from .attention_plan import AttentionPlan, default_target, plan_attention
from .page_table import Int32, PageTable, as_int32, check_indptr

_LN2 = 0.6931471805599453


@argument_errors("paged_attention")
def paged_attention(
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
    """Attention of new tokens over the pages of their requests: decode, prefill and both mixed in one launch.

    Query token ``i`` of the ``qo_len`` tokens of a request sees its first ``kv_len - qo_len + i + 1`` tokens
    (all of them where ``causal`` is False), and of these the last ``window_left + 1`` where ``window_left >= 0``.

    Parameters
    ----------
    q : mx.array
        ``[nnz, num_qo_heads, head_dim]``, float32, float16 or bfloat16, any strides. ``head_dim`` is 64, 80, 96,
        112, 128, 192 or 256; ``num_qo_heads`` is 1 to 32 times ``num_kv_heads``.
    k_pages, v_pages : mx.array
        NHD ``[num_pages, page_size, num_kv_heads, head_dim]`` or HND
        ``[num_pages, num_kv_heads, page_size, head_dim]``, row-contiguous. dtype of ``q``; on CPU also float16 or
        bfloat16 beside a float32 ``q``.
    table : PageTable
        Pages of each request, the new tokens included. Checked once a table.
    qo_indptr : array_like, optional
        int32 ``[batch + 1]``, query tokens of each request in ``q``; None: one a request.
    causal : bool
        The last query token of a request is its last KV token.
    sm_scale : float, optional
        Multiplies the logits; default ``head_dim ** -0.5``.
    window_left : int
        Tokens to the left of its own that a query sees; -1: all.
    logits_soft_cap : float
        ``cap * tanh(logit / cap)``; 0: off.
    sinks : mx.array, optional
        ``[num_qo_heads]``, a logit of each head that joins the denominator and carries no value.
    return_lse : bool
        Return the log2 of the denominators too.
    plan : AttentionPlan, optional
        From ``plan_attention``, to share over layers and steps; default: made here.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.

    Returns
    -------
    out : mx.array
        Like ``q``. A query that sees no token is 0.
    lse : mx.array
        With ``return_lse``: float32 ``[nnz, num_qo_heads]``, ``log2(sum(2 ** (logit * log2(e))))``, sinks
        included; -inf where a query sees nothing. ``lse_to_natural`` converts.

    Raises
    ------
    ValueError
        On a shape, dtype, table or plan mismatch.

    Notes
    -----
    Accumulates in f32. Each token's keys and values are read once for all heads of a group (and, in prefill, once
    for a tile of query tokens). Equal inputs and plans give equal bits; see ``plan_attention(batch_invariant=True)``
    for more.
    """
    op = "paged_attention"
    arrays, plan = _prepare(
        op, q, k_pages, table, qo_indptr, plan, causal, window_left, kv_layout, False, stream
    )
    options = _options(q, causal, sm_scale, window_left, logits_soft_cap, kv_layout)
    out, lse = _ext.paged_attention(
        q, k_pages, v_pages, arrays, plan.on_device(stream), sinks, options, stream=stream
    )
    return (out, lse) if return_lse else out


@argument_errors("paged_attention_partial")
def paged_attention_partial(
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
    plan: AttentionPlan | None = None,
    kv_layout: str = "NHD",
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array]:
    """The unmerged states of ``paged_attention``: one for each chunk of pages that a query token's tiles read.

    ``merge_states(v, lse, plan.merge_indptr)`` is what ``paged_attention`` returns. States of other tokens (a
    shared prefix, another pool, another machine) may be merged in between.

    Parameters
    ----------
    q, k_pages, v_pages, table, qo_indptr, causal, sm_scale, window_left, logits_soft_cap, kv_layout
        As in ``paged_attention``. Sinks belong to the final merge and are not taken here.
    plan : AttentionPlan
        From ``plan_attention(..., partial=True)``; default: made here (then one state a query token, where one
        chunk will do: pass a plan to know ``merge_indptr``).

    Returns
    -------
    v : mx.array
        float32 ``[plan.num_partials, num_qo_heads, head_dim]``, normalised.
    lse : mx.array
        float32 ``[plan.num_partials, num_qo_heads]``, log2; -inf for a chunk of which a query sees nothing.

    Raises
    ------
    ValueError
        On a shape, dtype, table or plan mismatch.
    """
    op = "paged_attention_partial"
    arrays, plan = _prepare(
        op, q, k_pages, table, qo_indptr, plan, causal, window_left, kv_layout, True, stream
    )
    options = _options(q, causal, sm_scale, window_left, logits_soft_cap, kv_layout)
    tiles = plan.on_device(stream)
    return _ext.paged_attention_partial(q, k_pages, v_pages, arrays, tiles, options, stream=stream)


@argument_errors("merge_states")
def merge_states(
    v_in: mx.array,
    lse_in: mx.array,
    o_indptr: mx.array | npt.ArrayLike,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array]:
    """Merge attention states: row ``m`` becomes the attention over the union of the tokens of its group.

    ``lse = log2(sum(2 ** lse_i))`` and ``v = sum(2 ** (lse_i - lse) * v_i)`` over rows ``o_indptr[m]`` to
    ``o_indptr[m + 1]``.

    Parameters
    ----------
    v_in : mx.array
        ``[N, num_heads, head_dim]``, float32, float16 or bfloat16, normalised; ``head_dim`` up to 1024.
    lse_in : mx.array
        float32 ``[N, num_heads]``, **log2**. Natural logarithms give a wrong answer.
    o_indptr : array_like or mx.array
        int32 ``[M + 1]``, never falling. Checked where it is a host array; an mx.array is clamped to ``0..N``.

    Returns
    -------
    v : mx.array
        ``[M, num_heads, head_dim]``, dtype of ``v_in``.
    lse : mx.array
        float32 ``[M, num_heads]``, log2.

    Raises
    ------
    ValueError
        On a shape, dtype or ``o_indptr`` mismatch.

    Notes
    -----
    A group of one is copied bit for bit; an empty group is 0 and -inf; a state with ``lse`` -inf is not read, so a
    NaN in its value does not spread. Associative across regroupings, up to rounding.
    """
    op = "merge_states"
    if not isinstance(o_indptr, mx.array):
        indptr = as_int32(op, "o_indptr", o_indptr)
        if indptr.size == 0:
            raise ValueError(f"[{op}] o_indptr must have M + 1 elements, got none.")
        if indptr[0] < 0 or indptr[-1] > v_in.shape[0] or (np.diff(indptr) < 0).any():
            raise ValueError(
                f"[{op}] o_indptr must not fall and lie in 0..{v_in.shape[0]}, got {indptr.tolist()[:16]}."
            )
        o_indptr = mx.array(indptr)
    return _ext.merge_states(v_in, lse_in, o_indptr, stream=stream)


def lse_to_natural(lse: mx.array) -> mx.array:
    """The natural logarithm of the denominators, from the log2 that our ops return."""
    return lse * _LN2


def _prepare(
    op: str,
    q: mx.array,
    k_pages: mx.array,
    table: PageTable,
    qo_indptr: npt.ArrayLike | None,
    plan: AttentionPlan | None,
    causal: bool,
    window_left: int,
    kv_layout: str,
    partial: bool,
    stream: mx.Stream | mx.Device | None,
) -> tuple[_ext.AttentionTable, AttentionPlan]:
    """Check table, ``qo_indptr`` and plan against the arrays; make the plan where there is none."""
    if q.ndim != 3:
        raise ValueError(
            f"[{op}] q must have 3 dimensions [nnz, num_qo_heads, head_dim], got shape {q.shape}."
        )
    if k_pages.ndim != 4:
        raise ValueError(f"[{op}] k_pages must have 4 dimensions, got shape {k_pages.shape}.")
    page_size, num_kv_heads = k_pages.shape[1:3] if kv_layout != "HND" else k_pages.shape[2:0:-1]
    if page_size != table.page_size:
        raise ValueError(f"[{op}] table must have the pool's page size {page_size}, got {table.page_size}.")
    table.validate(k_pages.shape[0])
    indptr: Int32 | None = None
    if qo_indptr is not None:
        if plan is not None and plan.qo_indptr is not None and plan.matches(table, qo_indptr):
            indptr = plan.qo_indptr  # one object a step, so that its device array is made once
        else:
            indptr = as_int32(op, "qo_indptr", qo_indptr)
            check_indptr(op, "qo_indptr", indptr, table.batch)
        if indptr[-1] != q.shape[0]:
            raise ValueError(f"[{op}] qo_indptr must end at q's {q.shape[0]} tokens, got {indptr[-1]}.")
    if plan is None:
        plan = plan_attention(
            table,
            indptr,
            num_qo_heads=q.shape[1],
            num_kv_heads=num_kv_heads,
            causal=causal,
            window_left=window_left,
            partial=partial,
            target=default_target(stream),
        )
    else:
        plan.check(op, table, indptr, q.shape[1], num_kv_heads, causal, window_left)
    if partial and not plan.partial:
        raise ValueError(f"[{op}] plan must come from plan_attention(..., partial=True), got {plan}.")
    return table.on_device(indptr, stream), plan


def _options(
    q: mx.array,
    causal: bool,
    sm_scale: float | None,
    window_left: int,
    logits_soft_cap: float,
    kv_layout: str,
) -> _ext.AttentionOptions:
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    return _ext.AttentionOptions(causal, scale, window_left, logits_soft_cap, kv_layout)

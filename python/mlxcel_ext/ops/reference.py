"""The semantics of every op in numpy float64: slow, obvious, and what the tests compare with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .page_table import PageTable

Array = npt.NDArray[np.float64]


def add_rms_norm(
    x: npt.ArrayLike, residual: npt.ArrayLike, weight: npt.ArrayLike, eps: float, weight_bias: float = 0.0
) -> tuple[Array, Array]:
    """``(normed, new_residual)`` of unrounded sums."""
    total = np.asarray(x, np.float64) + np.asarray(residual, np.float64)
    scale = 1.0 / np.sqrt(np.mean(total**2, axis=-1, keepdims=True) + eps)
    return total * scale * (np.asarray(weight, np.float64) + weight_bias), total


def rope(
    x: npt.ArrayLike,
    positions: npt.ArrayLike,
    inv_freq: npt.ArrayLike,
    *,
    interleaved: bool = False,
    scale: float = 1.0,
) -> Array:
    """Rotary embedding of ``x`` [nnz, heads, head_dim] at ``positions`` [nnz]."""
    out = np.array(x, np.float64)
    half = len(np.asarray(inv_freq))
    angle = np.asarray(positions, np.float64)[:, None, None] * np.asarray(inv_freq, np.float64)
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    lane = np.arange(half)
    first, second = (2 * lane, 2 * lane + 1) if interleaved else (lane, lane + half)
    a, b = out[..., first], out[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


def paged_attention(
    q: npt.ArrayLike,
    k_pages: npt.ArrayLike,
    v_pages: npt.ArrayLike,
    table: PageTable,
    *,
    qo_indptr: npt.ArrayLike | None = None,
    causal: bool = True,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: npt.ArrayLike | None = None,
    kv_layout: str = "NHD",
) -> tuple[Array, Array]:
    """``(out, lse)``, one query token and one head at a time."""
    queries, keys, values = (np.asarray(a, np.float64) for a in (q, k_pages, v_pages))
    if kv_layout == "HND":
        keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
    nnz, num_qo_heads, head_dim = queries.shape
    group = num_qo_heads // keys.shape[2]
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    indptr = np.arange(table.batch + 1) if qo_indptr is None else np.asarray(qo_indptr)
    out, lse = np.zeros(queries.shape), np.full((nnz, num_qo_heads), -np.inf)
    for r in range(table.batch):
        pages = table.kv_indices[table.kv_indptr[r] : table.kv_indptr[r + 1]]
        first = 0 if table.first_page_offset is None else int(table.first_page_offset[r])
        kv_len, qo_len = int(table.kv_len[r]), int(indptr[r + 1] - indptr[r])
        # [kv_len, num_kv_heads, head_dim], in the order of the request
        k, v = (a[pages].reshape(-1, *a.shape[2:])[first : first + kv_len] for a in (keys, values))
        for i in range(qo_len):
            own = kv_len - qo_len + i
            end = max(own + 1, 0) if causal else kv_len
            begin = 0 if window_left < 0 else max(own - window_left, 0)
            for h in range(num_qo_heads):
                logits = k[begin:end, h // group] @ queries[indptr[r] + i, h] * scale
                if logits_soft_cap > 0:
                    logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
                sink = -np.inf if sinks is None else np.asarray(sinks, np.float64)[h]
                most = max(logits.max(initial=-np.inf), sink)
                if most == -np.inf:
                    continue
                weights = np.exp(logits - most)
                total = weights.sum() + np.exp(sink - most)
                out[indptr[r] + i, h] = weights @ v[begin:end, h // group] / total
                lse[indptr[r] + i, h] = (most + np.log(total)) / np.log(2)
    return out, lse


def merge_states(v_in: npt.ArrayLike, lse_in: npt.ArrayLike, o_indptr: npt.ArrayLike) -> tuple[Array, Array]:
    """``(v, lse)`` of each group of states; ``lse`` is log2."""
    values, lses, indptr = np.asarray(v_in, np.float64), np.asarray(lse_in, np.float64), np.asarray(o_indptr)
    v = np.zeros((indptr.size - 1, *values.shape[1:]))
    lse = np.full(v.shape[:2], -np.inf)
    for m in range(indptr.size - 1):
        group = slice(indptr[m], indptr[m + 1])
        for h in range(v.shape[1]):
            there = lses[group, h] > -np.inf
            if not there.any():
                continue
            x = lses[group, h][there]
            weights = 2.0 ** (x - x.max())
            v[m, h] = weights @ values[group, h][there] / weights.sum()
            lse[m, h] = x.max() + np.log2(weights.sum())
    return v, lse

"""What the kill switches fall back to: the same steps out of MLX's own ops. Slower, and independent of our kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .. import env, ops
from ..ops import AttentionPlan, PageTable


class Kernels(NamedTuple):
    """The three ops of a layer that have a switch, the name of the attention's path for the counters, and whether all
    three are ours."""

    add_rms_norm: Callable[..., tuple[mx.array, mx.array]]
    rope_append: Callable[..., tuple[mx.array, mx.array, mx.array]]
    paged_attention: Callable[..., Any]
    attention_path: str
    all_fused: bool


def choose_kernels() -> Kernels:
    """Ours, but for those that are switched off."""
    attention, norm, rope = (
        env.switch(f"MLXCEL_{name}")
        for name in ("PAGED_ATTENTION_V2", "FUSED_ADD_RMSNORM", "FUSED_ROPE_APPEND")
    )
    return Kernels(
        ops.add_rms_norm if norm else add_rms_norm,
        ops.rope_append if rope else rope_append,
        ops.paged_attention if attention else gather_attention,
        "fused_v2" if attention else "gather",
        attention and norm and rope,
    )


def add_rms_norm(x: mx.array, residual: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """Two MLX ops: an addition, then the norm."""
    total = x + residual
    return mx.fast.rms_norm(total, weight, eps), total


def rope_append(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    k_pages: mx.array,
    v_pages: mx.array,
    table: PageTable,
    positions: mx.array,
    *,
    inv_freq: mx.array,
    qo_indptr: npt.NDArray[np.int32] | None = None,
    scale: float = 1.0,
    kv_layout: str = "NHD",
) -> tuple[mx.array, mx.array, mx.array]:
    """NeoX rotation and scattered writes. MLX copies a pool that anybody else still holds."""
    _check_layout(kv_layout)
    half = inv_freq.shape[0]
    angle = positions[:, None, None].astype(mx.float32) * inv_freq
    cos, sin = scale * mx.cos(angle), scale * mx.sin(angle)

    def rotate(x: mx.array) -> mx.array:
        a, b = (part.astype(mx.float32) for part in (x[..., :half], x[..., half : 2 * half]))
        turned = mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
        return mx.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], axis=-1)

    slots = table.slots_on_device(qo_indptr, k_pages.shape[0])

    def write(pages: mx.array, tokens: mx.array) -> mx.array:
        flat = pages.reshape(-1, *pages.shape[2:])
        if pages.dtype != tokens.dtype:  # finite values stay finite
            largest = mx.finfo(pages.dtype).max
            tokens = mx.where(mx.isinf(tokens), tokens, mx.clip(tokens, -largest, largest))
        flat[slots] = tokens.astype(pages.dtype)
        return flat.reshape(pages.shape)

    return rotate(q), write(k_pages, rotate(k)), write(v_pages, v)


def _check_layout(kv_layout: str) -> None:
    if kv_layout != "NHD":
        raise ValueError(f"[unfused] pages must be NHD, got {kv_layout}.")


def gather_attention(
    q: mx.array,
    k_pages: mx.array,
    v_pages: mx.array,
    table: PageTable,
    *,
    qo_indptr: npt.NDArray[np.int32] | None = None,
    window_left: int = -1,
    plan: AttentionPlan | None = None,
    kv_layout: str = "NHD",
) -> mx.array:
    """Gathers each request's pages and calls MLX's attention on them, one request after another."""
    del plan
    _check_layout(kv_layout)
    starts = np.arange(len(table.kv_len) + 1) if qo_indptr is None else qo_indptr
    out = []
    for request, kv_len in enumerate(int(n) for n in table.kv_len):
        begin, end = int(starts[request]), int(starts[request + 1])
        if end == begin:
            continue
        pages = mx.array(
            table.kv_indices[table.kv_indptr[request] : table.kv_indptr[request + 1]].astype(np.int32)
        )
        skip = 0 if table.first_page_offset is None else int(table.first_page_offset[request])
        k, v = (
            p[pages].reshape(1, -1, *p.shape[2:])[:, skip : skip + kv_len].swapaxes(1, 2).astype(q.dtype)
            for p in (k_pages, v_pages)
        )
        row = np.arange(kv_len - (end - begin), kv_len)[:, None]
        column = np.arange(kv_len)[None]
        seen = column <= row
        if window_left >= 0:
            seen &= column >= row - window_left
        queries = q[begin:end].swapaxes(0, 1)[None]
        answer = mx.fast.scaled_dot_product_attention(
            queries, k, v, scale=q.shape[-1] ** -0.5, mask=mx.array(seen)
        )
        out.append(answer[0].swapaxes(0, 1))
    return mx.concatenate(out) if out else mx.zeros_like(q)

"""Writing keys and values into pages."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .. import _ext
from .arguments import argument_errors
from .device import Stream


class HasSlots(Protocol):
    """What rope_append needs of a page table."""

    def slots_on_device(
        self, qo_indptr: npt.NDArray[np.int32] | None, num_pages: int, stream: Stream = None
    ) -> mx.array: ...


@argument_errors("rope_append")
def rope_append(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    k_pages: mx.array,
    v_pages: mx.array,
    table: HasSlots | mx.array,
    positions: mx.array,
    *,
    inv_freq: mx.array,
    qo_indptr: npt.NDArray[np.int32] | None = None,
    interleaved: bool = False,
    scale: float = 1.0,
    kv_layout: str = "NHD",
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Rotate q and k by their positions and write k and v into their pages, in one pass, in place.

    Parameters
    ----------
    q : mx.array
        ``[nnz, num_qo_heads, head_dim]``, float32, float16 or bfloat16.
    k, v : mx.array
        ``[nnz, num_kv_heads, head_dim]``, dtype of ``q``.
    k_pages, v_pages : mx.array
        NHD ``[num_pages, page_size, num_kv_heads, head_dim]`` or HND
        ``[num_pages, num_kv_heads, page_size, head_dim]``, row-contiguous. dtype of ``q``; on CPU also float16 or
        bfloat16 beside a float32 ``q``: k and v are rounded, and a finite value beyond the range becomes the largest
        of it (an infinity or NaN stays).
    table : PageTable or mx.array
        Pages of each request after the append: the last ``qo_len`` tokens of a request are the new ones. Or the
        flat slots themselves, int32 ``[nnz]``, ``page * page_size + offset``, all different, -1 for a token that is
        not to be written; slots given so are not checked (on CPU, one beyond the pool is not written).
    positions : mx.array
        int32 ``[nnz]``, the position of each token, for the rotation alone.
    inv_freq : mx.array
        float32 ``[rotary_dim / 2]``, radians a position (scaled already, where the model scales); a head's elements
        from ``rotary_dim`` on are not rotated.
    qo_indptr : numpy.ndarray, optional
        int32 ``[batch + 1]``, the tokens of each request in ``q``; None: one token a request.
    interleaved : bool
        False rotates the pairs ``(i, i + rotary_dim / 2)`` (NeoX), True ``(2i, 2i + 1)`` (GPT-J).
    scale : float
        Multiplies cosine and sine (yarn's attention factor).
    kv_layout : str
        ``"NHD"`` or ``"HND"``.

    Returns
    -------
    q_rot, k_pages, v_pages : mx.array
        The pools are the same buffers as the arguments, always: go on with the returned handles.

    Raises
    ------
    ValueError
        On a shape, dtype or table mismatch, and for a pool that only a copy could serve.

    Notes
    -----
    Angles are formed in float64 on CPU, so position 1,000,000 is as exact as position 1.
    """
    if not isinstance(table, mx.array):
        table = table.slots_on_device(qo_indptr, k_pages.shape[0], stream)
    return _ext.rope_append(
        q, k, v, k_pages, v_pages, table, positions, inv_freq, interleaved, scale, kv_layout, stream=stream
    )

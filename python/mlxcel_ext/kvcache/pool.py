"""The pages of keys and values as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..ops import rope_append
from ..ops.memory import zeros


class KVPool:
    """Per layer, k_pages and v_pages ``[num_pages, page_size, num_kv_heads, head_dim]``, or with layout "HND"
    ``[num_pages, num_kv_heads, page_size, head_dim]``.

    They are written in place: an op that writes returns new handles of the same buffers, and whoever called
    it stores them here, so that the next step comes after the last one.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: mx.Dtype,
        layout: str = "NHD",
    ) -> None:
        self.num_pages = num_pages
        self.layout = layout
        self.page_size = page_size
        self.dtype = dtype
        self._shape = (num_pages, page_size, num_kv_heads, head_dim)
        if layout == "HND":
            self._shape = (num_pages, num_kv_heads, page_size, head_dim)
        self._num_layers, self._num_kv_heads = num_layers, num_kv_heads
        self.k_pages: list[mx.array] = []
        self.v_pages: list[mx.array] = []
        self._no_rotation = mx.zeros((0,), mx.float32)
        mx.eval(self._no_rotation)  # arrays that another thread uses must not be lazy
        self.reset()

    @staticmethod
    def page_bytes(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: mx.Dtype) -> int:
        """Bytes of one page in all layers, keys and values."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.size

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.k_pages, *self.v_pages]

    def reset(self) -> None:
        """Start over with empty buffers: after a device error nobody knows what the old ones hold."""
        self.k_pages = [zeros(self._shape, self.dtype) for _ in range(self._num_layers)]
        self.v_pages = [zeros(self._shape, self.dtype) for _ in range(self._num_layers)]

    def handles(self) -> tuple[list[mx.array], list[mx.array]]:
        """The present handles, for restore()."""
        return list(self.k_pages), list(self.v_pages)

    def restore(self, handles: tuple[list[mx.array], list[mx.array]]) -> None:
        """Forget what was built on top of these handles; what it wrote to its pages stays undefined."""
        self.k_pages, self.v_pages = list(handles[0]), list(handles[1])

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages, all read before any is written.

        An append without rotation is a copy in place, on every backend.
        """
        size, kv_heads, head_dim = self.page_size, self._num_kv_heads, self._shape[-1]
        source = mx.array(np.asarray(sources, np.int32))
        slots = np.asarray(targets, np.int32)[:, None] * size + np.arange(size, dtype=np.int32)
        slots_on_device = mx.array(slots.reshape(-1))
        count = slots.size
        nothing = mx.zeros((count, 1, head_dim), self.dtype)
        positions = mx.zeros((count,), mx.int32)

        def tokens(pages: mx.array) -> mx.array:
            copied = pages[source]
            return (copied.swapaxes(1, 2) if self.layout == "HND" else copied).reshape(
                count, kv_heads, head_dim
            )

        for i, (k, v) in enumerate(zip(self.k_pages, self.v_pages, strict=True)):
            _, self.k_pages[i], self.v_pages[i] = rope_append(
                nothing,
                tokens(k),
                tokens(v),
                k,
                v,
                slots_on_device,
                positions,
                inv_freq=self._no_rotation,
                kv_layout=self.layout,
            )

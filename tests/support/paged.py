"""Random paged batches whose every slot that no request owns is NaN."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import PageTable
from mlxcel_ext.ops import reference
from tests.conftest import DTYPES, METAL_EMULATED, devices
from tests.support.compare import to_numpy

#: Every device with each dtype, and on CPU 16-bit pages beside float32 too.
each_kv_dtype = pytest.mark.parametrize(
    ("stream", "dtype", "kv_dtype"),
    [
        pytest.param(mx.gpu if device == "gpu" else mx.cpu, DTYPES[x], DTYPES[kv], id=f"{device}-{x}-{kv}")
        for device in devices()
        for x in DTYPES
        for kv in DTYPES
        if kv == x or (x == "f32" and device == "cpu")
    ],
)

#: The pages' dtypes that serve float32 queries where tests run without a stream.
KV_DTYPES = [mx.float32] if METAL_EMULATED or mx.default_device() == mx.gpu else list(DTYPES.values())

#: Columns of a plan's tiles.
REQUEST, Q_BEGIN, Q_LEN, PAGE_BEGIN, PAGE_END, CHUNK, SHARED, GROUP = range(8)


class PagedCase:
    """q, pools and table of a batch with the given token counts.

    Pages are dealt in random order from a pool with a few more; `kv_indices` ends in absurd ids that nothing may
    read. `offsets` are tokens at the front of each request's pages that are not its own. `shared` names the first
    pages of each request: equal names are one page (default: no page has a name). `kv_dtype` is the pools' (default:
    that of q).
    """

    def __init__(
        self,
        rng: np.random.Generator,
        kv_len: list[int],
        *,
        qo_len: list[int] | None = None,
        dtype: mx.Dtype = mx.float32,
        kv_dtype: mx.Dtype | None = None,
        hq: int = 4,
        hkv: int = 2,
        dim: int = 64,
        page_size: int = 16,
        layout: str = "NHD",
        offsets: list[int] | None = None,
        shared: Sequence[Sequence[Hashable]] | None = None,
        scale: float = 1.0,
    ) -> None:
        first = offsets or [0] * len(kv_len)
        counts = [-(-(n + f) // page_size) if n else 0 for n, f in zip(kv_len, first, strict=True)]
        names: list[Hashable] = [
            shared[r][i] if shared is not None and i < len(shared[r]) else (r, i)
            for r, count in enumerate(counts)
            for i in range(count)
        ]
        number = {name: i for i, name in enumerate(dict.fromkeys(names))}
        num_pages = len(number) + 3
        ids = rng.permutation(num_pages)[[number[name] for name in names]]
        ends = np.cumsum([0, *counts])
        self.layout = layout
        self.kv_len = kv_len
        last = [
            n + f - (c - 1) * page_size if c else 0 for n, f, c in zip(kv_len, first, counts, strict=True)
        ]
        self.table = PageTable(
            ends,
            np.concatenate([ids[: ends[-1]], [2**31 - 1, -7]]).astype(np.int32),
            last,
            page_size,
            None if offsets is None else [f if c else 0 for f, c in zip(first, counts, strict=True)],
        )
        k = np.full((num_pages * page_size, hkv, dim), np.nan)
        v = k.copy()
        for r, (n, f) in enumerate(zip(kv_len, first, strict=True)):
            places = np.arange(f, f + n)
            slots = ids[ends[r] + places // page_size] * page_size + places % page_size
            k[slots], v[slots] = rng.standard_normal((2, n, hkv, dim)) * scale
        pools = [a.reshape(num_pages, page_size, hkv, dim) for a in (k, v)]
        if layout == "HND":
            pools = [a.swapaxes(1, 2) for a in pools]
        self.k_pages, self.v_pages = (mx.array(np.ascontiguousarray(a), kv_dtype or dtype) for a in pools)
        self.qo_indptr = None if qo_len is None else np.cumsum([0, *qo_len]).astype(np.int32)
        nnz = len(kv_len) if qo_len is None else sum(qo_len)
        self.q = mx.array(rng.standard_normal((nnz, hq, dim)) * scale, dtype)

    @property
    def args(self) -> tuple:
        return self.q, self.k_pages, self.v_pages, self.table

    @property
    def heads(self) -> dict[str, int]:
        return {
            "num_qo_heads": self.q.shape[1],
            "num_kv_heads": self.k_pages.shape[1 if self.layout == "HND" else 2],
        }

    def reference(self, **options) -> tuple[np.ndarray, np.ndarray]:
        if options.get("sinks") is not None:
            options["sinks"] = to_numpy(options["sinks"])
        arrays = (to_numpy(a) for a in (self.q, self.k_pages, self.v_pages))
        return reference.paged_attention(
            *arrays, self.table, qo_indptr=self.qo_indptr, kv_layout=self.layout, **options
        )

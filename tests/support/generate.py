"""Runs a model over pages without the engine: the least that a test needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import mlx.core as mx
import numpy as np

from mlxcel_ext import PageTable, plan_attention
from mlxcel_ext.models import AttentionBatch, Model


class PagedRunner:
    """Requests by name, each with its pages; pages are handed out in shuffled order and start as NaN."""

    def __init__(
        self,
        model: Model,
        *,
        num_pages: int = 64,
        page_size: int = 16,
        kv_dtype: mx.Dtype | None = None,
    ) -> None:
        config = model.config
        shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)
        if model.kv_layout == "HND":
            shape = (num_pages, config.num_kv_heads, page_size, config.head_dim)
        dtype = kv_dtype or model.dtype  # by default the exact pages
        pools = [[mx.full(shape, float("nan"), dtype) for _ in range(config.num_layers)] for _ in "kv"]
        mx.eval(pools)
        self.model, self.page_size = model, page_size
        self.kv = SimpleNamespace(k_pages=pools[0], v_pages=pools[1], layout=model.kv_layout)
        self._free = np.random.default_rng(0).permutation(num_pages).tolist()
        self._pages: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(self, new: Mapping[str, Sequence[int]], *, rows: Sequence[int] | None = None) -> mx.array:
        """Logits of the new tokens of some requests, packed in the order given; of `rows` alone where given."""
        positions: list[int] = []
        for name, tokens in new.items():
            start = self._lengths.get(name, 0)
            self._lengths[name] = start + len(tokens)
            positions += range(start, start + len(tokens))
            pages = self._pages.setdefault(name, [])
            while len(pages) * self.page_size < self._lengths[name]:
                pages.append(self._free.pop())
        table = PageTable.from_pages(
            [self._pages[name] for name in new], [self._lengths[name] for name in new], self.page_size
        )
        counts = [len(tokens) for tokens in new.values()]
        indptr = None if all(n == 1 for n in counts) else np.cumsum([0, *counts]).astype(np.int32)
        config = self.model.config
        plan = plan_attention(
            table, indptr, num_qo_heads=config.num_qo_heads, num_kv_heads=config.num_kv_heads
        )
        batch = AttentionBatch(
            mx.array(positions, mx.int32),
            table,
            indptr,
            plan,
            None if rows is None else mx.array(rows, mx.int32),
        )
        packed = mx.array([token for tokens in new.values() for token in tokens], mx.int32)
        return self.model(packed, batch, self.kv)


def greedy(model: Model, prompt: Sequence[int], num_tokens: int, *, chunk: int = 512) -> list[int]:
    """Ids of a greedy continuation; the prompt is prefilled in chunks."""
    runner = PagedRunner(model, num_pages=(len(prompt) + num_tokens) // 16 + 2)
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        logits = runner.step({"": part}, rows=[len(part) - 1])
    out = [int(mx.argmax(logits[-1]).item())]
    while len(out) < num_tokens:
        out.append(int(mx.argmax(runner.step({"": out[-1:]})[-1]).item()))
    return out

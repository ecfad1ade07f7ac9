"""The layers of a llama-like model as one primitive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from ..ops.decoder_stack import DecoderLayer, DecoderShape, LayerStack
from ..ops.device import on_cpu
from .batch import AttentionBatch
from .config import ModelConfig


class KVPages(Protocol):
    """Per layer, the pages of keys and values, [num_pages, page_size, num_kv_heads, head_dim] where layout is "NHD"
    and [num_pages, num_kv_heads, page_size, head_dim] where it is "HND"."""

    layout: str
    k_pages: list[mx.array]
    v_pages: list[mx.array]


class DecoderStack:
    """Runs every layer between embedding and head in one node of MLX's graph: the same kernels, the same bits.

    Parameters
    ----------
    config : ModelConfig
        Shapes.
    layers : sequence of DecoderLayer
        Their weights.
    final_norm, inv_freq : mx.array
        Weight of the norm behind the last layer; the rotary frequencies.
    rope_scale : float
        Multiplies cosine and sine.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        final_norm: mx.array,
        inv_freq: mx.array,
        rope_scale: float,
    ) -> None:
        self._config = config
        shape = DecoderShape(
            num_qo_heads=config.num_qo_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.rms_norm_eps,
            rope_scale=rope_scale,
        )
        self._stack = LayerStack(list(layers), final_norm, inv_freq, shape)

    def takes(self, batch: AttentionBatch) -> bool:
        """Whether a step can run: any on CPU; on a GPU decode steps of a few requests, since MLX's products are the
        ones for many rows."""
        if on_cpu(None):
            return True
        decodes = batch.qo_indptr is None and batch.logit_rows is None
        return decodes and self._stack.runs_on_gpu(batch.positions.shape[0])

    def __call__(self, hidden: mx.array, batch: AttentionBatch, kv: KVPages) -> mx.array:
        """Normed output of the last layer, of batch.logit_rows alone where given; kv gets its new handles."""
        config, table, plan = self._config, batch.table, batch.plan
        table.validate(kv.k_pages[0].shape[0])
        for window in set(config.windows):
            plan.check(
                "decoder_stack",
                table,
                batch.qo_indptr,
                config.num_qo_heads,
                config.num_kv_heads,
                True,
                window,
            )
        out, *pages = self._stack(
            hidden,
            kv.k_pages,
            kv.v_pages,
            table.slots_on_device(batch.qo_indptr, kv.k_pages[0].shape[0]),
            batch.positions,
            table.on_device(plan.qo_indptr),
            plan.on_device(),
            batch.logit_rows,
            kv_layout=kv.layout,
        )
        kv.k_pages, kv.v_pages = pages[::2], pages[1::2]
        return out

"""`mlxcel-ext tune cascade`: measures what sharing costs on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from . import tuning
from .ops import (
    AttentionPlan,
    CascadeCosts,
    PageTable,
    PlanTarget,
    merge_states,
    paged_attention,
    plan_attention,
    plan_cascade,
)
from .ops.attention_plan import default_target

_PAGE, _KV_HEADS, _GROUP, _DIM = 16, 8, 4, 128
_HEADS: dict[str, Any] = {"num_qo_heads": _KV_HEADS * _GROUP, "num_kv_heads": _KV_HEADS}
#: Shares whatever can be shared.
_FREE = CascadeCosts(reread=1.0, row=0.0, tile=0.0, merge=0.0, launch=0.0)


@dataclass(frozen=True)
class Sizes:
    """Requests and tokens of each: many enough to fill the machine, and more than its caches hold."""

    batch: int
    tokens: int
    repeats: int  # launches that are timed together
    rounds: int


CPU_SIZES = Sizes(batch=16, tokens=1024, repeats=1, rounds=7)
GPU_SIZES = Sizes(batch=64, tokens=4096, repeats=20, rounds=15)


class CascadeTuner:
    """Times launches of the public op whose costs differ in one constant each."""

    def __init__(self, device: mx.Device, size: Sizes | None = None) -> None:
        self._device = device
        self._size = size = size or (CPU_SIZES if device == mx.cpu else GPU_SIZES)
        self._target = default_target(device)
        shape = (size.batch * size.tokens // _PAGE + 2 * size.batch, _PAGE, _KV_HEADS, _DIM)
        with mx.stream(device):
            self._k, self._v = (mx.random.normal(shape).astype(mx.bfloat16) for _ in "kv")
            self._q = mx.random.normal((size.batch, _KV_HEADS * _GROUP, _DIM)).astype(mx.bfloat16)
            mx.eval(self._k, self._v, self._q)

    def run(self) -> dict[str, float]:
        """The constants of CascadeCosts."""
        size, slots = self._size, self._target.slots
        total = size.batch * size.tokens * _KV_HEADS
        alone = self._table(shared=False)
        together = self._table(shared=True)
        short = self._table(shared=True, tokens=_PAGE)
        t = self._target
        # Uncut, and cut into chunks of 64 tokens.
        uncut = PlanTarget(t.slots, t.tile_rows, t.rows_per_token, size.tokens + _PAGE, 0, 1, 2048)
        cut = PlanTarget(1 << 20, t.tile_rows, t.rows_per_token, 64, 0, 1, 2048)
        whole, pieces = (plan_attention(alone, target=target, **_HEADS) for target in (uncut, cut))
        states = size.batch * 64
        v = mx.random.normal((states, _KV_HEADS * _GROUP, _DIM), stream=self._device)
        lse = mx.random.normal((states, _KV_HEADS * _GROUP), stream=self._device)
        groups = mx.arange(0, states + 1, 16, dtype=mx.int32)
        mx.eval(v, lse, groups)
        beside = self._table(shared=True, tokens=_PAGE, own=size.tokens)
        first, again, stacked, fine, merged, flat_short, shared_short, slow = self._time(
            [
                self._launch(alone, whole),
                self._launch(together, plan_attention(together, target=uncut, **_HEADS)),
                self._launch(together, plan_cascade(together, target=t, costs=_FREE, **_HEADS)),
                self._launch(alone, pieces),
                lambda: merge_states(v, lse, groups, stream=self._device)[0],
                self._launch(short, plan_attention(short, target=t, **_HEADS)),
                self._launch(short, plan_cascade(short, target=t, costs=_FREE, **_HEADS)),
                self._launch(beside, plan_cascade(beside, target=t, costs=_FREE, **_HEADS)),
            ]
        )
        unit = first * slots / total  # seconds of one slot for a KV token
        merge = merged * slots / (states * _KV_HEADS * _GROUP) / unit
        tiles = (len(pieces.tiles) - len(whole.tiles)) * _KV_HEADS
        rows = size.batch * _GROUP
        tile = max((fine - first) * slots / tiles / unit - _GROUP * merge, 0.0)
        work = (tile + 2 * rows * merge) * _KV_HEADS / slots  # of the short launch's sharing
        return {
            "reread": min(again / first, 1.0),
            "row": stacked * slots / (size.tokens * _KV_HEADS * rows) / unit,
            "tile": tile,
            "merge": merge,
            "launch": max((shared_short - flat_short) / unit - work, 0.0),
            "other": max(slow / first, 1.0),
        }

    def _table(self, *, shared: bool, tokens: int | None = None, own: int = 1) -> PageTable:
        """Every request with pages of its own, or all behind one prefix, each with `own` tokens more."""
        pages = (self._size.tokens if tokens is None else tokens) // _PAGE
        tail = -(-own // _PAGE)
        rows = []
        for r in range(self._size.batch):
            prefix = range(pages) if shared else range(r * (pages + tail), r * (pages + tail) + pages)
            begin = pages + r * tail if shared else prefix.stop
            rows.append([*prefix, *range(begin, begin + tail)])
        return PageTable.from_pages(rows, [pages * _PAGE + own] * self._size.batch, _PAGE)

    def _launch(self, table: PageTable, plan: AttentionPlan) -> Callable[[], mx.array]:
        def launch() -> mx.array:
            out = paged_attention(self._q, self._k, self._v, table, plan=plan, stream=self._device)
            assert isinstance(out, mx.array)
            return out

        return launch

    def _time(self, launches: Sequence[Callable[[], mx.array]]) -> list[float]:
        """Median seconds of each, measured in turn."""
        seconds: list[list[float]] = [[] for _ in launches]
        for round_ in range(self._size.rounds + 1):
            for launch, found in zip(launches, seconds, strict=True):
                begin = time.perf_counter()
                mx.eval([launch() for _ in range(self._size.repeats)])
                if round_ > 0:  # the first warms up
                    found.append((time.perf_counter() - begin) / self._size.repeats)
        return [statistics.median(found) for found in seconds]


def tune_cascade(device: mx.Device) -> str:
    """Measure, keep the constants for this user, and say what they are."""
    constants = {name: float(np.round(value, 4)) for name, value in CascadeTuner(device).run().items()}
    file = tuning.save("cascade", device == mx.cpu, constants)
    return "\n".join([f"{file}:", *(f"  {name:<7}{value:g}" for name, value in constants.items())])

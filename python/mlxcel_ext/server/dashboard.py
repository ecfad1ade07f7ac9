"""The data behind /dashboard: the last minutes as series, and latencies of the last requests."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from .metrics import Finished
from .state import ServerState

#: Latency percentiles cover the requests that finished within this many seconds.
WINDOW = 120.0
_PERCENTILES = (50, 90, 99)


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in _PERCENTILES if ordered}


def _latency(recent: list[Finished], name: str) -> dict[str, float]:
    return _percentiles([value for request in recent if (value := getattr(request, name)) is not None])


def snapshot(state: ServerState) -> dict[str, Any]:
    """Everything that the page shows; it works out rates from the totals."""
    now = time.monotonic()
    recent = [request for request in list(state.metrics.recent) if now - request.time < WINDOW]
    health = state.health()
    outcomes: dict[str, int] = {}
    for request in recent:
        outcomes[request.reason] = outcomes.get(request.reason, 0) + 1
    return {
        "model": state.settings.name,
        "health": {"state": health.state, "detail": health.detail},
        "uptime": time.time() - state.started,
        "stats": dataclasses.asdict(state.stats()),
        "samples": [dataclasses.astuple(sample) for sample in state.samples],
        "window": WINDOW,
        "outcomes": outcomes,
        "latency": {name: _latency(recent, name) for name in ("ttft", "itl", "e2e")},
        "requests": [
            {"age": now - r.time, "ttft": r.ttft, "itl": r.itl, "e2e": r.e2e, "tokens": r.generation_tokens}
            for r in recent[-300:]
        ],
    }

"""Every routing decision is a value: counted, exported, and logged the first time it is taken."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

_logger = logging.getLogger("mlxcel_ext")

#: Metric -> name of its label, None: it has none. The server exports them under these names.
LABELS: dict[str, str | None] = {
    "mlxcel_paged_decode_launches_total": "path",
    "mlxcel_attention_plans_total": "outcome",
    "mlxcel_cascade_shared_tokens_total": None,
    "mlxcel_cascade_member_sequences_total": None,
    "mlxcel_cascade_declined_total": "reason",
    "mlxcel_cascade_failures_total": "reason",
    "mlxcel_engine_steps_total": "kind",
    "mlxcel_engine_step_input_total": "path",
    "mlxcel_engine_sampling_total": "path",
    "mlxcel_prefix_lookups_total": "outcome",
    "mlxcel_admissions_declined_total": "reason",
    "mlxcel_rows_discarded_total": "reason",
    "mlxcel_requests_finished_total": "reason",
    "mlxcel_request_failures_total": "reason",
    "mlxcel_step_failures_total": "stage",
}


@dataclass(frozen=True, slots=True)
class FusedCascade:
    """A step reads common prefixes once for all requests that share them."""

    #: Requests of the step, and those of them that share something.
    batch: int
    members: int
    #: The most shared spans of one request.
    levels: int
    #: Of all spans together.
    shared_pages: int
    shared_tokens: int
    chunks: int


@dataclass(frozen=True, slots=True)
class CascadeDeclined:
    """A step has a flat plan, because

    nothing_shared  no two requests begin with the same pages
    costs           flat attention is estimated to be as fast
    windows         the model's layers see windows of several sizes
    path            attention is gathered (MLXCEL_PAGED_ATTENTION_V2 is off)
    switched_off    MLXCEL_CASCADE_ATTENTION is off
    """

    reason: Literal["nothing_shared", "costs", "windows", "path", "switched_off"]


@dataclass(frozen=True, slots=True)
class CascadeFailed:
    """Planning raised an error of this type; the step has a flat plan."""

    reason: str


class Outcomes:
    """Counts outcomes by metric and label value. Written by one thread, read by any."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {metric: {} for metric in LABELS}

    def count(self, metric: str, value: str = "", amount: int = 1) -> None:
        counts = self._counts[metric]
        if value not in counts:
            label = LABELS[metric]
            _logger.info("first %s%s", metric, "" if label is None else f"{{{label}={value!r}}}")
            counts[value] = 0
        counts[value] += amount

    def snapshot(self) -> dict[str, dict[str, int]]:
        return {metric: dict(counts) for metric, counts in self._counts.items()}

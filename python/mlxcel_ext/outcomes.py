"""Every routing decision is a value: counted, exported, and logged the first time it is taken."""

from __future__ import annotations

import logging

_logger = logging.getLogger("mlxcel_ext")

#: Metric -> name of its label. The server exports them under these names.
LABELS: dict[str, str] = {
    "mlxcel_paged_decode_launches_total": "path",
    "mlxcel_attention_plans_total": "outcome",
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


class Outcomes:
    """Counts outcomes by metric and label value. Written by one thread, read by any."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {metric: {} for metric in LABELS}

    def count(self, metric: str, value: str, amount: int = 1) -> None:
        counts = self._counts[metric]
        if value not in counts:
            _logger.info("first %s{%s=%r}", metric, LABELS[metric], value)
            counts[value] = 0
        counts[value] += amount

    def snapshot(self) -> dict[str, dict[str, int]]:
        return {metric: dict(counts) for metric, counts in self._counts.items()}

"""The histogram of our own, which stands for one of prometheus_client's."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from mlxcel_ext.engine_config import EngineStats
from mlxcel_ext.server.metrics import _ITL, Metrics

NAME = "mlxcel_inter_token_latency_seconds"


def lines(text: bytes) -> list[str]:
    """Those of the histogram, without the time of its creation."""
    return [line for line in text.decode().splitlines() if NAME in line and "created{" not in line]


def test_the_histogram_of_tokens_reads_as_prometheus_clients_own() -> None:
    registry = CollectorRegistry()
    family = Histogram(
        NAME, "Between two tokens of a request", ["model_name"], buckets=_ITL, registry=registry
    )
    metrics = Metrics("m", EngineStats, vllm_names=False)
    for seconds, tokens in ((0.0, 1), (0.001, 1), (0.0011, 1), (0.5, 4), (80.0, 1), (500.0, 1)):
        metrics.token(seconds, tokens)
        for _ in range(tokens):
            family.labels("m").observe(seconds / tokens)
    text = metrics.expose("")[0]
    assert lines(text) == lines(generate_latest(registry))
    assert f'{NAME}_count{{model_name="m"}} 9.0' in text.decode()
    assert f"# TYPE {NAME}_created gauge" in text.decode()

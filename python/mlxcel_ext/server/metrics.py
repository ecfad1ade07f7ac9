"""Prometheus metrics: mlxcel_ names are the truth, vLLM's names repeat them for existing dashboards.

Gauges and token counters are read from the engine when scraped; histograms are observed here as requests
proceed.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import INF, floatToGoString

from ..engine_config import EngineStats
from ..outputs import RequestTimes

_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_ITL = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_LATENCY = (
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
_TOKENS = tuple(mantissa * 10**power for power in range(6) for mantissa in (1, 2, 5))

#: Our family name to vLLM's, both without the _total of counters.
VLLM_NAMES = {
    "mlxcel_num_requests_running": "vllm:num_requests_running",
    "mlxcel_num_requests_waiting": "vllm:num_requests_waiting",
    "mlxcel_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "mlxcel_prefix_cache_query_tokens": "vllm:prefix_cache_queries",
    "mlxcel_prefix_cache_hit_tokens": "vllm:prefix_cache_hits",
    "mlxcel_preemptions": "vllm:num_preemptions",
    "mlxcel_prompt_tokens": "vllm:prompt_tokens",
    "mlxcel_generation_tokens": "vllm:generation_tokens",
    "mlxcel_request_success": "vllm:request_success",
    "mlxcel_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "mlxcel_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "mlxcel_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "mlxcel_request_queue_time_seconds": "vllm:request_queue_time_seconds",
    "mlxcel_request_prefill_time_seconds": "vllm:request_prefill_time_seconds",
    "mlxcel_request_decode_time_seconds": "vllm:request_decode_time_seconds",
    "mlxcel_request_prompt_tokens": "vllm:request_prompt_tokens",
    "mlxcel_request_generation_tokens": "vllm:request_generation_tokens",
    "mlxcel_cache_config_info": "vllm:cache_config_info",
    "mlxcel_spec_decode_num_drafts": "vllm:spec_decode_num_drafts",
    "mlxcel_spec_decode_num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "mlxcel_spec_decode_num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
}


@dataclass(frozen=True)
class Finished:
    """One finished engine request, for the histograms and the dashboard's latency plots."""

    time: float  # time.monotonic() of its end
    reason: str
    ttft: float | None
    e2e: float
    itl: float | None  # mean over its tokens
    prompt_tokens: int
    generation_tokens: int


class _EngineCollector(Collector):
    """Families made from EngineStats at scrape time."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str) -> None:
        self._stats = stats
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        s = self._stats()
        used = s.pages_in_use / s.pages_total if s.pages_total else 0.0
        for name, text, value in (
            ("num_requests_running", "Requests in the running batch", s.running),
            ("num_requests_waiting", "Requests that wait for admission", s.waiting),
            ("kv_cache_usage_ratio", "Share of the KV pages that requests hold, 0 to 1", used),
            ("kv_pages_total", "KV pages of the pool", s.pages_total),
            ("kv_pages_free", "KV pages that hold nothing", s.pages_free),
            ("kv_pages_cached", "KV pages that the prefix cache alone holds", s.pages_cached),
            ("kv_pages_in_use", "KV pages that a request holds", s.pages_in_use),
        ):
            gauge = GaugeMetricFamily(f"mlxcel_{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, total in (
            (
                "prefix_cache_lookups",
                "Requests that looked their prompt up in the prefix cache",
                s.prefix_queries,
            ),
            ("prefix_cache_hits", "Requests that adopted a cached prefix", s.prefix_hits),
            (
                "prefix_cache_query_tokens",
                "Prompt tokens looked up in the prefix cache",
                s.prefix_query_tokens,
            ),
            ("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache", s.prefix_hit_tokens),
            ("prompt_tokens", "Prompt tokens of the requests", s.prompt_tokens),
            ("generation_tokens", "Tokens generated", s.generation_tokens),
            ("preemptions", "Requests that gave their pages back to be recomputed", s.preemptions),
            ("engine_steps", "Steps of the engine", s.steps),
            ("engine_step_seconds", "Seconds that the engine spent in steps", s.step_seconds),
        ):
            counter = CounterMetricFamily(f"mlxcel_{name}", text, labels=["model_name"])
            counter.add_metric([self._model], total)
            yield counter
        for name, by_label in sorted(s.counters.items()):
            kind = s.counter_labels.get(name)
            labels = ["model_name", kind] if kind else ["model_name"]
            counter = CounterMetricFamily(name, "Counter of the engine", labels=labels)
            for label, total in sorted((by_label if kind else by_label or {"": 0}).items()):
                counter.add_metric([self._model, label][: len(labels)], total)
            yield counter
        info = GaugeMetricFamily(
            "mlxcel_cache_config_info",
            "Settings of the KV cache",
            labels=["model_name", "block_size", "num_gpu_blocks"],
        )
        info.add_metric([self._model, str(s.page_size), str(s.pages_total)], 1)
        yield info


class _TokenLatency(Collector):
    """The histogram that every token is counted in: prometheus_client's own costs ten times as much."""

    _NAME = "mlxcel_inter_token_latency_seconds"

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self._counts = [0] * (len(_ITL) + 1)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, seconds: float, tokens: int) -> None:
        """tokens came seconds after the ones before."""
        self._counts[bisect_left(_ITL, seconds / tokens)] += tokens
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._NAME, "Between two tokens of a request", labels=["model_name"])
        bounds = map(floatToGoString, (*_ITL, INF))
        family.add_metric([self._model], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        family.add_sample(f"{self._NAME}_created", {"model_name": self._model}, self._created)
        yield family


class _VllmNames(Collector):
    """Every family that vLLM has too, again, under its name and with its engine label."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def describe(self) -> list[Metric]:
        return []  # collect() would recurse while the registry looks for clashes

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            alias = VLLM_NAMES.get(family.name)
            if alias is None:
                continue
            copy = Metric(alias, family.documentation, family.type, family.unit)
            for sample in family.samples:
                suffix = sample.name.removeprefix(family.name)
                copy.samples.append(Sample(alias + suffix, {**sample.labels, "engine": "0"}, sample.value))
            yield copy


class Metrics:
    """The metrics of one server, on a registry of their own."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats], vllm_names: bool) -> None:
        self._own = CollectorRegistry()
        self._own.register(_EngineCollector(stats, model_name))
        self._all = [self._own]
        if vllm_names:
            aliases = CollectorRegistry()
            aliases.register(_VllmNames(self._own))
            self._all.append(aliases)
        self.recent: deque[Finished] = deque(maxlen=2048)
        self._model = model_name

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            family = Histogram(
                f"mlxcel_{name}", text, ["model_name"], buckets=tuple(buckets), registry=self._own
            )
            return family.labels(model_name)

        self._ttft = histogram(
            "time_to_first_token_seconds", "From the arrival of a request to its first token", _TTFT
        )
        self._itl = _TokenLatency(model_name)
        self._own.register(self._itl)
        self._e2e = histogram(
            "e2e_request_latency_seconds", "From the arrival of a request to its end", _LATENCY
        )
        self._queue = histogram("request_queue_time_seconds", "From submission to the first step", _LATENCY)
        self._prefill = histogram(
            "request_prefill_time_seconds", "From the first step to the first token", _LATENCY
        )
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last", _LATENCY)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Tokens that a request generated", _TOKENS)
        self._success = Counter(
            "mlxcel_request_success",
            "Requests by how they finished",
            ["model_name", "finished_reason"],
            registry=self._own,
        )
        self._rejected = Counter(
            "mlxcel_requests_rejected",
            "Requests refused before the engine",
            ["model_name", "reason"],
            registry=self._own,
        )
        self._http = Counter(
            "mlxcel_http_requests", "HTTP answers", ["route", "method", "status"], registry=self._own
        )

    def token(self, seconds: float, tokens: int) -> None:
        """tokens came seconds after the ones before."""
        self._itl.observe(seconds, tokens)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def finished(self, request: Finished, times: RequestTimes | None) -> None:
        self._success.labels(self._model, request.reason).inc()
        self._e2e.observe(request.e2e)
        self._prompt.observe(request.prompt_tokens)
        self._generated.observe(request.generation_tokens)
        if times is not None and times.scheduled is not None:
            self._queue.observe(times.scheduled - times.submitted)
            if times.first_token is not None:
                self._prefill.observe(times.first_token - times.scheduled)
                if times.finished is not None:
                    self._decode.observe(times.finished - times.first_token)
        self.recent.append(request)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(self._model, reason).inc()

    def http(self, route: str, method: str, status: int) -> None:
        self._http.labels(route, method, str(status)).inc()

    def expose(self, accept: str) -> tuple[bytes, str]:
        """The text of /metrics and its content type, OpenMetrics where the scraper asks for it."""
        if "application/openmetrics-text" in accept:
            text = b"".join(openmetrics.generate_latest(registry) for registry in self._all)
            return text.replace(b"# EOF\n", b"") + b"# EOF\n", openmetrics.CONTENT_TYPE_LATEST
        return b"".join(map(generate_latest, self._all)), CONTENT_TYPE_LATEST

"""Configuration, health and statistics of the engine. Pure: the server and the tests use it without a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")


class EngineError(RuntimeError):
    """Base of what the engine raises beside ValueError."""


class QueueFullError(EngineError):
    """The waiting queue is at max_queue_depth: try again later (429 or 503 with Retry-After)."""


class EngineDeadError(EngineError):
    """The engine is dead or draining and takes no request (503)."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the engine; the server's flags have the same names.

    page_size                 tokens per KV page, a power of two up to 256
    max_num_seqs              most requests in one step (alias parallel)
    max_model_len             most tokens of prompt plus output; None: the model's, and never more than the pool holds
    prefill_chunk_size        most prompt tokens in one step; decode never waits for more
    max_num_batched_tokens    most tokens in one step; None: max_num_seqs + prefill_chunk_size
    prefill_grant_interval    a parked prefill gets a chunk after at most that many decode ticks; 0: only when
                              no request decodes (new requests then wait too, so that decoding drains)
    mixed_steps               decode rows and prefill chunks share a launch; off: they alternate
    max_queue_depth           most waiting requests; beyond it submit raises QueueFullError
    kv_cache_bytes            size of the page pool; None: enough for max_num_seqs full contexts, capped by memory
    num_pages                 size of the page pool in pages; overrides kv_cache_bytes
    kv_cache_dtype            of keys and values in the pages: float32, float16, bfloat16 or auto, which is the activations'
                              dtype, but float16 under float32 activations on CPU (half the memory, and half of what
                              attention reads; float32 is the exact setting)
    prompt_cache_bytes        most bytes of pages that the prefix cache holds; None: the whole pool
    enable_prefix_caching     share the pages of equal prefixes between requests
    watermark                 share of the pages that admission leaves free while other requests run
    prefill_progress          send RequestOutput.prefill_progress while a prompt takes several chunks
    pipeline                  submit a step before the previous one is read; off: for debugging
    max_request_seconds       time limit of a request from its submission; None: none
    stall_seconds             health() says "dead" while one step takes longer than that; None: never
    max_step_failures         consecutive failed steps after which the engine shuts down
    batch_invariant           attention reduces in an order that depends on the request alone, so that caching, chunks
                              and company never change a greedy answer; None: on CPU
    seed                      seeds the requests that bring none
    threads                   CPU threads of the ops; None: all that are available
    """

    page_size: int = 16
    max_num_seqs: int = 32
    max_model_len: int | None = None
    prefill_chunk_size: int = 512
    max_num_batched_tokens: int | None = None
    prefill_grant_interval: int = 16
    mixed_steps: bool = True
    max_queue_depth: int = 256
    kv_cache_bytes: int | None = None
    num_pages: int | None = None
    kv_cache_dtype: str = "auto"
    prompt_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    prefill_progress: bool = True
    pipeline: bool = True
    max_request_seconds: float | None = None
    stall_seconds: float | None = 600.0
    max_step_failures: int = 5
    batch_invariant: bool | None = None
    seed: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError on a value out of range."""
        low = {"prefill_grant_interval": 0, "max_queue_depth": 0, "prompt_cache_bytes": 0, "seed": 0}
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None or isinstance(value, bool):
                continue
            if f.name == "kv_cache_dtype":
                if value not in KV_CACHE_DTYPES:
                    raise ValueError(
                        f"[engine] kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}; got {value!r}."
                    )
            elif f.name == "watermark":
                if not 0.0 <= value < 1.0:
                    raise ValueError(f"[engine] watermark must be in [0, 1); got {value!r}.")
            elif f.name.endswith("_seconds"):
                if not value > 0.0:
                    raise ValueError(f"[engine] {f.name} must be positive; got {value!r}.")
            elif not isinstance(value, int) or value < low.get(f.name, 1):
                raise ValueError(
                    f"[engine] {f.name} must be an integer >= {low.get(f.name, 1)}; got {value!r}."
                )
        if self.page_size & (self.page_size - 1) or self.page_size > 256:
            raise ValueError(
                f"[engine] page_size must be a power of two from 1 to 256; got {self.page_size}."
            )

    @property
    def token_budget(self) -> int:
        return self.max_num_batched_tokens or self.max_num_seqs + self.prefill_chunk_size


@dataclass(frozen=True)
class Health:
    """The truth about the engine. Only "ok" takes requests."""

    state: Literal["loading", "ok", "draining", "dead"]
    detail: str = ""


@dataclass(frozen=True)
class EngineStats:
    """Plain numbers of one moment; totals count since the start.

    counters maps a metric's name to {label value: count}; counter_labels gives the label's name. So
    counters["mlxcel_paged_decode_launches_total"]["fused_v2"] is
    mlxcel_paged_decode_launches_total{path="fused_v2"}.
    """

    running: int = 0
    waiting: int = 0
    max_num_seqs: int = 0
    max_model_len: int = 0
    page_size: int = 0
    page_bytes: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0  # held by the prefix cache alone
    pages_in_use: int = 0  # held by a request (and perhaps by the cache too)
    prefix_queries: int = 0  # requests that looked their prompt up
    prefix_hits: int = 0  # of those, requests that adopted at least one token
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    step_seconds: float = 0.0  # time the engine thread spent in steps
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    counter_labels: Mapping[str, str | None] = field(default_factory=dict)

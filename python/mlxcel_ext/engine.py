"""The engine: one thread that schedules, runs and reads steps, and never lets one request take down the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .engine_config import (
    EngineConfig,
    EngineDeadError,
    EngineError,
    EngineStats,
    Health,
    QueueFullError,
)
from .outputs import RequestOutput
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .models import LoadedModel

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineStats",
    "Health",
    "QueueFullError",
]


class Engine:
    """Continuous batching over one model. Every public method is thread-safe."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig | None = None) -> None:
        raise NotImplementedError

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt plus output."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the engine thread; returns at once. health() is "loading" until it runs."""
        raise NotImplementedError

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """Refuse new requests, finish (drain) or abort the others, and join the thread.

        With a timeout, what still runs after that many seconds is aborted.
        """
        raise NotImplementedError

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        on_output: Callable[[RequestOutput], None],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
    ) -> None:
        """Queue a request.

        on_output is called on the engine thread with each delta and must not block; the last one is finished.
        A lower priority runs first. deadline is a time.monotonic() value.
        Raises ValueError (bad params or grammar, empty or too long prompt, id in use), QueueFullError,
        EngineDeadError.
        """
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        """End a request with finish_reason "abort"; unknown ids are ignored. Its pages are free within a step."""
        raise NotImplementedError

    def health(self) -> Health:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        raise NotImplementedError

    def reset_prefix_cache(self) -> int:
        """Drop every cached page that no request uses; returns how many. Waits for the current step."""
        raise NotImplementedError

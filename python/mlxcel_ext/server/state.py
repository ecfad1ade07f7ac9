"""What all handlers of one server share: settings, engine, model, metrics, and whether it takes requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

from ..engine_config import EngineStats, Health
from .errors import ApiError
from .inbox import Inbox
from .metrics import Metrics
from .settings import EngineLike, ModelLike, ServerSettings
from .token_text import TokenText

#: Seconds between two samples of the dashboard, and how many are kept.
SAMPLE_INTERVAL = 1.0
SAMPLES = 300


@dataclass(frozen=True)
class Sample:
    """One moment of the dashboard's plots. Token counts are totals."""

    time: float
    running: int
    waiting: int
    kv_usage: float
    prompt_tokens: int
    generation_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int


class ServerState:
    """Until `attach` the server answers 503; after `drain` it finishes what it has and refuses the rest.

    Made on the event loop that serves.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.started = time.time()
        self.metrics = Metrics(settings.name, self.stats, settings.metrics_compat == "vllm")
        self.inbox = Inbox(asyncio.get_running_loop())
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._engine: EngineLike | None = None
        self._model: ModelLike | None = None
        self._texts: TokenText | None = None
        self._draining = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def attach(self, engine: EngineLike, model: ModelLike) -> None:
        """The model is loaded: take requests."""
        self._texts = TokenText(model.tokenizer)
        self._model, self._engine = model, engine

    def drain(self) -> None:
        """Take no more requests; those in flight go on."""
        self._draining = True

    @property
    def engine(self) -> EngineLike:
        """The engine, where it takes requests; an ApiError 503 that says why where it does not."""
        health = self.health()
        if health.state != "ok" or self._engine is None:
            detail = f": {health.detail}" if health.detail else ""
            retry = 1 if health.state == "loading" else 10
            raise ApiError(503, f"The server is {health.state}{detail}", code=health.state, retry_after=retry)
        return self._engine

    @property
    def model(self) -> ModelLike:
        if self._model is None:
            raise ApiError(503, "The server is loading the model", code="loading", retry_after=1)
        return self._model

    @property
    def texts(self) -> TokenText:
        if self._texts is None:
            raise ApiError(503, "The server is loading the model", code="loading", retry_after=1)
        return self._texts

    def health(self) -> Health:
        """The truth: a dead engine is dead whatever else holds."""
        if self._engine is None:
            return Health("draining" if self._draining else "loading")
        health = self._engine.health()
        if self._draining and health.state == "ok":
            return Health("draining")
        return health

    def stats(self) -> EngineStats:
        return EngineStats() if self._engine is None else self._engine.stats()

    def check_model(self, name: str | None) -> None:
        """A 404 for a model that is not served; a request without a name gets the one there is."""
        if name is not None and name not in self.settings.served_model_name:
            served = ", ".join(self.settings.served_model_name)
            raise ApiError(
                404,
                f"The model {name!r} does not exist; this server has {served}",
                param="model",
                code="model_not_found",
            )

    def begin(self) -> None:
        """A request that the drain must wait for has started."""
        self._in_flight += 1
        self._idle.clear()

    def end(self) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle.set()

    async def idle(self, timeout: float) -> bool:
        """Wait for the requests in flight; whether all ended in time."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def sample(self) -> None:
        """Record the dashboard's samples, for ever."""
        while True:
            stats = self.stats()
            used = stats.pages_in_use / stats.pages_total if stats.pages_total else 0.0
            self.samples.append(
                Sample(
                    time.time(),
                    stats.running,
                    stats.waiting,
                    used,
                    stats.prompt_tokens,
                    stats.generation_tokens,
                    stats.prefix_query_tokens,
                    stats.prefix_hit_tokens,
                )
            )
            await asyncio.sleep(SAMPLE_INTERVAL)

"""What completions and chat completions share: a request on its way, and the two forms of its answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request

from ..outputs import RequestOutput
from .body import read_json
from .errors import bad_request
from .generation import Generation, Work
from .middleware import LOG_FIELDS
from .params import grammar_field
from .protocol import GenerationRequest, Usage, encode
from .respond import json_response, stream_response
from .sse import event, until_disconnect
from .state import ServerState

R = TypeVar("R", bound=GenerationRequest)


class Answer(ABC, Generic[R]):
    """One request: `prepare` turns it into works, `add` or `chunks` take their outputs."""

    id_prefix: ClassVar[str]
    #: The "object" of a whole answer, and of a chunk of a stream.
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, state: ServerState, request: R, log_fields: dict[str, Any]) -> None:
        self.state = state
        self.request = request
        self.works: list[Work] = []
        self._log_fields = log_fields
        self._id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    @abstractmethod
    async def prepare(self) -> None:
        """Make the works; an ApiError where the request cannot be served."""

    @abstractmethod
    def add(self, index: int, output: RequestOutput) -> None:
        """Take an output of a choice in, for an answer in one piece."""

    @abstractmethod
    def chunks(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Take an output of a choice in; "choices" and further fields of the chunks that it completes."""

    @abstractmethod
    def usage(self, generation: Generation) -> Usage:
        """Token counts so far."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Choices and further fields of an answer that is complete."""

    def generation(self) -> Generation:
        return Generation(
            self.state,
            self.works,
            self._log_fields,
            stream=bool(self.request.stream),
            priority=self.request.priority or 0,
            cache_salt=self.request.cache_salt,
            grammar_field=grammar_field(self.request),
        )

    def _envelope(self, kind: str, **fields: Any) -> dict[str, Any]:
        model = self.request.model or self.state.settings.name
        return {"id": self._id, "object": kind, "created": self._created, "model": model, **fields}

    async def response(self) -> Any:
        """The answer in one piece."""
        async with self.generation() as generation:
            async for batch in generation:
                for index, output in batch:
                    self.add(index, output)
            usage = self.usage(generation)
        params = self.works[0].params
        if params.logprobs is None and params.prompt_logprobs is None:
            fields = self.whole()
        else:  # those of a long prompt take seconds to write down
            fields = await asyncio.to_thread(self.whole)
        return json_response(self._envelope(self.whole_kind, **fields, usage=usage))

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The answer as chunks, those of each batch of outputs together."""
        options = self.request.stream_options
        include_usage = bool(options and options.include_usage)
        every_usage = bool(options and options.continuous_usage_stats)
        # Encoded once, not for each token: what comes before and after the fields that change.
        head = encode(self._envelope(self.chunk_kind))[:-1] + b","
        tail = b',"usage":null}' if include_usage else b"}"

        def written(batch: list[tuple[int, RequestOutput]], tail: bytes) -> bytes:
            return b"".join(
                event(head + encode(fields)[1:-1] + tail)
                for index, output in batch
                for fields in self.chunks(index, output)
            )

        slow = self.works[0].params.prompt_logprobs is not None
        async for batch in generation:
            if every_usage:
                tail = b',"usage":' + encode(self.usage(generation)) + b"}"
            yield await asyncio.to_thread(written, batch, tail) if slow else written(batch, tail)
        if include_usage:
            yield event(encode(self._envelope(self.chunk_kind, choices=[], usage=self.usage(generation))))


async def answer(request: Request, kind: type[Answer[R]], body_type: type[R]) -> Any:
    """Handler of a route that generates."""
    state: ServerState = request.app.state.server
    body = await read_json(request, body_type, state.settings.max_body_bytes)
    state.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options wants stream to be true", "stream_options", "invalid_value")
    if body.priority and state.settings.scheduling_policy == "fcfs":
        raise bad_request(
            "priority wants a server with --scheduling-policy priority", "priority", "invalid_value"
        )
    job = kind(state, body, request.scope[LOG_FIELDS])
    await job.prepare()
    if body.stream:
        return await stream_response(job.generation(), job.events)
    return await until_disconnect(request.receive, job.response())

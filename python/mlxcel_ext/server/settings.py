"""Settings of the server, and what it asks of the engine and the model: their public methods alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..engine_config import EngineStats, Health
from ..outputs import RequestOutput
from ..sampling_params import SamplingParams


@dataclass(frozen=True)
class ServerSettings:
    """What an operator decides about the HTTP side; the flags of `serve` have the same names.

    served_model_name    names that requests may use; the first is the one that answers show
    api_key              keys of which a request must bring one; empty: no key is wanted
    allowed_origins      CORS origins; "*" is any; empty: pages of this machine (localhost) only
    max_body_bytes       larger request bodies are a 413
    request_timeout      seconds after which a request ends with 504; None: no limit
    keepalive_interval   seconds of silence after which a stream gets a comment line
    shutdown_timeout     seconds that running requests have to finish after SIGTERM
    metrics_compat       "vllm" repeats the metrics under vLLM's names
    tool_call_parser     "auto" goes by the chat template
    scheduling_policy    "priority" honours the priority of requests; "fcfs" refuses it
    max_choices          most engine requests of one HTTP request (prompts times n)
    """

    served_model_name: tuple[str, ...] = ("model",)
    api_key: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    request_timeout: float | None = None
    keepalive_interval: float = 5.0
    shutdown_timeout: float = 30.0
    metrics_compat: str = "vllm"
    tool_call_parser: str = "auto"
    scheduling_policy: str = "fcfs"
    max_choices: int = 2048
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.served_model_name[0]


class EngineLike(Protocol):
    """The engine's public methods."""

    @property
    def max_model_len(self) -> int: ...
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
    ) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def health(self) -> Health: ...
    def stats(self) -> EngineStats: ...
    def reset_prefix_cache(self) -> int: ...
    def shutdown(self, drain: bool = True, timeout: float | None = None) -> None: ...


class TokenizerLike(Protocol):
    """What the server needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_token_chars(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...
    def id_to_token(self, token_id: int) -> str | None: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class ChatTemplateLike(Protocol):
    """What the server needs of a chat template."""

    @property
    def source(self) -> str: ...
    def render(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str: ...


class ModelLike(Protocol):
    """A loaded model as the server sees it."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> TokenizerLike: ...
    @property
    def chat_template(self) -> ChatTemplateLike | None: ...

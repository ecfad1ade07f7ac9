"""What a request asks of the sampler and when it stops. Pure: imports nothing of the engine or of MLX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = ("json_object", "json_schema", "regex", "choice", "grammar")

MAX_SEED = 2**64 - 1
MAX_COUNT = 2**31 - 1
#: Least and greatest value of each number, for the engine, the server and its OpenAPI document alike.
#: Alternatives of log-probabilities are read back to the host each step: 64 is what the op returns.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, MAX_COUNT),
    "seed": (0, MAX_SEED),
    "max_tokens": (1, MAX_COUNT),
    "min_tokens": (0, MAX_COUNT),
    "logprobs": (0, 64),
    "prompt_logprobs": (0, 64),
    "logit_bias": (-100.0, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-3, 1e3),
}
#: Most entries of the lists; each is looked at for every token.
MAX_STOPS = {"stop": 64, "stop_token_ids": 128}
#: Most characters of a grammar, of all choices together: larger ones take minutes to compile.
MAX_GRAMMAR = 256 * 1024


@dataclass(frozen=True)
class GrammarSpec:
    """A constraint on the output's text.

    ``value`` is the JSON schema as text for ``json_schema`` (ignored for ``json_object``), the pattern for
    ``regex``, the alternatives for ``choice`` and a Lark grammar for ``grammar``.
    """

    kind: GrammarKind
    value: str | tuple[str, ...] = ""

    def validate(self) -> None:
        """Raise ValueError on a wrong kind or value type; the grammar itself is compiled at submission."""
        if self.kind not in GRAMMAR_KINDS:
            raise ValueError(
                f"[sampling] grammar kind must be one of {', '.join(GRAMMAR_KINDS)}; got {self.kind!r}."
            )
        if self.kind == "choice":
            if (
                not isinstance(self.value, tuple)
                or not self.value
                or not all(isinstance(v, str) for v in self.value)
            ):
                raise ValueError(
                    f"[sampling] choice must be a non-empty list of strings; got {self.value!r}."
                )
        elif self.kind != "json_object" and (not isinstance(self.value, str) or not self.value):
            raise ValueError(f"[sampling] {self.kind} must be a non-empty string; got {self.value!r}.")
        size = len(self.value) if isinstance(self.value, str) else sum(map(len, self.value))
        if size > MAX_GRAMMAR:
            raise ValueError(
                f"[sampling] {self.kind} must have at most {MAX_GRAMMAR} characters; got {size}."
            )


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request; defaults are OpenAI's.

    temperature
        0 is greedy. Filters apply in the order temperature, top_k, top_p, min_p; top_k 0 and top_p 1 are off.
    seed
        64 bits; None draws one. A token depends on the seed and on its index in the output, never on the batch.
    max_tokens
        None: up to the model's context.
    min_tokens
        Neither an EOS nor a stop token is drawn before that many tokens; a grammar that is at its end wins.
    stop, stop_token_ids
        The text ends before a stop string (after it with include_stop_str_in_output).
    logprobs, prompt_logprobs
        Number of alternatives to report beside the token itself; 0 reports the token alone, None nothing.
        Log-probabilities are the model's, before temperature and filters.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    grammar: GrammarSpec | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1 or self.top_p <= 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def validate(self, vocab_size: int) -> None:
        """Raise a ValueError that names the first bad argument, what came and what is wanted."""
        for name in ("temperature", "top_p", "min_p"):
            _number(name, getattr(self, name))
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            _number(name, getattr(self, name))
        _integer("top_k", self.top_k)
        _integer("min_tokens", self.min_tokens)
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name))
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise ValueError(
                    f"[sampling] {name} must not exceed the vocabulary's {vocab_size} tokens; got {getattr(self, name)}."
                )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"[sampling] min_tokens must not exceed max_tokens; got {self.min_tokens} and {self.max_tokens}."
            )
        for name, most in MAX_STOPS.items():
            if len(getattr(self, name)) > most:
                raise ValueError(
                    f"[sampling] {name} must have at most {most} entries; got {len(getattr(self, name))}."
                )
        if not all(isinstance(stop, str) and stop for stop in self.stop):
            raise ValueError(f"[sampling] stop must hold non-empty strings; got {self.stop!r}.")
        for name, tokens in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token in tokens:
                _integer(name, token, (0, vocab_size - 1))
        for bias in self.logit_bias.values():
            _number("logit_bias", bias)
        if self.grammar is not None:
            self.grammar.validate()


def _number(name: str, value: float) -> None:
    low, high = RANGES[name]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise ValueError(f"[sampling] {name} must be a number in [{low:g}, {high:g}]; got {value!r}.")


def _integer(name: str, value: int, bounds: tuple[float, float] | None = None) -> None:
    low, high = bounds or RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"[sampling] {name} must be an integer in [{low}, {high}]; got {value!r}.")

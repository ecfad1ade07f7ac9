"""What a request asks of the sampler and when it stops. Pure: imports nothing of the engine or of MLX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = ("json_object", "json_schema", "regex", "choice", "grammar")

#: More than this many alternatives a token is refused: they are read back to the host each step.
MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 64
MAX_SEED = 2**64 - 1


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
        Neither an EOS nor a stop token is drawn before that many tokens.
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
        _number("temperature", self.temperature, 0.0, 1e4)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, None)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"[sampling] min_tokens must not exceed max_tokens; got {self.min_tokens} and {self.max_tokens}."
            )
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _integer(name, value, 0, min(MAX_LOGPROBS, vocab_size))
        if len(self.stop) > MAX_STOP_STRINGS or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(
                f"[sampling] stop must be at most {MAX_STOP_STRINGS} non-empty strings; got {self.stop!r}."
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, vocab_size - 1)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, vocab_size - 1)
            _number("logit_bias", bias, -1e4, 1e4)
        if self.grammar is not None:
            self.grammar.validate()


def _number(name: str, value: float, low: float, high: float) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise ValueError(f"[sampling] {name} must be a number in [{low:g}, {high:g}]; got {value!r}.")


def _integer(name: str, value: int, low: int, high: int | None) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < low
        or (high is not None and value > high)
    ):
        wanted = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"[sampling] {name} must be an integer {wanted}; got {value!r}.")

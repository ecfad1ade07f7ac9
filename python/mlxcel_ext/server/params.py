"""From request bodies to SamplingParams."""

from __future__ import annotations

import json
from typing import Any

from ..sampling_params import MAX_SEED, GrammarKind, GrammarSpec, SamplingParams
from .errors import bad_request
from .protocol import GenerationRequest, ResponseFormat, StructuredOutputs


def sampling_params(
    request: GenerationRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: GrammarSpec | None,
    keep_special_tokens: bool = False,
) -> SamplingParams:
    """The request's parameters with OpenAI's defaults for what is absent or null."""
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens ({min_tokens}) must not exceed max_tokens ({max_tokens})",
            "min_tokens",
            "invalid_value",
        )
    return SamplingParams(
        temperature=_default(request.temperature, 1.0),
        top_p=_default(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),  # vLLM's -1 is off, too
        min_p=request.min_p or 0.0,
        seed=None if request.seed is None else request.seed & MAX_SEED,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=not keep_special_tokens and request.skip_special_tokens is not False,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(request.logit_bias or {}),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_default(request.repetition_penalty, 1.0),
        grammar=grammar,
    )


def _default(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _logit_bias(raw: dict[str, float]) -> dict[int, float]:
    bias = {}
    for key, value in raw.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise bad_request(f"logit_bias: {key!r} is no token id", "logit_bias", "invalid_value")
        bias[int(key)] = value
    return bias


def grammar_of(request: GenerationRequest) -> GrammarSpec | None:
    """The constraint that response_format or structured_outputs asks for; both together are a 400."""
    by_format = _from_format(request.response_format)
    by_structure = _from_structure(request.structured_outputs)
    if by_format and by_structure:
        raise bad_request(
            "response_format and structured_outputs exclude each other", "structured_outputs", "invalid_value"
        )
    return by_format or by_structure


def grammar_field(request: GenerationRequest) -> str:
    """The field that the grammar came from, for errors."""
    if _from_format(request.response_format) is not None:
        return "response_format"
    return "tools" if request.structured_outputs is None else "structured_outputs"


def schema_grammar(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False))


def _from_format(spec: ResponseFormat | None) -> GrammarSpec | None:
    if spec is None or spec.type == "text":
        return None
    if spec.type == "json_object":
        return GrammarSpec("json_object")
    if spec.json_schema is None or spec.json_schema.schema is None:
        raise bad_request(
            "response_format of type json_schema wants json_schema.schema",
            "response_format.json_schema",
            "invalid_value",
        )
    return schema_grammar(spec.json_schema.schema)


def _from_structure(spec: StructuredOutputs | None) -> GrammarSpec | None:
    if spec is None:
        return None
    kinds = ("json", "regex", "choice", "grammar", "json_object")
    given = [name for name in kinds if getattr(spec, name) not in (None, False)]
    if len(given) != 1:
        raise bad_request(
            f"structured_outputs wants exactly one of {', '.join(kinds)}; got {', '.join(given) or 'none'}",
            "structured_outputs",
            "invalid_value",
        )
    if spec.json_object:
        return GrammarSpec("json_object")
    if spec.json is not None:
        return (
            GrammarSpec("json_schema", spec.json) if isinstance(spec.json, str) else schema_grammar(spec.json)
        )
    if spec.choice is not None:
        return GrammarSpec("choice", tuple(spec.choice))
    kind: GrammarKind = "regex" if spec.regex is not None else "grammar"
    value = spec.regex if spec.regex is not None else spec.grammar
    if not value:
        raise bad_request(
            f"structured_outputs.{kind} must not be empty", "structured_outputs", "invalid_value"
        )
    return GrammarSpec(kind, value)

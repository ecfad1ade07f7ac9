"""One range for each number: what the OpenAPI document states, the server accepts and the engine takes."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from mlxcel_ext.sampling_params import MAX_STOPS, RANGES, SamplingParams
from mlxcel_ext.server.openapi import document

VOCAB_SIZE = 1000
#: A negative seed is the two's complement of a large one, which the document's integers cannot write.
ELSEWHERE = {"seed"}
SHARED = sorted(set(RANGES) - ELSEWHERE - {"max_tokens", "logprobs", "logit_bias"})
BODIES = {
    "/v1/completions": ("CompletionRequest", {"prompt": "a", "max_tokens": 1}),
    "/v1/chat/completions": (
        "ChatCompletionRequest",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    ),
}


def stated(schema: str, name: str) -> dict[str, Any]:
    """The schema of a field where it is not null."""
    field = document()["components"]["schemas"][schema]["properties"][name]
    [kind] = [option for option in field["anyOf"] if option.get("type") != "null"]
    return kind


def beyond(value: float, by: int) -> float:
    """The next value outside a bound."""
    return value + by if isinstance(value, int) else math.nextafter(value, by * math.inf)


@pytest.mark.parametrize("schema", ["CompletionRequest", "ChatCompletionRequest"])
@pytest.mark.parametrize("name", SHARED)
def test_the_document_states_the_engines_range(schema: str, name: str) -> None:
    kind = stated(schema, name)
    assert (kind["minimum"], kind["maximum"]) == RANGES[name]


def test_the_document_states_the_ranges_of_fields_that_differ() -> None:
    assert stated("ChatCompletionRequest", "top_logprobs")["maximum"] == RANGES["logprobs"][1]
    assert stated("CompletionRequest", "logprobs")["maximum"] == RANGES["logprobs"][1]
    assert stated("CompletionRequest", "max_tokens") == {
        "type": "integer",
        "minimum": 0,
        "maximum": RANGES["max_tokens"][1],
    }
    for name in ("max_tokens", "max_completion_tokens"):
        kind = stated("ChatCompletionRequest", name)
        assert (kind["minimum"], kind["maximum"]) == RANGES["max_tokens"]
    bias = stated("CompletionRequest", "logit_bias")["additionalProperties"]
    assert (bias["minimum"], bias["maximum"]) == RANGES["logit_bias"]


def test_every_number_and_list_of_the_engine_has_a_range() -> None:
    fields = SamplingParams.__dataclass_fields__
    numbers = {name for name, field in fields.items() if "float" in field.type or "int" in field.type}
    assert numbers - {"stop_token_ids"} == set(RANGES)
    assert {name for name, field in fields.items() if "tuple" in field.type} == set(MAX_STOPS)


@pytest.mark.parametrize("name", sorted(set(RANGES) - {"logit_bias"}))
def test_the_engine_takes_its_bounds_and_nothing_beyond(name: str) -> None:
    low, high = RANGES[name]
    most = {"min_tokens": {"max_tokens": None}}.get(name, {})
    for value in (low, high):
        SamplingParams(**{**most, name: value}).validate(VOCAB_SIZE)
    for value in (beyond(low, -1), beyond(high, 1), math.nan, True, "1"):
        with pytest.raises(ValueError, match=rf"^\[sampling\] {name} must be"):
            SamplingParams(**{**most, name: value}).validate(VOCAB_SIZE)


@pytest.mark.parametrize(("name", "most"), MAX_STOPS.items())
def test_the_engine_bounds_its_lists(name: str, most: int) -> None:
    entry: Any = "x" if name == "stop" else 1
    SamplingParams(**{name: (entry,) * most}).validate(VOCAB_SIZE)
    with pytest.raises(ValueError, match=rf"{name} must have at most {most}"):
        SamplingParams(**{name: (entry,) * (most + 1)}).validate(VOCAB_SIZE)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", SHARED)
async def test_the_server_takes_the_bounds_and_nothing_beyond(
    client: httpx.AsyncClient, path: str, name: str
) -> None:
    low, high = RANGES[name]
    body = BODIES[path][1]
    if name != "min_tokens":  # its upper bound is max_tokens, which the context bounds
        assert (await client.post(path, json={**body, name: high})).status_code == 200
    assert (await client.post(path, json={**body, name: low})).status_code == 200
    for value in (beyond(low, -1), beyond(high, 1)):
        response = await client.post(path, json={**body, name: value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
async def test_a_seed_has_64_bits(client: httpx.AsyncClient, seed: int) -> None:
    response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "seed": seed})
    assert response.status_code == 200

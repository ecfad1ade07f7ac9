"""POST /v1/completions over the fake engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from mlxcel_ext.server.openapi import document
from mlxcel_ext.server.settings import ServerSettings

from .fake_engine import FakeEngine, FakeTokenizer

TOKENIZER = FakeTokenizer()


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json={"model": "fake", **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def stream(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post("/v1/completions", json={"model": "fake", "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


async def test_defaults_are_openais(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = await complete(client, prompt="abcd", temperature=None, max_tokens=None, nonsense=1)
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "abcd" * 4, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 16,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    [(_, params)] = engine.seen
    assert (params.temperature, params.top_p, params.seed) == (1.0, 1.0, None)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        (TOKENIZER.encode("ab"), ["ab"]),
        ([TOKENIZER.encode("ab"), TOKENIZER.encode("cd")], ["ab", "cd"]),
        (["ab", TOKENIZER.encode("cd")], ["ab", "cd"]),
    ],
)
async def test_every_form_of_prompt(client: httpx.AsyncClient, prompt: Any, texts: list[str]) -> None:
    body = await complete(client, prompt=prompt, max_tokens=2, n=2)
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(texts)))
    assert [choice["text"] for choice in body["choices"]] == [text for text in texts for _ in range(2)]
    assert body["usage"]["prompt_tokens"] == 2 * len(texts)
    assert body["usage"]["completion_tokens"] == 4 * len(texts)


@pytest.mark.parametrize(
    ("path", "schema", "needed"),
    [
        ("/v1/completions", "CompletionRequest", {"prompt": "a"}),
        (
            "/v1/chat/completions",
            "ChatCompletionRequest",
            {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 2},
        ),
    ],
)
async def test_null_is_the_default_and_unknown_fields_are_ignored(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, schema: str, needed: dict[str, Any]
) -> None:
    fields = document()["components"]["schemas"][schema]["properties"]
    nulls = dict.fromkeys(set(fields) - set(needed))
    plain = await client.post(path, json=needed)
    same = await client.post(path, json={**nulls, **needed, "made_up": {"x": [1]}, "best_effort": True})
    assert (plain.status_code, same.status_code) == (200, 200)
    assert engine.seen[0] == engine.seen[1]
    assert same.json()["choices"] == plain.json()["choices"]


async def test_choices_get_seeds_of_their_own(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await complete(client, prompt=["a", "b"], n=3, seed=-1, max_tokens=1)
    assert [params.seed for _, params in engine.seen] == [2**64 - 1, 0, 1] * 2


async def test_every_parameter_reaches_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    wanted = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 5,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.2,
        "logprobs": 3,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    await complete(client, prompt="a", stop=["x", "y"], stop_token_ids=[50], logit_bias={"42": -5}, **wanted)
    [(_, params)] = engine.seen
    assert {name: getattr(params, name) for name in wanted} == wanted
    assert (params.stop, params.stop_token_ids, dict(params.logit_bias)) == (("x", "y"), (50,), {42: -5})


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "string"}},
                }
            },
            "json_schema",
        ),
        ({"structured_outputs": {"json": {"type": "integer"}}}, "json_schema"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "grammar"),
        ({"response_format": {"type": "text"}}, None),
    ],
)
async def test_constraints_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], kind: str | None
) -> None:
    await complete(client, prompt="a", max_tokens=1, **body)
    grammar = engine.seen[0][1].grammar
    assert (grammar.kind if grammar else None) == kind


async def test_echo_with_logprobs_is_what_lm_eval_reads(client: httpx.AsyncClient) -> None:
    body = await complete(client, prompt="añb", echo=True, logprobs=1, max_tokens=1, temperature=0)
    [choice] = body["choices"]
    assert choice["text"] == "añba"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xb1", "b", "a"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3] == {"b": -0.5}
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3]


async def test_scoring_alone_returns_no_token(client: httpx.AsyncClient) -> None:
    body = await complete(client, prompt=[TOKENIZER.encode("ab")], echo=True, logprobs=0, max_tokens=0)
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert body["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_and_token_ids(client: httpx.AsyncClient) -> None:
    body = await complete(client, prompt="ab", max_tokens=2, prompt_logprobs=1, return_token_ids=True)
    [choice] = body["choices"]
    a, b = TOKENIZER.encode("ab")
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([a, b], [a, b])
    assert choice["prompt_logprobs"] == [None, {str(b): {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]


async def test_a_stream_says_what_the_whole_answer_says(client: httpx.AsyncClient) -> None:
    request = {"prompt": ["日本語", "cd"], "n": 2, "max_tokens": 9, "logprobs": 1, "echo": True, "seed": 1}
    whole = await complete(client, **request)
    chunks = await stream(client, **request, stream_options={"include_usage": True})
    usage = chunks.pop()
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 36)
    assert all(chunk["usage"] is None for chunk in chunks)
    for index, expected in enumerate(whole["choices"]):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert "\ufffd" not in expected["text"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == "length"
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [value for part in parts for value in part["logprobs"][name]]
            assert joined == expected["logprobs"][name]


async def test_stop_strings_end_the_text(client: httpx.AsyncClient) -> None:
    body = await complete(client, prompt="abcd", stop="da", max_tokens=50)
    assert body["choices"][0]["text"] == "abc"
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", "da")
    chunks = await stream(client, prompt="abcd", stop=["da"], max_tokens=50)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"


async def test_usage_on_every_chunk(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, prompt="ab", max_tokens=3, stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 3
    assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in chunks)


async def test_cached_tokens_are_counted_once_a_prompt(client: httpx.AsyncClient) -> None:
    prompt = "a long prompt, more than a page"
    await complete(client, prompt=prompt, max_tokens=1)
    body = await complete(client, prompt=[prompt, "short"], n=2, max_tokens=1)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


async def test_a_prompt_may_keep_its_last_tokens_alone(client: httpx.AsyncClient) -> None:
    body = await complete(client, prompt="abcdef", truncate_prompt_tokens=2, max_tokens=2)
    assert (body["choices"][0]["text"], body["usage"]["prompt_tokens"]) == ("ef", 2)


async def test_more_prompts_than_the_queue_holds_wait_for_their_own(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    object.__setattr__(engine.config, "max_queue_depth", 2)
    prompts = [f"prompt {index:02}" for index in range(40)]
    body = await complete(client, prompt=prompts, max_tokens=9)
    assert [choice["text"] for choice in body["choices"]] == prompts


async def test_a_salt_reaches_the_engine_and_a_priority_is_refused(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await complete(client, prompt="a", max_tokens=1, cache_salt="s", priority=0)
    assert engine.placed == [(0, "s")]
    response = await client.post("/v1/completions", json={"prompt": "a", "priority": -5})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "priority"


class TestPriority:
    @pytest.fixture
    def settings(self) -> ServerSettings:
        return ServerSettings(served_model_name=("fake",), scheduling_policy="priority")

    async def test_a_priority_reaches_the_engine_where_the_policy_heeds_it(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await complete(client, prompt="a", max_tokens=1, priority=-5)
        assert engine.placed == [(-5, None)]

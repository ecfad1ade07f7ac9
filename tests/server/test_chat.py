"""POST /v1/chat/completions over the fake engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from mlxcel_ext.server.settings import ServerSettings

from .fake_engine import FakeEngine, FakeModel, FakeTokenizer
from .test_completions import events

USER = [{"role": "user", "content": "hello"}]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "time"}},
]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'


async def chat(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json={"messages": USER, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post("/v1/chat/completions", json={"messages": USER, "stream": True, **body})
    assert response.status_code == 200, response.text
    return events(response.text)


def prompt_of(engine: FakeEngine) -> str:
    return FakeTokenizer().decode(engine.seen[-1][0], skip_special_tokens=False)


async def test_an_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.replies["hello"] = "Grüße!"
    body = await chat(client)
    assert (body["object"], body["model"]) == ("chat.completion", "fake")
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Grüße!", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len("Grüße!".encode()) + 1
    assert engine.seen[0][1].max_tokens is None
    assert prompt_of(engine) == "<user>hello<assistant>"


async def test_a_stream_has_role_content_end_and_usage(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.replies["hello"] = "Grüße!"
    chunks = await stream(client, n=2, stream_options={"include_usage": True})
    assert chunks.pop()["usage"]["total_tokens"] == 7 + 2 * 9
    for index in range(2):
        deltas = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(d["delta"].get("content", "") for d in deltas) == "Grüße!"
        assert (deltas[-1]["delta"], deltas[-1]["finish_reason"]) == ({}, "stop")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_max_completion_tokens_wins_over_max_tokens(client: httpx.AsyncClient) -> None:
    body = await chat(client, max_tokens=9, max_completion_tokens=2)
    assert body["choices"][0]["message"]["content"] == "he"
    assert body["choices"][0]["finish_reason"] == "length"


async def test_logprobs_whole_and_streamed(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.replies["hello"] = "né"
    body = await chat(client, logprobs=True, top_logprobs=1)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["n", "bytes:\\xc3", "bytes:\\xa9", "<eos>"]
    assert bytes(byte for entry in content[:3] for byte in entry["bytes"]).decode() == "né"
    assert content[0]["top_logprobs"] == [{"token": "n", "logprob": -0.5, "bytes": [110]}]
    chunks = await stream(client, logprobs=True, top_logprobs=1)
    parts = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [entry for part in parts for entry in part] == content


async def test_a_stream_says_of_the_prompt_what_the_whole_answer_says(client: httpx.AsyncClient) -> None:
    wanted = {"prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 2, "n": 2}
    body = await chat(client, **wanted)
    chunks = await stream(client, **wanted)
    for name in ("prompt_logprobs", "prompt_token_ids"):
        assert [chunk[name] for chunk in chunks if name in chunk] == [body[name]]


async def test_messages_reach_the_template(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    await chat(client, messages=messages, max_tokens=1, chat_template_kwargs={"suffix": "!", "self": 1})
    assert prompt_of(engine) == "<user>a\nb<assistant><user>42<assistant>!"


@pytest.mark.parametrize("text", ["Well, ", "s", "assistant", " "])
async def test_the_last_message_can_be_continued(
    client: httpx.AsyncClient, engine: FakeEngine, text: str
) -> None:
    messages = [*USER, {"role": "assistant", "content": text}]
    await chat(
        client,
        messages=messages,
        continue_final_message=True,
        chat_template_kwargs={"suffix": "<assistant>s"},
        max_tokens=1,
    )
    assert prompt_of(engine) == f"<user>hello<assistant>{text}"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": USER},
        {"messages": [*USER, {"role": "tool", "content": "4"}]},
        {"messages": [*USER, {"role": "assistant", "content": ""}]},
        {"messages": [*USER, {"role": "assistant", "content": "Well"}], "add_generation_prompt": True},
    ],
)
async def test_what_cannot_be_continued_is_refused(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    response = await client.post("/v1/chat/completions", json={"continue_final_message": True, **body})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize("choice", [None, "auto"])
async def test_a_chosen_call(client: httpx.AsyncClient, engine: FakeEngine, choice: str | None) -> None:
    engine.replies["hello"] = f"Sure. {CALL}\n{CALL}"
    body = await chat(client, tools=TOOLS, tool_choice=choice)
    [answer] = body["choices"]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] == "Sure. "
    functions = [call["function"] for call in answer["message"]["tool_calls"]]
    assert functions == [{"name": "weather", "arguments": '{"city": "Ulm"}'}] * 2
    assert len({call["id"] for call in answer["message"]["tool_calls"]}) == 2
    assert prompt_of(engine).startswith("(weather)(time)<user>")


async def test_a_call_streams(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.replies["hello"] = CALL
    chunks = await stream(client, tools=TOOLS)
    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert (calls[0]["function"]["name"], calls[0]["type"], calls[0]["index"]) == ("weather", "function", 0)
    assert all("id" not in call for call in calls[1:])
    assert len(calls) > 5, "arguments must stream, not come at once"
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Ulm"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_one_call_alone_where_parallel_calls_are_off(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.replies["hello"] = CALL + CALL
    body = await chat(client, tools=TOOLS, parallel_tool_calls=False)
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1


async def test_tools_are_not_offered_with_choice_none(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.replies["hello"] = CALL
    body = await chat(client, tools=TOOLS, tool_choice="none")
    assert body["choices"][0]["message"]["content"] == CALL
    assert prompt_of(engine) == "<user>hello<assistant>"


async def test_a_named_call_is_constrained(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.replies["hello"] = '{"city": "Ulm"}'
    choice = {"type": "function", "function": {"name": "weather"}}
    body = await chat(client, tools=TOOLS, tool_choice=choice)
    [call] = body["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert json.loads(engine.seen[0][1].grammar.value) == {"type": "object"}


async def test_a_required_call_is_constrained(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.replies["hello"] = '[{"name": "time", "parameters": {}}]'
    body = await chat(client, tools=TOOLS, tool_choice="required")
    [call] = body["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "time", "arguments": "{}"}
    assert json.loads(engine.seen[0][1].grammar.value)["type"] == "array"


async def test_a_template_without_tools_gets_instructions(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeModel.chat_template, "source", "{{ messages }}", raising=False)
    await chat(client, tools=TOOLS, max_tokens=1)
    assert "<tools>" in prompt_of(engine)
    assert '"name": "weather"' in prompt_of(engine)


class TestMistral:
    @pytest.fixture
    def settings(self) -> ServerSettings:
        return ServerSettings(served_model_name=("fake",), tool_call_parser="mistral")

    async def test_special_tokens_are_kept_for_parsers_that_read_them(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.replies["hello"] = '[TOOL_CALLS][{"name": "time", "arguments": {}}]'
        body = await chat(client, tools=TOOLS)
        assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "time"
        assert len(body["choices"][0]["message"]["tool_calls"][0]["id"]) == 9
        assert engine.seen[0][1].skip_special_tokens is False

"""The vendor's own client, synchronous and asynchronous, against a server on a real port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import openai
import pydantic
import pytest

from .conftest import RunningServer
from .fake_engine import FakeEngine

USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'


class City(pydantic.BaseModel):
    name: str
    people: int


@pytest.fixture
def server(serve: Callable[..., RunningServer]) -> RunningServer:
    return serve(api_key=("key",))


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0) as client:
        yield client


def test_models_and_completions(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    answer = client.completions.create(model="fake", prompt=["ab", "cd"], max_tokens=4, logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["ababab", "cdcdcd"]
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    assert answer.usage.total_tokens == 12


def test_chat_and_raw_response(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.replies["hello"] = "Grüße!"
    raw = client.chat.completions.with_raw_response.create(
        model="fake", messages=USER, logprobs=True, extra_headers={"x-request-id": "r-1"}
    )
    assert raw.headers["x-request-id"] == "r-1"
    answer = raw.parse()
    assert answer.choices[0].message.content == "Grüße!"
    assert answer.choices[0].logprobs.content[0].token == "G"
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_streams(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.replies["hello"] = "日本語, né?"
    with client.chat.completions.create(
        model="fake", messages=USER, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "日本語, né?"
    assert chunks[-1].usage.completion_tokens == 16
    text = "".join(
        c.choices[0].text for c in client.completions.create(model="fake", prompt="hello", stream=True)
    )
    assert text == "日本語, né?"


def test_parse_with_a_schema(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.replies["hello"] = '{"name": "Ulm", "people": 126000}'
    answer = client.chat.completions.parse(model="fake", messages=USER, response_format=City)
    assert answer.choices[0].message.parsed == City(name="Ulm", people=126000)
    assert engine.seen[0][1].grammar.kind == "json_schema"
    with client.chat.completions.stream(
        model="fake", messages=USER, response_format=City, logprobs=True, top_logprobs=1
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == City(name="Ulm", people=126000)
    assert {"content.delta", "content.done", "logprobs.content.done"} <= kinds
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="fake", messages=USER, response_format=City, max_tokens=3)


def test_tools_whole_and_streamed(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.replies["hello"] = CALL
    answer = client.chat.completions.create(model="fake", messages=USER, tools=[TOOL])
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"city": "Ulm"}'
    with client.chat.completions.stream(model="fake", messages=USER, tools=[TOOL]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.name == "weather"
    assert final.choices[0].finish_reason == "tool_calls"


def test_errors_have_the_clients_classes(
    server: RunningServer, client: openai.OpenAI, engine: FakeEngine
) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError) as info:
        client.completions.create(model="fake", prompt="a", extra_body={"top_p": 7})
    assert info.value.param == "top_p"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="no", max_retries=0).models.list()
    with pytest.raises(openai.APIError, match="injected fault"):
        list(client.completions.create(model="fake", prompt="ROWFAULT", stream=True))


async def test_many_at_once_and_one_that_stops_reading(server: RunningServer, engine: FakeEngine) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0) as client:

        async def one(index: int) -> str:
            stream = await client.completions.create(
                model="fake", prompt=f"{index:03}", max_tokens=30, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        stalled = await client.completions.create(model="fake", prompt="STALL", stream=True)
        texts = await asyncio.gather(*map(one, range(24)))
        assert texts == [f"{index:03}" * 10 for index in range(24)]
        await stalled.close()
    for _ in range(200):
        if not engine.stats().running:
            break
        await asyncio.sleep(0.01)
    assert engine.stats().running == 0

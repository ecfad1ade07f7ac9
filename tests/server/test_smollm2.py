"""The whole server, on the real SmolLM2: its own process, real sockets, the vendor's client."""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import openai
import pydantic
import pytest

ROOT = pathlib.Path(__file__).parents[2]
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
PARIS = "The capital of France is Paris."


class Server:
    """`mlxcel-ext serve --model smollm2` on a free port."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        arguments = [
            "--port",
            str(port),
            "--max-model-len",
            "1024",
            "--max-num-seqs",
            "8",
            "--log-level",
            "warning",
        ]
        command = [sys.executable, "-m", "mlxcel_ext", "serve", "--model", "smollm2", *arguments]
        self.process = subprocess.Popen(command)
        self.url = f"http://127.0.0.1:{port}"
        states = set()
        while True:
            assert self.process.poll() is None, "the server ended"
            try:
                health = httpx.get(self.url + "/health")
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            states.add(health.json()["status"])
            if health.status_code == 200:
                break
            time.sleep(0.05)
        assert states <= {"loading", "ok"}

    def pages(self) -> dict[str, float]:
        text = httpx.get(self.url + "/metrics").text
        return {
            name: float(value)
            for name, value in re.findall(r"^mlxcel_kv_pages_(\w+)\{.*\} (\S+)$", text, re.M)
        }


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == PARIS
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smollm2",
        messages=FRANCE,
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == PARIS
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 16


def test_echo_scores_what_generation_scored(client: openai.OpenAI) -> None:
    """The logprobs of a generated text equal those of the same text as a prompt."""
    first = client.completions.create(
        model="smollm2", prompt="The capital of France is", temperature=0, max_tokens=6, logprobs=2
    )
    generated = first.choices[0].logprobs
    text = "The capital of France is" + first.choices[0].text
    second = client.completions.create(
        model="smollm2", prompt=text, temperature=0, max_tokens=1, logprobs=2, echo=True
    )
    echoed = second.choices[0].logprobs
    assert second.choices[0].text.startswith(text)
    assert echoed.token_logprobs[0] is None
    assert echoed.tokens[-7:-1] == generated.tokens
    assert echoed.token_logprobs[-7:-1] == pytest.approx(generated.token_logprobs, abs=2e-3)
    # Greedy: each token was the likeliest.
    assert all(
        value == max(top.values())
        for value, top in zip(generated.token_logprobs, generated.top_logprobs, strict=True)
    )


def test_tokens_there_and_back(server: Server) -> None:
    tokens = httpx.post(server.url + "/tokenize", json={"prompt": "日本語 né"}).json()["tokens"]
    assert httpx.post(server.url + "/detokenize", json={"tokens": tokens}).json()["prompt"] == "日本語 né"


class City(pydantic.BaseModel):
    name: str
    country: str


def test_a_schema_holds(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "Paris: give its name and country as JSON."}]
    answer = client.chat.completions.parse(
        model="smollm2", messages=question, response_format=City, temperature=0, max_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_a_forced_tool_call_parses(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Ulm", "Bonn"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    messages = [{"role": "user", "content": "What is the weather in Ulm?"}]
    answer = client.chat.completions.create(
        model="smollm2",
        messages=messages,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=60,
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Ulm", "Bonn")


def test_a_choice_is_one_of_them(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2",
        prompt="Grass is",
        max_tokens=8,
        extra_body={"structured_outputs": {"choice": [" green", " purple"]}},
    )
    assert answer.choices[0].text in (" green", " purple")


async def test_many_at_once_say_what_each_says_alone(server: Server) -> None:
    """Greedy and seeded texts do not depend on the batch; clients that leave free their pages."""
    prompts = [f"Question {index}: what comes after {index}?" for index in range(6)]
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

        async def one(index: int) -> str:
            sampling = {"temperature": 0} if index % 2 else {"seed": index, "temperature": 0.8}
            answer = await client.completions.create(
                model="smollm2", prompt=prompts[index], max_tokens=12, **sampling
            )
            return answer.choices[0].text

        alone = [await one(index) for index in range(6)]
        leaver = await client.completions.create(model="smollm2", prompt="Once", max_tokens=500, stream=True)
        together = await asyncio.gather(*(one(index) for index in range(6)))
        await leaver.close()
    assert together == alone
    for _ in range(100):
        pages = server.pages()
        if not pages["in_use"]:
            break
        await asyncio.sleep(0.05)
    assert pages["in_use"] == 0
    assert pages["free"] + pages["cached"] == pages["total"]


def test_bad_input_is_a_4xx(server: Server) -> None:
    for body in (
        {"prompt": "word " * 3000},
        {"prompt": [10**6]},
        {"prompt": "a", "logit_bias": {"999999": 1}},
        {"prompt": "a", "structured_outputs": {"regex": "("}},
        {"prompt": "a", "structured_outputs": {"json": {"type": "nonsense"}}},
    ):
        response = httpx.post(server.url + "/v1/completions", json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"]

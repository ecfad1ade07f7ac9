"""Soak: random mixed load on a server, and proof that it leaks nothing and forgets nobody.

    python benchmarks/soak.py --minutes 30 --out soak.json -- --model smollm2 --max-queue-depth 16

Starts `mlxcel-ext serve` with what follows `--`, on a free port, under memory_probe.py. The load mixes chats and completions,
streams and not, clients that leave early, bad bodies, long prompts and bursts past the queue limit. Every
answer must be one that its request allows. At the end, with nobody connected, no request may be left, no
page may be in use, and free plus cached pages must be all pages; the resident memory of the second half
must not grow by more than --max-growth-mib. Exits with 1 where one of these fails. The result says what
memory was held by malloc, MLX and Python over time, and which Python lines and types grew.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import pathlib
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from servers import Server, running

TEXT = "a river of long words runs through the small town and every stone in it has seen the sea once"
WORDS = TEXT.split()
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BAD_BODIES: list[tuple[str, Any]] = [
    (COMPLETIONS, b"{"),
    (COMPLETIONS, b'{"prompt":' + b"[" * 2000),
    (COMPLETIONS, {"prompt": ["a", 1]}),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}),
    (COMPLETIONS, {"prompt": "word " * 20000}),
    (COMPLETIONS, {"prompt": [10**9]}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": {"a": 1}}]}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema"}}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "structured_outputs": {"regex": "("}}),
]


class Soak:
    """Counts what happened and what went wrong."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.url = url
        self.options = options
        self.rng = random.Random(options.seed)
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []
        self.latencies: list[float] = []
        self.tokens = 0
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.AsyncClient(base_url=url, timeout=options.request_limit, limits=limits)
        #: Conversations share these beginnings, so that the prefix cache has work.
        self.prefixes = [self.text(60) for _ in range(4)]

    def text(self, words: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=words))

    def body(self) -> tuple[str, dict[str, Any]]:
        """A good request: short or long, greedy or sampled, plain or constrained."""
        rng = self.rng
        words = rng.choice([3, 10, 30, 100]) if rng.random() < 0.9 else rng.randint(300, 900)
        prompt = (rng.choice(self.prefixes) + " " if rng.random() < 0.5 else "") + self.text(words)
        body: dict[str, Any] = {"max_tokens": rng.choice([1, 4, 16, 48]), "stream": rng.random() < 0.6}
        if rng.random() < 0.5:
            body |= {"temperature": 0}
        else:
            body |= {"seed": rng.randint(-5, 2**40), "top_p": 0.9, "top_k": 40, "presence_penalty": 0.5}
        if rng.random() < 0.1:
            body["n"] = 3
        if rng.random() < 0.2:
            body["stop"] = ["sea", " the "]
        if rng.random() < 0.1:
            body["structured_outputs"] = {"regex": "[a-c]{1,8}"}
        if rng.random() < 0.2:
            body["logprobs"] = 2
        if rng.random() < 0.5:
            return COMPLETIONS, {**body, "prompt": [prompt, self.text(5)] if rng.random() < 0.1 else prompt}
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": 2}
        return CHAT, {**body, "messages": [{"role": "user", "content": prompt}]}

    def expect(self, kind: str, condition: bool, text: str) -> None:
        self.outcomes[kind] += 1
        if not condition:
            self.failures.append(f"{kind}: {text[:300]}")

    async def good(self) -> None:
        path, body = self.body()
        started = time.monotonic()
        response = await self.client.post(path, json=body)
        if response.status_code in (429, 503):
            self.expect("refused", "retry-after" in response.headers, response.text)
            return
        kind = "stream" if body["stream"] else "whole"
        self.expect(kind, response.status_code == 200, response.text)
        if response.status_code != 200:
            return
        self.latencies.append(time.monotonic() - started)
        if body["stream"]:
            self.expect(kind, response.text.endswith("data: [DONE]\n\n"), response.text[-200:])
            self.expect(kind, '"error"' not in response.text, response.text[-300:])
        else:
            self.tokens += response.json()["usage"]["completion_tokens"]

    async def leaver(self) -> None:
        """A client that goes away, before or amid the answer."""
        path, body = self.body()
        body |= {"max_tokens": 200}
        try:
            async with asyncio.timeout(self.rng.uniform(0.0, 1.5)):
                async with self.client.stream("POST", path, json=body) as response:
                    async for _ in response.aiter_raw():
                        pass
        except TimeoutError:
            pass
        self.outcomes["left"] += 1

    async def bad(self) -> None:
        path, body = self.rng.choice(BAD_BODIES)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self.client.post(path, content=raw, headers={"content-type": "application/json"})
        self.expect("bad body", 400 <= response.status_code < 500, f"{response.status_code} {response.text}")

    async def burst(self) -> None:
        """More requests at once than the queue takes: some must be refused, and none may hang."""

        async def one() -> int:
            body = {"prompt": self.text(10), "max_tokens": 4}
            return (await self.client.post(COMPLETIONS, json=body)).status_code

        statuses = await asyncio.gather(*(one() for _ in range(self.options.burst)))
        self.expect("burst", set(statuses) <= {200, 429}, str(collections.Counter(statuses)))
        self.outcomes["burst refused"] += statuses.count(429)

    async def probe(self) -> None:
        for path in ("/health", "/metrics", "/v1/models", "/dashboard/data"):
            response = await self.client.get(path)
            self.expect(
                "probe", response.status_code == 200, f"{path} {response.status_code} {response.text}"
            )

    async def worker(self, until: float) -> None:
        kinds: list[tuple[Callable[[], Awaitable[None]], float]] = [
            (self.good, 0.6),
            (self.leaver, 0.2),
            (self.bad, 0.12),
            (self.probe, 0.07),
            (self.burst, 0.01),
        ]
        while time.monotonic() < until:
            [kind] = self.rng.choices([k for k, _ in kinds], [weight for _, weight in kinds])
            try:
                await kind()
            except httpx.HTTPError as error:
                self.failures.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    async def settled(self) -> dict[str, float]:
        """The engine's numbers once nothing runs; what still runs after the limit is stuck."""
        limit = time.monotonic() + 30
        while True:
            text = (await self.client.get("/metrics")).text
            found = re.findall(r"^(mlxcel_\w+)\{model_name=\"[^\"]*\"\} (\S+)$", text, re.MULTILINE)
            values = {name: float(value) for name, value in found}
            if values["mlxcel_num_requests_running"] + values["mlxcel_num_requests_waiting"] == 0:
                return values
            if time.monotonic() > limit:
                self.failures.append(f"requests are stuck: {values}")
                return values
            await asyncio.sleep(0.2)


def read_probe(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def final_probe(server: Server, path: pathlib.Path) -> list[dict[str, Any]]:
    """Everything that the probe wrote, its comparison at the end included."""
    server.process.send_signal(signal.SIGUSR1)
    for _ in range(300):
        await asyncio.sleep(0.2)
        if '"trimmed"' in path.read_text():
            break
    return read_probe(path)


def halves(samples: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Median of every quantity in the first and in the second half, after the quarter that fills caches."""
    steady = [sample for sample in samples if "event" not in sample][len(samples) // 4 :]
    middle = len(steady) // 2
    if not middle:
        return {}
    names = [name for name in steady[0] if name != "seconds"]
    parts = steady[:middle], steady[middle:]
    return {name: [round(statistics.median(s[name] for s in part), 2) for part in parts] for name in names}


async def use_every_page(client: httpx.AsyncClient) -> None:
    """The pool takes memory as its pages are first used: let that be over before memory is compared."""
    stats = (await client.get("/v1/cache/stats")).json()
    most = (await client.get("/v1/models")).json()["data"][0]["max_model_len"] - 1
    for n in range(stats["pages_total"] * stats["page_size"] // most + 1):
        prompt = [(7 * n + i) % 1000 + 100 for i in range(most)]
        (await client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})).raise_for_status()


async def soak(server: Server, probe: pathlib.Path, options: argparse.Namespace) -> dict[str, Any]:
    run = Soak(server.url, options)
    await use_every_page(run.client)
    until = time.monotonic() + options.minutes * 60
    await asyncio.gather(*(run.worker(until) for _ in range(options.workers)))
    values = await run.settled()
    pages = {name: values[f"mlxcel_kv_pages_{name}"] for name in ("total", "free", "cached", "in_use")}
    if pages["in_use"] or pages["free"] + pages["cached"] != pages["total"]:
        run.failures.append(f"pages leaked: {pages}")
    samples = await final_probe(server, probe)
    memory = halves(samples)
    growth = memory["rss"][1] - memory["rss"][0] if memory else 0.0
    if growth > options.max_growth_mib:
        run.failures.append(f"memory grew by {growth:.1f} MiB between the halves")
    await run.client.aclose()
    return {
        "minutes": options.minutes,
        "workers": options.workers,
        "outcomes": dict(run.outcomes),
        "failures": run.failures[:50],
        "failure_count": len(run.failures),
        "latency_p50_s": statistics.median(run.latencies) if run.latencies else None,
        "latency_max_s": max(run.latencies, default=None),
        "pages": pages,
        "memory_halves_mib": memory,
        "memory_growth_mib": growth,
        "memory": samples,
        "engine": {name: value for name, value in values.items() if name.endswith("_total")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--workers", type=int, default=12, help="Clients at once")
    parser.add_argument(
        "--burst", type=int, default=60, help="Requests of a burst; more than rows plus queue"
    )
    parser.add_argument(
        "--request-limit", type=float, default=120, help="Seconds after which a request is stuck"
    )
    parser.add_argument("--max-growth-mib", type=float, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("serve", nargs="*", help="Arguments of mlxcel-ext serve, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        probe = pathlib.Path(folder, "memory.jsonl")
        command = str(pathlib.Path(__file__).with_name("memory_probe.py"))
        third = str(options.minutes * 20)
        with running(command, str(probe), third, "serve", "--log-level", "warning", *options.serve) as server:
            result = asyncio.run(soak(server, probe, options))
    result["exit_status_after_sigterm"] = server.process.returncode
    if server.process.returncode:
        result["failure_count"] += 1
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({**result, "memory": [s for s in result["memory"] if "event" in s]}, indent=1))
    return 1 if result["failure_count"] else 0


if __name__ == "__main__":
    sys.exit(main())

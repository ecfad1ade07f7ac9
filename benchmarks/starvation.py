"""A long prompt admitted while streams run: its time to first token, and what the streams feel, by grant interval.

    python benchmarks/starvation.py --prompt-tokens 8000 --grants 0,4,16,32 --out starvation.jsonl

For each --prefill-grant-interval a server of its own: the streams run, the prompt comes, and the gaps between the
streams' tokens before the prompt, during its prefill and after it are reported. --parked takes mixed steps away,
so that prefill chunks and decode steps alternate and the interval decides alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import random
import statistics
import sys
import time
from typing import Any

from mlxcel_ext.bench.client import Sample, Target
from mlxcel_ext.bench.datasets import WORDS
from servers import ours


def ids(rng: random.Random, count: int, known: list[int]) -> list[int]:
    return rng.choices(known, k=count)


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    target = Target(url)
    rng = random.Random(0)
    _, body = await target.fetch(
        "POST", "/tokenize", {"prompt": " ".join(WORDS), "add_special_tokens": False}
    )
    known = json.loads(body)["tokens"]

    def request(prompt: list[int], tokens: int) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}

    async def stream(tokens: int) -> Sample:
        return await target.stream("/v1/completions", request(ids(rng, 16, known), tokens), options.limit)

    running = [asyncio.create_task(stream(options.stream_tokens)) for _ in range(options.streams)]
    await asyncio.sleep(options.before)
    admitted = time.perf_counter()
    prompt = await target.stream(
        "/v1/completions", request(ids(rng, options.prompt_tokens, known), 2), options.limit
    )
    first = admitted + prompt.ttft
    samples = await asyncio.gather(*running)
    gaps: dict[str, list[float]] = {"before": [], "during": [], "after": []}
    for sample in samples:
        at = sample.start + sample.ttft
        for gap in sample.itl:
            at += gap
            gaps["before" if at < admitted else "during" if at - gap < first else "after"].append(gap)
    errors = [sample.error for sample in [prompt, *samples] if sample.error]
    means = {
        f"itl_{name}": {"mean_ms": statistics.fmean(v) * 1e3, "max_ms": max(v) * 1e3, "count": len(v)}
        if v
        else None
        for name, v in gaps.items()
    }
    return {"ttft_s": prompt.ttft, **means, "errors": errors}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--grants", default="0,4,16,32")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--stream-tokens", type=int, default=400)
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--before", type=float, default=5, help="Seconds that the streams run alone")
    parser.add_argument("--parked", action="store_true", help="Without mixed steps")
    parser.add_argument("--limit", type=float, default=1800)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    if options.out:
        options.out.write_text("")
    for grant in options.grants.split(","):
        arguments = [
            "--model",
            options.model,
            "--prefill-grant-interval",
            grant,
            "--prefill-chunk-size",
            str(options.chunk),
        ]
        if options.parked:
            arguments.append("--no-mixed-steps")
        with ours(*arguments) as server:
            result = asyncio.run(measure(server.url, options))
        load = os.getloadavg()[0]
        record = json.dumps({"grant": int(grant), "mixed_steps": not options.parked, "load": load, **result})
        print(record, flush=True)
        if options.out:
            with options.out.open("a") as out:
                out.write(record + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

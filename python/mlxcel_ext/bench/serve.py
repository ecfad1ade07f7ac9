"""`bench serve`: levels of load against a running server."""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import random
import sys
import time
from typing import Any

from .client import Sample, Target
from .counters import Expected, moved, named, notes, of_path, scrape
from .datasets import Prompt, Source, prompts
from .report import document, render, summarize


def run(options: argparse.Namespace) -> int:
    """Measure every level and print it; 1 where a request failed."""
    target = Target(
        (options.base_url or f"http://{options.host}:{options.port}").rstrip("/"), options.api_key
    )
    levels: list[int | None] = [_level(text) for text in options.max_concurrency]
    percentiles = [float(p) for p in options.metric_percentiles]
    unknown = set(options.percentile_metrics) - {"ttft", "tpot", "itl", "e2el"}
    if unknown:
        raise ValueError(
            f"--percentile-metrics knows ttft, tpot, itl, e2el, not {', '.join(sorted(unknown))}"
        )
    if options.request_rate <= 0 or options.burstiness <= 0:
        raise ValueError("--request-rate and --burstiness must be above 0")
    if any("=" not in pair for pair in options.metadata):
        raise ValueError("--metadata wants KEY=VALUE pairs")
    return asyncio.run(_Bench(target, options, percentiles).run(levels or [None]))


def _level(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"--max-concurrency wants integers from 1 on, got {text!r}")
    return int(text)


class _Bench:
    def __init__(self, target: Target, options: argparse.Namespace, percentiles: list[float]) -> None:
        self._target = target
        self._options = options
        self._percentiles = percentiles
        self._chat = options.endpoint.endswith("chat/completions")
        self._expected = [Expected.parse(text) for text in options.metrics if text != "all"]
        self._model = options.model or ""

    async def run(self, levels: list[int | None]) -> int:
        self._model = self._options.model or await self._served_model()
        source = await Source.detect(self._target, self._model, self._options.prompt_form, self._chat)
        failed = 0
        for index, level in enumerate(levels):
            # Warm-ups and levels have seeds of their own: none may find another's prompts in the cache.
            warm = prompts(self._options, source, self._options.seed + 1000 * index + 999)
            for prompt in warm[: self._options.num_warmups]:
                await self._send(prompt)
            work = prompts(self._options, source, self._options.seed + 1000 * index)
            before = await scrape(self._target) if self._options.metrics else {}
            samples, duration = await self._measure(work, level)
            deltas = moved(before, await scrape(self._target)) if self._options.metrics else {}
            failed += self._report(level, samples, duration, deltas)
        return 1 if failed else 0

    async def _served_model(self) -> str:
        try:
            status, body = await self._target.fetch("GET", "/v1/models")
        except OSError as error:
            raise ConnectionError(f"no server at {self._target.url}: {error}") from None
        cards = json.loads(body).get("data") if status == 200 else None
        if not cards:
            raise ValueError(f"{self._target.url}/v1/models names no model ({status}); give --model")
        return str(cards[0]["id"])

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": prompt.output_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        if self._chat:
            return {**body, "messages": [{"role": "user", "content": prompt.content}]}
        return {**body, "prompt": prompt.content}

    async def _send(self, prompt: Prompt) -> Sample:
        return await self._target.stream(self._options.endpoint, self._body(prompt), self._options.timeout)

    async def _measure(self, work: list[Prompt], level: int | None) -> tuple[list[Sample], float]:
        """All requests of a level: they start at the arrival times, and no more than level run at once."""
        rng = random.Random(self._options.seed)
        gate = asyncio.Semaphore(level or len(work))

        async def one(prompt: Prompt, at: float) -> Sample:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            async with gate:
                return await self._send(prompt)

        started = time.perf_counter()
        at = started
        tasks = []
        for prompt in work:
            tasks.append(asyncio.create_task(one(prompt, at)))
            if self._options.request_rate != float("inf"):
                shape = self._options.burstiness
                at += rng.gammavariate(shape, 1 / (self._options.request_rate * shape))
        samples = await asyncio.gather(*tasks)
        return samples, time.perf_counter() - started

    def _report(
        self, level: int | None, samples: list[Sample], duration: float, deltas: dict[Any, float]
    ) -> int:
        options = self._options
        result = summarize(samples, duration, self._percentiles) | {"max_concurrency": level}
        print(render(result, options.percentile_metrics, self._percentiles))
        if "all" in options.metrics:
            print(
                "\n".join(
                    f"{named(key)}: +{delta:g}"
                    for key, delta in sorted(deltas.items(), key=lambda kv: named(kv[0]))
                )
            )
        else:
            print("".join(line + "\n" for line in of_path(deltas, "cascade")), end="")
        for line in notes(self._expected, deltas):
            print(line)
        errors = [sample.error for sample in samples if sample.error]
        for error in sorted(set(errors))[:5]:
            print(f"error ({errors.count(error)} requests): {error}", file=sys.stderr)
        if options.save_result or options.save_detailed:
            if options.metrics:
                result["metrics"] = {named(key): delta for key, delta in deltas.items()}
            out = document(options, result, samples, self._model, options.save_detailed)
            name = options.result_filename or f"bench-{self._model.replace('/', '_')}-{out['date']}.json"
            path = pathlib.Path(options.result_dir, name)
            if level is not None and len(options.max_concurrency) > 1:
                path = path.with_stem(f"{path.stem}-c{level}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(out, indent=1) + "\n")
        return len(errors)

"""A long prompt joins running streams: its time to first token, and what the streams feel, per grant interval.

    PYTHONPATH=python python benchmarks/bench_starvation.py --model smollm2 --prompt-tokens 2048 --grants 0,4,16,32

For each interval a fresh engine decodes --streams streams, then admits a prompt that no cache knows. Prints the
prompt's TTFT, the streams' mean and 95th percentile inter-token latency while it waits, and both relative to the
streams' latency before. An interval's figures count only where the engine's own counters show that the prompt was
prefilled beside decoding rows as the interval says: otherwise the line ends with NOT COMPARABLE and the exit status is 2.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time

from mlxcel_ext.engine import Engine, EngineConfig
from mlxcel_ext.models import LoadedModel, load
from mlxcel_ext.outputs import RequestOutput
from mlxcel_ext.sampling_params import SamplingParams


class Stream:
    """Times of a request's tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.finished = threading.Event()
        self.first = threading.Event()

    def __call__(self, output: RequestOutput) -> None:
        if output.token_ids:
            self.times.append(time.monotonic())
            self.first.set()
        if output.finished:
            self.finished.set()

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens whose later one came in the span."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False) if begin <= b <= end]


def run(loaded: LoadedModel, grant: int, options: argparse.Namespace) -> tuple[dict[str, float], bool]:
    rng = random.Random(grant)
    config = EngineConfig(
        prefill_grant_interval=grant,
        prefill_chunk_size=options.chunk,
        max_num_seqs=options.streams + 1,
        num_pages=(options.streams * (options.stream_tokens + 64) + options.prompt_tokens + 64) // 16 + 16,
        prefill_progress=False,
    )
    engine = Engine(loaded, config)
    engine.start()
    vocabulary = loaded.config.vocab_size
    streams = [Stream() for _ in range(options.streams)]
    endless = SamplingParams(temperature=0.0, max_tokens=options.stream_tokens, ignore_eos=True)
    for i, stream in enumerate(streams):
        engine.submit(f"stream-{i}", [rng.randrange(100, vocabulary) for _ in range(16)], endless, stream)
    for stream in streams:
        stream.first.wait()
    settled = time.monotonic()
    while min(len(s.times) for s in streams) < options.settle_tokens:
        time.sleep(0.005)
    long = Stream()
    prompt = [rng.randrange(100, vocabulary) for _ in range(options.prompt_tokens)]
    before = dict(engine.stats().counters["mlxcel_engine_steps_total"])
    admitted = time.monotonic()
    engine.submit("long", prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), long)
    long.finished.wait()
    straddled = grant == 0 or not any(stream.finished.is_set() for stream in streams)
    answered = long.times[0]
    steps = engine.stats().counters["mlxcel_engine_steps_total"]
    grants = steps.get("grant", 0) - before.get("grant", 0)
    engine.shutdown(drain=False)

    quiet = [gap for s in streams for gap in s.gaps(settled, admitted)]
    loud = [gap for s in streams for gap in s.gaps(admitted, answered)]
    expected = 0 if grant == 0 else -(-options.prompt_tokens // options.chunk) - 1
    figures = {
        "grant": grant,
        "ttft_s": answered - admitted,
        "itl_mean_ms": 1e3 * statistics.mean(loud),
        "itl_p95_ms": 1e3 * statistics.quantiles(loud, n=20)[-1],
        "itl_mean_before_ms": 1e3 * statistics.mean(quiet),
        "itl_inflation": statistics.mean(loud) / statistics.mean(quiet),
        "grants": grants,
    }
    return figures, grants == expected and straddled


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--stream-tokens", type=int, default=400)
    parser.add_argument("--settle-tokens", type=int, default=16)
    parser.add_argument("--grants", default="0,4,16,32")
    parser.add_argument("--out", help="append the figures to this JSONL file")
    options = parser.parse_args()
    loaded = load(options.model, progress=False)
    comparable = True
    for grant in map(int, options.grants.split(",")):
        figures, sound = run(loaded, grant, options)
        comparable &= sound
        note = "" if sound else "  NOT COMPARABLE"
        print("  ".join(f"{name} {value:.4g}" for name, value in figures.items()) + note, flush=True)
        if options.out:
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(json.dumps({**vars(options), **figures, "comparable": sound}) + "\n")
    return 0 if comparable else 2


if __name__ == "__main__":
    sys.exit(main())

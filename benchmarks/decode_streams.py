"""Decode rates of one and of four streams of SmolLM2 on CPU, by the times at which tokens come, for each dtype of KV pages.

    PYTHONPATH=python:. python benchmarks/decode_streams.py --threads 2 --rounds 4

A run's rate is streams / the median time between two tokens, once all streams have begun. Unlike cpu_generate.py, whose
arms have a process and a model each, all engines live in one process on one model; rounds take the arms in turn,
forwards and backwards. Prints medians and single runs (tokens/s).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time

import mlx.core as mx

from cpu_generate import Prompts
from mlxcel_ext.llm import LLM
from mlxcel_ext.models import hub, load
from mlxcel_ext.outputs import RequestOutput
from mlxcel_ext.sampling_params import SamplingParams

DTYPES = ("float16", "float32")


class Stream:
    """When the tokens of a request came."""

    def __init__(self, done: threading.Semaphore) -> None:
        self.times: list[float] = []
        self._done = done

    def __call__(self, output: RequestOutput) -> None:
        self.times += [time.perf_counter()] * len(output.token_ids)
        if output.finished:
            self._done.release()


def rate(llm: LLM, name: str, prompts: list[list[int]], new: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    done = threading.Semaphore(0)
    streams = [Stream(done) for _ in prompts]
    for i, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
        llm.engine.submit(f"{name}-{i}", prompt, params, stream)
    for _ in streams:
        done.acquire()
    assert all(len(stream.times) == new for stream in streams)
    begin, end = max(s.times[0] for s in streams), min(s.times[-1] for s in streams)
    steps = [b - a for a, b in itertools.pairwise(streams[0].times) if begin <= a and b <= end]
    return len(prompts) / statistics.median(steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    path = str(hub.resolve("smollm2"))
    loaded, texts = load(path, progress=False), Prompts(path)
    options = {"threads": args.threads, "enable_prefix_caching": False, "num_pages": 256}
    arms = {dtype: LLM(loaded, kv_cache_dtype=dtype, **options) for dtype in DTYPES}
    rates: dict[tuple[str, int], list[float]] = {(d, n): [] for n in (1, 4) for d in DTYPES}
    for turn in range(args.rounds):
        for dtype, streams in list(rates)[:: 1 if turn % 2 else -1]:
            prompts = [loaded.tokenizer.encode(texts(args.prompt)) for _ in range(streams)]
            found = rate(arms[dtype], f"{turn}-{streams}", prompts, args.new)
            rates[dtype, streams].append(found)
    for (dtype, streams), all_found in rates.items():
        print(
            f"{dtype} pages, {streams} streams: {statistics.median(all_found):.1f} {[round(r) for r in all_found]}"
        )
    for dtype in DTYPES:
        one, four = (statistics.median(rates[dtype, n]) for n in (1, 4))
        print(f"{dtype} pages: four over one {four / one:.2f}")
    for llm in arms.values():
        llm.close()


if __name__ == "__main__":
    main()

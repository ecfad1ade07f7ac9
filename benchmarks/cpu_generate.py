"""Whole `generate` on CPU with SmolLM2: this project, llama-cpp-python and mlx-lm, interleaved in one run.

    PYTHONPATH=python:. python benchmarks/cpu_generate.py OUT.jsonl --threads 2 --rounds 5 --llama-python VENV/bin/python

Each arm lives in a process of its own that loads its model once. A round asks every arm in turn for a prompt of 512
tokens and 129 new ones: prefill is 512 tokens over the time until the first new one (the last stream's, where there
are several), decode the tokens from then on over their time, until the first stream has all of its own. So no prefill
counts as decode. Text goes in and text comes out, greedily, ends of text ignored. llama-cpp-python may live in an
environment of its own. mlx-lm gets fewer tokens (it is some fifty times slower) and its scales as f32, its best case.
The arm mlxcel-f32kv keeps keys and values in float32, the exact setting. `--checks` adds its greedy texts against
mlx-lm's, and the peak memory of a fresh process.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

#: Prompts in, seconds (and what else the arm tells) out.
Generate = Callable[[list[str], int], dict[str, Any]]

WORDS = (
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
)
CHECKS = [
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper.",
    "List three uses of copper.",
    "def fibonacci(n):",
]


def mlxcel(path: str, threads: int, kv_cache_dtype: str = "auto") -> Generate:
    import mlx.core as mx

    from mlxcel_ext.llm import LLM
    from mlxcel_ext.sampling_params import SamplingParams

    mx.set_default_device(mx.cpu)
    llm = LLM(
        path, threads=threads, enable_prefix_caching=False, num_pages=256, kv_cache_dtype=kv_cache_dtype
    )

    submit = llm.engine.submit

    def generate(prompts: list[str], new: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        times: list[list[float]] = []

        def timed(request_id: str, ids: list[int], params: SamplingParams, on_output: Any) -> None:
            stream: list[float] = []
            times.append(stream)

            def collect(output: Any) -> None:
                stream.extend([time.perf_counter() - begin] * len(output.token_ids))
                on_output(output)

            submit(request_id, ids, params, collect)

        llm.engine.submit = timed  # type: ignore[method-assign,assignment]
        begin = time.perf_counter()
        answers = llm.generate(prompts, params)
        seconds = time.perf_counter() - begin
        assert all(len(a.token_ids) == new for a in answers)
        return {"seconds": seconds, "ids": [a.token_ids for a in answers], "times": times}

    return generate


def llama_cpp(path: str, threads: int) -> Generate:
    from llama_cpp import Llama

    model = Llama(
        path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, n_batch=512, n_ubatch=512, verbose=False
    )

    def generate(prompts: list[str], new: int) -> dict[str, Any]:
        (prompt,) = prompts
        model.reset()
        ids: list[int] = []
        times: list[float] = []
        begin = time.perf_counter()
        for token in model.generate(model.tokenize(prompt.encode(), add_bos=False), temp=0.0):
            ids.append(token)
            times.append(time.perf_counter() - begin)
            if len(ids) == new:
                break
        model.detokenize(ids)
        return {"seconds": time.perf_counter() - begin, "ids": [ids], "times": [times]}

    return generate


def mlx_lm(folder: str, threads: int) -> Generate:
    import mlx.core as mx
    import mlx_lm as peer

    mx.set_default_device(mx.cpu)
    model, tokenizer = peer.load(folder)
    tokenizer._eos_token_ids = set()

    def generate(prompts: list[str], new: int) -> dict[str, Any]:
        (prompt,) = prompts
        begin = time.perf_counter()
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        ids: list[int] = []
        times: list[float] = []
        for answer in peer.stream_generate(model, tokenizer, prompt_ids, max_tokens=new):
            ids.append(answer.token)
            times.append(time.perf_counter() - begin)
        return {"seconds": time.perf_counter() - begin, "ids": [ids[:new]], "times": [times[:new]]}

    return generate


def mlxcel_exact(path: str, threads: int) -> Generate:
    """With keys and values in float32, as mlx-lm keeps them here."""
    return mlxcel(path, threads, "float32")


ARMS = {"mlxcel": mlxcel, "mlxcel-f32kv": mlxcel_exact, "llama.cpp": llama_cpp, "mlx-lm": mlx_lm}


def work(arm: str, path: str, threads: int) -> None:
    """A worker: requests as JSON lines on stdin, answers on stdout."""
    generate = ARMS[arm](path, threads)
    generate(["Hello"], 2)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(generate(request["prompts"], request["new"]) | {"peak": peak_rss()}), flush=True)


def peak_rss() -> int:
    """Bytes that this process has had resident at most."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


class Worker:
    def __init__(self, python: str, arm: str, path: str, threads: int) -> None:
        command = [python, __file__, "--worker", arm, "--model", path, "--threads", str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert json.loads(self._line()) == {"ready": True}

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "a worker has died"
        return line

    def __call__(self, prompts: list[str], new: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Prompts:
    """Texts of a given number of tokens, each a new one."""

    def __init__(self, path: str) -> None:
        from mlxcel_ext.models import Tokenizer
        from mlxcel_ext.models.gguf import GGUFFile

        self._tokenizer = Tokenizer.from_gguf(GGUFFile(pathlib.Path(path)).metadata, path)
        self._rng = random.Random(0)

    def __call__(self, tokens: int) -> str:
        words: list[str] = []
        while True:
            words += self._rng.choices(WORDS, k=tokens)
            ids = self._tokenizer.encode(" ".join(words))[:tokens]
            text = self._tokenizer.decode(ids)
            if len(self._tokenizer.encode(text)) == tokens:
                return text


def measure(worker: Worker, prompts: Prompts, streams: int, prompt: int, new: int) -> dict[str, float]:
    answer = worker([prompts(prompt) for _ in range(streams)], 1 + new)
    times: list[list[float]] = answer["times"]
    begin = max(stream[0] for stream in times)
    end = min(stream[-1] for stream in times)
    decoded = sum(begin < time <= end for stream in times for time in stream)
    return {
        "prefill": streams * prompt / begin,
        "decode": decoded / (end - begin),
        "whole": streams * (prompt + new) / answer["seconds"],
    }


def check_texts(ours: Worker, peer: Worker, tokens: int) -> list[dict[str, Any]]:
    """How many greedy tokens agree before the first difference, for each prompt."""
    found = []
    for prompt in CHECKS:
        (a,), (b,) = ours([prompt], tokens)["ids"], peer([prompt], tokens)["ids"]
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), tokens)
        found.append({"prompt": prompt, "tokens": tokens, "equal": same})
    return found


def interleave(
    workers: dict[str, Worker], prompts: Prompts, rounds: int, prompt: int, new: int
) -> Iterator[dict[str, Any]]:
    """A record of each case in each round, then the medians. The order turns from round to round."""
    cases = [(arm, 1, *((32, 8) if arm == "mlx-lm" else (prompt, new))) for arm in workers]
    cases += [(arm, 4, prompt, new) for arm in workers if arm.startswith("mlxcel")]
    seen: dict[tuple[str, int], list[dict[str, float]]] = {}
    for turn in range(rounds):
        for arm, streams, length, more in cases[turn % len(cases) :] + cases[: turn % len(cases)]:
            rates = measure(workers[arm], prompts, streams, length, more)
            seen.setdefault((arm, streams), []).append(rates)
            yield {"round": turn, "arm": arm, "streams": streams, "prompt": length, "new": more} | rates
    for (arm, streams), found in seen.items():
        rates = {name: round(statistics.median(r[name] for r in found), 1) for name in found[0]}
        yield {"median": arm, "streams": streams} | rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=pathlib.Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--arms", nargs="+", default=["mlxcel", "mlxcel-f32kv", "llama.cpp", "mlx-lm"])
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--worker", choices=ARMS)
    args = parser.parse_args()
    if args.worker is None:
        compare(args)
    else:
        work(args.worker, args.model, args.threads)


def compare(args: argparse.Namespace) -> None:
    import mlx_lm_folder
    from mlxcel_ext.models import hub

    path = args.model or str(hub.resolve("smollm2"))
    prompts = Prompts(path)
    records: list[dict[str, Any]] = []

    def add(record: dict[str, Any]) -> None:
        records.append(record)
        print(json.dumps(record), flush=True)

    add({"threads": args.threads, "load": os.getloadavg()})
    with tempfile.TemporaryDirectory() as folder:
        paths = {"mlx-lm": f"{folder}/model"}
        if "mlx-lm" in args.arms:
            mlx_lm_folder.write(pathlib.Path(paths["mlx-lm"]))
        pythons = {"llama.cpp": args.llama_python}
        workers = {
            arm: Worker(pythons.get(arm, sys.executable), arm, paths.get(arm, path), args.threads)
            for arm in args.arms
        }
        for record in interleave(workers, prompts, args.rounds, args.prompt, args.new):
            add(record)
        if args.checks:
            exact = Worker(sys.executable, "mlxcel-f32kv", path, args.threads)
            for record in check_texts(exact, workers["mlx-lm"], 64):
                add(record)
            exact.close()
            fresh = Worker(sys.executable, "mlxcel", path, args.threads)
            peak = fresh([prompts(args.prompt)], args.new)["peak"]
            add({"peak_rss": peak, "file_bytes": pathlib.Path(path).stat().st_size})
            fresh.close()
        for worker in workers.values():
            worker.close()
    if args.out is not None:
        args.out.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()

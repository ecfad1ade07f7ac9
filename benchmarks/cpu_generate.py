"""Prefill and decode rates of one GGUF file on CPU, by this project or by llama-cpp-python (in its own environment).

PYTHONPATH=python:. python benchmarks/cpu_generate.py FILE --by mlxcel --threads 2
python benchmarks/cpu_generate.py FILE --by llama.cpp --threads 2
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

Feed = Callable[[list[int]], None]


def mlxcel(path: str, threads: int) -> Feed:
    import mlx.core as mx
    from tests.support.generate import PagedRunner

    from mlxcel_ext import set_num_threads
    from mlxcel_ext.models import load

    mx.set_default_device(mx.cpu)
    set_num_threads(threads)
    model = load(path, progress=False).model
    mx.eval(PagedRunner(model).step({"": [1, 2, 3]}, rows=[2]))
    runner = PagedRunner(model, num_pages=256)
    return lambda tokens: mx.eval(mx.argmax(runner.step({"": tokens}, rows=[len(tokens) - 1])[-1]))


def llama_cpp(path: str, threads: int) -> Feed:
    from llama_cpp import Llama

    model = Llama(
        path, n_ctx=4096, n_threads=threads, n_threads_batch=threads, n_batch=512, n_ubatch=512, verbose=False
    )
    model.eval([1, 2, 3])
    model.reset()
    return model.eval


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("--by", choices=["mlxcel", "llama.cpp"], default="mlxcel")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    args = parser.parse_args()
    feed = (mlxcel if args.by == "mlxcel" else llama_cpp)(args.file, args.threads)
    rng = random.Random(0)
    prompt = [rng.randrange(100, 40000) for _ in range(args.prompt)]
    clocks = [(time.perf_counter(), time.process_time())]
    feed(prompt)
    clocks.append((time.perf_counter(), time.process_time()))
    for i in range(args.new):
        feed([prompt[i % args.prompt]])
    clocks.append((time.perf_counter(), time.process_time()))
    (w0, c0), (w1, c1), (w2, c2) = clocks
    print(
        f"{args.by} threads={args.threads} prefill {args.prompt / (w1 - w0):.1f} tok/s (cpu {c1 - c0:.2f} s) "
        f"decode {args.new / (w2 - w1):.1f} tok/s (cpu {(c2 - c1) / args.new * 1e3:.1f} ms/token)"
    )


if __name__ == "__main__":
    main()

"""Samplers on the CPU against mlx-lm's, interleaved: python benchmarks/bench_sampling.py [out.jsonl]."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_sampler

from harness import interleaved
from mlxcel_ext import SamplingBatch, sample
from mlxcel_ext.ops import reference_sampling as reference

CASES = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_k_top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}


def theirs(params: dict[str, float], logits: mx.array) -> Callable[[], mx.array]:
    """mlx-lm's sampler of these parameters; it takes log-probabilities, as its generate loop computes them."""
    sampler = make_sampler(
        temp=params["temperature"],
        top_p=params.get("top_p", 0.0),
        top_k=int(params.get("top_k", 0)),
        min_p=params.get("min_p", 0.0),
    )
    return lambda: sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def empty() -> mx.array:
    """What any evaluation costs."""
    return mx.zeros((1,)) + 1.0


def check(params: dict[str, float], logits: mx.array, ids: mx.array) -> None:
    """Every token drawn is one that the filters keep."""
    for row, token in zip(np.array(logits, np.float64), np.array(ids), strict=True):
        if params["temperature"] == 0.0:
            assert token == np.argmax(row)
        else:
            assert reference.kept_tokens(row, **params).mask[token]


def main(out: str | None) -> None:
    mx.set_default_device(mx.cpu)
    rng = np.random.default_rng(0)
    lines = []
    for vocab in (49152, 151936):
        for batch in (1, 8):
            logits = mx.array(rng.standard_normal((batch, vocab)) * 2, mx.float32)
            for name, params in CASES.items():
                batch_params = SamplingBatch(**params)

                def ours(p: SamplingBatch = batch_params, x: mx.array = logits) -> mx.array:
                    return sample(x, p, (1, 2), stream=mx.cpu).ids

                check(params, logits, ours())
                arms = {"ours": ours, "mlx_lm": theirs(params, logits), "ours_again": ours, "empty": empty}
                times = interleaved(arms, rounds=9)
                ratio = times["mlx_lm"].median / times["ours"].median
                null = times["ours_again"].median / times["ours"].median
                print(
                    f"V {vocab} B {batch} {name}: {times['ours']} mlx-lm {times['mlx_lm']} x{ratio:.1f}"
                    f" (null x{null:.2f}, empty {times['empty'].median:.0f} us)"
                )
                row = {"vocab": vocab, "batch": batch, "case": name, "ratio": ratio, "null": null}
                lines.append(row | {arm: vars(t) for arm, t in times.items()})
    if out is not None:
        with open(out, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)

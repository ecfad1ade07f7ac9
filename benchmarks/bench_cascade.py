"""Flat attention against cascade for requests behind one prompt, through the public op: where is the crossover?

    PYTHONPATH=python:. python benchmarks/bench_cascade.py [--device cpu|gpu] [--json out.json] [--plot out.png]
    PYTHONPATH=python:. python -m pytest benchmarks/bench_cascade.py

Each cell (members, prefix, tail) has four arms, interleaved in one run: the flat plan, the flat plan again, a plan
that shares all it can, and the one that the device's cost model chooses. A launch reads other pools than the one
before, so that caches are cold. Cascade and flat must agree, and the plan must say that it shares, before any number
is printed. With `--plot`, draws flat time / cascade time over the prefix.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import (
    AttentionPlan,
    CascadeCosts,
    PageTable,
    cascade_attention,
    paged_attention,
    plan_attention,
    plan_cascade,
)
from mlxcel_ext.ops.attention_plan import default_target
from mlxcel_ext.ops.cascade import default_costs
from mlxcel_ext.outcomes import FusedCascade

PAGE = 16
SHARE_ALL = CascadeCosts(reread=1.0, row=0.0, tile=0.0, merge=0.0, launch=0.0)
TOLERANCE = {mx.float32: 2e-5, mx.float16: 5e-3, mx.bfloat16: 4e-2}
#: Members, prefixes and tails of a sweep.
SWEEPS = {
    "cpu": ([2, 4, 8, 16], [256, 512, 1024, 2048, 4096], [64, 256]),
    "gpu": ([2, 8, 32, 64, 256], [512, 1024, 2048, 8192, 32768], [256]),
}


@dataclass(frozen=True)
class Heads:
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA = Heads(32, 8, 128)
SMOLLM2 = Heads(9, 3, 64)


@dataclass(frozen=True)
class Cell:
    """Microseconds of a launch (median of rounds), and what the cost model did."""

    heads: Heads
    dtype: str
    members: int
    prefix: int
    tail: int
    flat: float
    flat_again: float
    cascade: float
    chosen: float
    shares: bool
    error: float


class Case:
    """Requests whose first `prefix` tokens are the same pages, and the arms."""

    def __init__(
        self, heads: Heads, dtype: mx.Dtype, members: int, prefix: int, tail: int, device: mx.Device
    ) -> None:
        self.device = device
        pages, own = prefix // PAGE, -(-tail // PAGE)
        count = pages + members * own
        ids = np.random.default_rng(0).permutation(count)  # as after hours of serving
        rows = [[*ids[:pages], *ids[pages + m * own : pages + (m + 1) * own]] for m in range(members)]
        self.table = PageTable.from_pages(rows, [prefix + tail] * members, PAGE)
        shape = (count, PAGE, heads.num_kv_heads, heads.head_dim)
        # Enough pools that the next launch finds none of its own in a cache of 64 MB.
        bytes_ = 2 * dtype.size * int(np.prod(shape))
        copies = 1 if device == mx.cpu else max(1, min(16, 128_000_000 // bytes_ + 1))
        with mx.stream(device):
            self.pools = [[mx.random.normal(shape).astype(dtype) for _ in "kv"] for _ in range(copies)]
            self.q = mx.random.normal((members, heads.num_qo_heads, heads.head_dim)).astype(dtype)
            mx.eval(self.pools, self.q)
        options = {
            "num_qo_heads": heads.num_qo_heads,
            "num_kv_heads": heads.num_kv_heads,
            "target": default_target(device),
        }
        flat = plan_attention(self.table, **options)
        self.plans = {
            "flat": flat,
            "flat_again": flat,
            "cascade": plan_cascade(self.table, costs=SHARE_ALL, **options),
            "chosen": plan_cascade(self.table, costs=default_costs(device), **options),
        }

    def launch(self, plan: AttentionPlan, pool: int = 0) -> mx.array:
        run = paged_attention if plan.cascade is None else cascade_attention
        out = run(self.q, *self.pools[pool], self.table, plan=plan, stream=self.device)
        assert isinstance(out, mx.array)
        return out

    def error(self) -> float:
        """The largest difference between flat and cascade; AssertionError where the plan does not share."""
        assert isinstance(self.plans["cascade"].cascade, FusedCascade)
        assert self.plans["cascade"].cascade.members == self.table.batch
        flat, cascade = (self.launch(self.plans[arm]).astype(mx.float32) for arm in ("flat", "cascade"))
        error = float(mx.abs(flat - cascade).max())
        assert error <= TOLERANCE[self.q.dtype], error
        return error

    def times(self, rounds: int, repeats: int) -> dict[str, float]:
        """Median microseconds of a launch by arm; `repeats` launches are submitted together."""
        samples: dict[str, list[float]] = {arm: [] for arm in self.plans}
        turn = 0
        for round_ in range(rounds + 2):
            for arm, plan in self.plans.items():
                begin = time.perf_counter()
                mx.eval([self.launch(plan, (turn + i) % len(self.pools)) for i in range(repeats)])
                if round_ >= 2:
                    samples[arm].append((time.perf_counter() - begin) / repeats * 1e6)
                turn += repeats
        return {arm: statistics.median(found) for arm, found in samples.items()}


def measure(
    heads: Heads, dtype: mx.Dtype, members: int, prefix: int, tail: int, device: mx.Device, rounds: int = 9
) -> Cell:
    case = Case(heads, dtype, members, prefix, tail, device)
    error = case.error()
    times = case.times(rounds, 1 if device == mx.cpu else 32)
    shares = isinstance(case.plans["chosen"].cascade, FusedCascade)
    return Cell(heads, str(dtype).split(".")[-1], members, prefix, tail, shares=shares, error=error, **times)


def plot(cells: Sequence[Cell], path: str, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for members in sorted({cell.members for cell in cells}):
        mine = sorted((c for c in cells if c.members == members), key=lambda c: c.prefix)
        gains = [c.flat / c.cascade for c in mine]
        (line,) = axes.plot([c.prefix for c in mine], gains, label=f"{members} requests")
        for cell, gain in zip(mine, gains, strict=True):
            fill = line.get_color() if cell.shares else "white"
            axes.plot(cell.prefix, gain, "o", color=line.get_color(), markerfacecolor=fill)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("tokens of the shared prompt")
    axes.set_ylabel("flat time / cascade time")
    axes.set_title(f"{title}\nfilled: the cost model shares", fontsize=10)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


@pytest.mark.parametrize("heads", [LLAMA, SMOLLM2], ids=["32/8x128", "9/3x64"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("arm", ["flat", "cascade"])
def test_eight_requests_behind_2048_tokens(benchmark, heads, dtype, arm):
    case = Case(heads, dtype, 8, 2048, 256, mx.cpu)
    case.error()
    benchmark(lambda: mx.eval(case.launch(case.plans[arm])))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=["cpu", "gpu"], default=str(mx.default_device().type).split(".")[-1]
    )
    parser.add_argument("--heads", choices=["llama", "smollm2"], default="llama")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="bfloat16")
    for name in ("members", "prefixes", "tails"):
        parser.add_argument(f"--{name}", type=int, nargs="*")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    parser.add_argument("--plot")
    args = parser.parse_args()
    device = mx.cpu if args.device == "cpu" else mx.gpu
    sweep = [
        given or usual
        for given, usual in zip((args.members, args.prefixes, args.tails), SWEEPS[args.device], strict=True)
    ]
    heads = {"llama": LLAMA, "smollm2": SMOLLM2}[args.heads]
    cells = []
    print("members prefix tail |     flat us  again  cascade us   gain | chosen us  gain, shares")
    for tail in sweep[2]:
        for members in sweep[0]:
            for prefix in sweep[1]:
                cell = measure(heads, getattr(mx, args.dtype), members, prefix, tail, device, args.rounds)
                cells.append(cell)
                print(
                    f"{members:7d} {prefix:6d} {tail:4d} | {cell.flat:11.1f} {cell.flat / cell.flat_again:6.3f} "
                    f"{cell.cascade:11.1f} {cell.flat / cell.cascade:6.2f} | {cell.chosen:9.1f} "
                    f"{cell.flat / cell.chosen:5.2f}  {'yes' if cell.shares else 'no'}",
                    flush=True,
                )
                mx.clear_cache()
                if args.json:
                    with open(args.json, "w", encoding="utf-8") as file:
                        json.dump([asdict(c) for c in cells], file)
    worst = max(cells, key=lambda c: c.chosen / c.flat)
    print(f"the cost model's worst cell: {worst.chosen / worst.flat:.3f} of flat, {worst}")
    if args.plot:
        title = f"{heads.num_qo_heads}/{heads.num_kv_heads} heads of {heads.head_dim}, {args.dtype}, tail {sweep[2][0]}, {args.device}"
        plot([c for c in cells if c.tail == sweep[2][0]], args.plot, title)


if __name__ == "__main__":
    main()

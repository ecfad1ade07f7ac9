"""Every kernel on this Mac's GPU against MLX's own ops, and a report: the first run on Apple hardware starts here.

    python benchmarks/bench_metal.py [--report FOLDER] [--quick] [--device cpu]

Writes FOLDER/<date>-metal-<chip>.md and FOLDER/raw/<date>-metal-<chip>.jsonl (default docs/benchmark_results). An
arm evaluates several calls in one go and divides, as a step of a model does: alone, a call costs the time of
submitting and waiting. `--device cpu` tries the script out where there is no Mac.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import platform
import re
import subprocess
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from harness import check_equal, interleaved
from mlxcel_ext import (
    PageTable,
    SamplingBatch,
    add_rms_norm,
    cascade_attention,
    chain_speculative_sample,
    count_tokens,
    edit_logits,
    merge_states,
    paged_attention,
    plan_attention,
    plan_cascade,
    rope_append,
    sample,
    token_logprobs,
    top_p_renorm,
)
from mlxcel_ext.ops.sampling import NO_EDIT

DTYPE = mx.float16
HQ, HKV, DIM, PAGE = 32, 8, 128, 32
CALLS = 16  # in one evaluation
MOST_BYTES = 2**31  # of the pools of all calls together


@dataclasses.dataclass
class Case:
    """`ours` and `mlx` take the index of the call; `num_bytes` is what one call must read and write."""

    name: str
    num_bytes: int
    ours: Callable[[int], mx.array]
    mlx: Callable[[int], mx.array]
    tolerance: float | None = 0.02  # None: nothing to compare, for draws


def normal(*shape: int, dtype: mx.Dtype = DTYPE) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def decode(batch: int, ctx: int, shared: int = 0) -> Case:
    """`shared`: pages at the begin that all requests have in common, for a cascade."""
    pages = ctx // PAGE
    num_bytes = 2 * (batch * ctx - (batch - 1) * shared * PAGE) * HKV * DIM * DTYPE.size
    pools = [
        (normal(batch * pages, PAGE, HKV, DIM), normal(batch * pages, PAGE, HKV, DIM))
        for _ in range(max(1, min(CALLS, MOST_BYTES // num_bytes)))
    ]
    ids = np.random.default_rng(0).permutation(batch * pages).astype(np.int32).reshape(batch, pages)
    ids[:, :shared] = ids[0, :shared]
    table = PageTable(np.arange(batch + 1) * pages, ids.reshape(-1), [PAGE] * batch, PAGE)
    make_plan, attention = (plan_cascade, cascade_attention) if shared else (plan_attention, paged_attention)
    plan = make_plan(table, num_qo_heads=HQ, num_kv_heads=HKV)
    q, indices = normal(batch, HQ, DIM), mx.array(ids)

    def gather(i: int) -> mx.array:
        k, v = (
            mx.take(p, indices, axis=0).reshape(batch, -1, HKV, DIM).swapaxes(1, 2)
            for p in pools[i % len(pools)]
        )
        return mx.fast.scaled_dot_product_attention(q[:, :, None], k, v, scale=DIM**-0.5)[:, :, 0]

    return Case(
        f"decode, batch {batch}, context {ctx}" + (f", {shared} pages shared" if shared else ""),
        num_bytes,
        lambda i: attention(q, *pools[i % len(pools)], table, plan=plan),
        gather,
    )


def prefill(rows: int, ctx: int) -> Case:
    k_pages, v_pages = normal(ctx // PAGE, PAGE, HKV, DIM), normal(ctx // PAGE, PAGE, HKV, DIM)
    table = PageTable([0, ctx // PAGE], np.arange(ctx // PAGE), [PAGE], PAGE)
    qo_indptr = np.array([0, rows], np.int32)
    plan = plan_attention(table, qo_indptr, num_qo_heads=HQ, num_kv_heads=HKV)
    q = normal(rows, HQ, DIM)

    def contiguous(_: int) -> mx.array:
        k, v = (p.reshape(1, ctx, HKV, DIM).swapaxes(1, 2) for p in (k_pages, v_pages))
        out = mx.fast.scaled_dot_product_attention(
            q[None].swapaxes(1, 2), k, v, scale=DIM**-0.5, mask="causal"
        )
        return out.swapaxes(1, 2)[0]

    return Case(
        f"prefill, {rows} rows over {ctx} ({4 * rows * ctx * HQ * DIM / 1e9:.0f} GFLOP)",
        2 * ctx * HKV * DIM * DTYPE.size,
        lambda _: paged_attention(q, k_pages, v_pages, table, qo_indptr=qo_indptr, plan=plan),
        contiguous,
    )


def norm(rows: int, hidden: int) -> Case:
    x, residual, weight = normal(rows, hidden), normal(rows, hidden), normal(hidden)
    return Case(
        f"add_rms_norm, {rows} x {hidden}",
        4 * x.nbytes,
        lambda _: add_rms_norm(x, residual, weight, 1e-5)[0],
        lambda _: mx.fast.rms_norm(x + residual, weight, 1e-5),
        0.05,
    )


def rope(tokens: int) -> Case:
    q, k, v = normal(tokens, HQ, DIM), normal(tokens, HKV, DIM), normal(tokens, HKV, DIM)
    slots, positions = mx.arange(tokens, dtype=mx.int32), mx.arange(tokens, dtype=mx.int32)
    inv_freq = mx.array(10000.0 ** (-np.arange(0, DIM, 2) / DIM), mx.float32)
    pools = [normal(-(-tokens // PAGE), PAGE, HKV, DIM) for _ in "kv"]

    def ours(_: int) -> mx.array:
        q_rot, *pools[:] = rope_append(q, k, v, *pools, slots, positions, inv_freq=inv_freq)
        return q_rot

    def separate(_: int) -> mx.array:
        q_rot, k_rot = (
            mx.fast.rope(a.swapaxes(0, 1), DIM, traditional=False, base=10000.0, scale=1.0, offset=0)
            for a in (q, k)
        )
        # A sum brings the rotated keys into the time; MLX would write them by another op.
        return q_rot.swapaxes(0, 1) + 0.0 * k_rot.sum()

    return Case(f"rope_append, {tokens} tokens", 2 * (q.nbytes + 2 * k.nbytes), ours, separate, 0.05)


def merge(chunks: int, tokens: int) -> Case:
    v, lse = normal(tokens, chunks, HQ, DIM, dtype=mx.float32), normal(tokens, chunks, HQ, dtype=mx.float32)
    indptr = np.arange(tokens + 1) * chunks

    def by_softmax(_: int) -> mx.array:
        weights = mx.softmax(lse * np.log(2).item(), axis=1)
        return (weights[..., None] * v).sum(axis=1)

    states = v.reshape(-1, HQ, DIM), lse.reshape(-1, HQ)
    return Case(
        f"merge_states, {chunks} chunks of {tokens} tokens",
        v.nbytes + lse.nbytes,
        lambda _: merge_states(*states, indptr)[0],
        by_softmax,
        1e-4,
    )


def edit(batch: int, vocab: int) -> Case:
    logits = normal(batch, vocab, dtype=mx.float32)
    counts = (mx.random.uniform(shape=(batch, vocab)) < 0.01).astype(mx.uint32)
    rows = np.full(batch, NO_EDIT)
    rows["counts_row"], rows["frequency"], rows["presence"] = np.arange(batch), 0.5, 0.25
    return Case(
        f"edit_logits with penalties, batch {batch}, vocab {vocab}",
        3 * logits.nbytes,
        lambda _: edit_logits(logits, rows, counts=counts),
        lambda _: logits - 0.5 * counts - 0.25 * (counts > 0),
        1e-5,
    )


def count(tokens: int, vocab: int) -> Case:
    ids, rows = mx.random.randint(0, vocab, (tokens,)), mx.arange(tokens, dtype=mx.int32)
    counts = [mx.zeros((tokens, vocab), mx.uint32)]
    other = mx.zeros((tokens, vocab), mx.uint32)

    def ours(_: int) -> mx.array:
        counts[0] = count_tokens(counts[0], rows, ids)
        return counts[0]

    return Case(f"count_tokens, {tokens} rows", 12 * tokens, ours, lambda _: other.at[rows, ids].add(1), None)


def logprobs(batch: int, vocab: int, num_top: int) -> Case:
    logits = normal(batch, vocab, dtype=mx.float32) * 2
    ids = mx.argmax(logits, axis=-1).astype(mx.int32)

    def by_sort(_: int) -> mx.array:
        log_softmax = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return mx.sort(mx.topk(log_softmax, num_top, axis=-1), axis=-1)[:, ::-1]

    return Case(
        f"token_logprobs, {num_top} top, batch {batch}, vocab {vocab}",
        logits.nbytes,
        lambda _: token_logprobs(logits, ids, num_top).top_logprobs,
        by_sort,
        1e-4,
    )


def renorm(batch: int, vocab: int, top_p: float) -> Case:
    probs = mx.softmax(normal(batch, vocab, dtype=mx.float32) * 2, axis=-1)

    def by_sort(_: int) -> mx.array:
        order = mx.argsort(-probs, axis=-1)
        before = mx.cumsum(mx.take_along_axis(probs, order, axis=-1), axis=-1, inclusive=False)
        kept = mx.put_along_axis(mx.zeros_like(probs), order, (before < top_p).astype(mx.float32), axis=-1)
        kept = kept * probs
        return kept / kept.sum(axis=-1, keepdims=True)

    return Case(
        f"top_p_renorm, batch {batch}, vocab {vocab}",
        2 * probs.nbytes,
        lambda _: top_p_renorm(probs, top_p),
        by_sort,
        1e-3,
    )


def chain(batch: int, drafts: int, vocab: int) -> Case:
    target = mx.softmax(normal(batch, drafts + 1, vocab, dtype=mx.float32), axis=-1)
    draft = mx.softmax(normal(batch, drafts, vocab, dtype=mx.float32), axis=-1)
    ids = mx.random.categorical(mx.log(draft)).astype(mx.int32)

    def by_ops(_: int) -> mx.array:
        p, q = (mx.take_along_axis(x[:, :drafts], ids[..., None], axis=-1)[..., 0] for x in (target, draft))
        accepted = mx.cumprod((mx.random.uniform(shape=p.shape) * q < p).astype(mx.int32), axis=1).sum(axis=1)
        residual = mx.maximum(target - mx.pad(draft, [(0, 0), (0, 1), (0, 0)]), 0.0)
        return mx.random.categorical(
            mx.log(mx.take_along_axis(residual, accepted[:, None, None], axis=1))[:, 0]
        )

    return Case(
        f"chain_speculative_sample, {drafts} drafts, batch {batch}, vocab {vocab}",
        2 * 4 * batch * vocab,
        lambda i: chain_speculative_sample(ids, draft, target, (1, i))[0],
        by_ops,
        None,
    )


def draw(batch: int, vocab: int, name: str, params: dict[str, float]) -> Case:
    logits = normal(batch, vocab, dtype=mx.float32) * 2
    settings = SamplingBatch(**params)

    def by_sort(_: int) -> mx.array:
        x = logits / max(params["temperature"], 1e-5)
        if params["temperature"] == 0.0:
            return mx.argmax(x, axis=-1)
        if "top_k" in params:
            kth = mx.topk(x, int(params["top_k"]), axis=-1).min(axis=-1, keepdims=True)
            x = mx.where(x >= kth, x, -mx.inf)
        if "top_p" in params:
            order = mx.argsort(-x, axis=-1)
            share = mx.cumsum(mx.softmax(mx.take_along_axis(x, order, axis=-1), axis=-1), axis=-1)
            kept = mx.put_along_axis(
                mx.zeros_like(x), order, (share < params["top_p"]).astype(x.dtype), axis=-1
            )
            x = mx.where(kept > 0, x, -mx.inf)
        return mx.random.categorical(x)

    return Case(
        f"sample {name}, batch {batch}, vocab {vocab}",
        logits.nbytes,
        lambda i: sample(logits, settings, (1, i)).ids,
        by_sort,
        None,
    )


def cases(quick: bool) -> Iterator[Case]:
    contexts = (1024,) if quick else (1024, 4096, 16384, 32768)
    yield from (decode(batch, ctx) for batch in (1, 4) for ctx in contexts)
    yield decode(16, 1024 if quick else 8192, shared=24 if quick else 192)
    yield prefill(*((64, 256) if quick else (512, 4096)))
    yield from (norm(*shape) for shape in ((1, 8192), (32, 4096), (4096, 4096))[: 2 if quick else 3])
    yield from (rope(tokens) for tokens in ((8,) if quick else (8, 512, 4096)))
    yield merge(16, 8)
    for batch in (1, 8):
        vocab = 32768 if quick else 151936
        yield edit(batch, vocab)
        yield count(batch, vocab)
        yield logprobs(batch, vocab, 20)
        yield renorm(batch, vocab, 0.9)
        yield chain(batch, 4, vocab)
    for batch in (1, 8):
        for vocab in (32768,) if quick else (32768, 151936):
            for name, params in (
                ("greedy", {"temperature": 0.0}),
                ("temperature", {"temperature": 0.8}),
                ("top-p", {"temperature": 0.8, "top_p": 0.9}),
                ("top-k, top-p", {"temperature": 0.8, "top_k": 50, "top_p": 0.9}),
            ):
                yield draw(batch, vocab, name, params)


def measure(case: Case) -> dict[str, object]:
    if case.tolerance is not None:
        check_equal(case.ours(0), np.asarray(case.mlx(0).astype(mx.float32)), case.tolerance)

    def arm(call: Callable[[int], mx.array]) -> Callable[[], list[mx.array]]:
        return lambda: [call(i) for i in range(CALLS)]

    times = interleaved({"ours": arm(case.ours), "mlx": arm(case.mlx), "again": arm(case.ours)}, rounds=9)
    alone = interleaved({"ours": lambda: case.ours(0)}, rounds=9)["ours"].median
    ours = times["ours"].median / CALLS
    return {
        "case": case.name,
        "us": ours,
        "mlx_us": times["mlx"].median / CALLS,
        "ratio": times["mlx"].median / times["ours"].median,
        "null": times["again"].median / times["ours"].median,
        "alone_us": alone,
        "gbps": case.num_bytes / ours / 1e3,
    }


def copy_bandwidth() -> float:
    """GB/s of a copy, read and write together."""
    x = normal(2**26)
    median = interleaved({"copy": lambda: mx.contiguous(x + 1)}, rounds=9)["copy"].median
    return 2 * x.nbytes / median / 1e3


def chip() -> str:
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    if platform.system() != "Darwin":
        return platform.machine()
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def report(rows: list[dict[str, object]], copy: float, device: str) -> str:
    lines = [
        f"# Metal kernels on {chip()}, {datetime.date.today()}",
        "",
        f"`python benchmarks/bench_metal.py`, {platform.platform()}, MLX {mx.__version__}, device {device}, {DTYPE}. Medians of nine rounds; "
        f"{CALLS} calls in one evaluation. A copy moves {copy:.0f} GB/s. Expected times: docs/kernels/metal_cost_model.md.",
        "",
        "| case | ours us | MLX us | MLX / ours | null | alone us | GB/s | of copy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['case']} | {r['us']:.1f} | {r['mlx_us']:.1f} | {r['ratio']:.2f} | {r['null']:.2f} | {r['alone_us']:.0f} "
        f"| {r['gbps']:.0f} | {r['gbps'] / copy:.2f} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", type=pathlib.Path, default=pathlib.Path("docs/benchmark_results"))
    parser.add_argument("--quick", action="store_true", help="few and small cases")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    options = parser.parse_args()
    if options.device == "gpu" and not mx.metal.is_available():
        parser.error("MLX has no Metal device here: --device cpu tries the script out")
    mx.set_default_device(mx.gpu if options.device == "gpu" else mx.cpu)
    (options.report / "raw").mkdir(parents=True, exist_ok=True)  # before the work: it may be refused
    copy = copy_bandwidth()
    rows = []
    for case in cases(options.quick):
        rows.append(measure(case))
        print(f"{case.name}: {rows[-1]['us']:.1f} us, MLX / ours {rows[-1]['ratio']:.2f}", flush=True)
    name = f"{datetime.date.today()}-metal-{re.sub(r'[^a-z0-9]+', '-', chip().lower())}"
    (options.report / "raw" / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (options.report / f"{name}.md").write_text(report(rows, copy, options.device))
    print(f"wrote {options.report / name}.md")


if __name__ == "__main__":
    main()

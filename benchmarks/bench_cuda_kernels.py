"""The CUDA kernels alone: CUDA events, cold L2, correctness in the same run, one JSON record a line.

Needs a CUDA build with the C interface (cmake -DMLXCEL_CUDA_RAW_API=ON) and PyTorch for buffers and events:

    PYTHONPATH=python:. python benchmarks/bench_cuda_kernels.py build/cuda/libmlxcel_cuda_raw.so out.jsonl [section ...]

Each iteration evicts the L2 cache with a 256 MiB fill, hides the host behind a spinning kernel, then records event,
kernel, event. An empty kernel reads 3.4 us this way on an H200.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlxcel_ext import PageTable, plan_attention, plan_cascade
from mlxcel_ext.ops import CascadeCosts
from mlxcel_ext.ops.attention_plan import cuda_target

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
DIM, PAGE = 128, 16
PEERS = Path(__file__).parent.parent / "docs/benchmark_results/raw/2026-11-29-flashinfer-0.7.4-h200.json"


def struct(name: str, **fields: Any) -> type[ctypes.Structure]:
    """A ctypes structure from type -> space-separated names, in order."""
    types = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float, "ptr": ctypes.c_void_p}
    members = [(n, types[t.split("_")[0]]) for t, names in fields.items() for n in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": members})


AttentionParams = struct(
    "AttentionParams",
    i32_a="num_q num_requests num_qo_heads num_kv_heads head_dim page_size",
    i64="stride_page stride_token stride_head",
    i32_b="num_tiles num_partials batch_invariant max_q_len chunks_each window_left causal",
    f32="sm_scale_log2 logits_soft_cap",
    i32_c="dtype kv_dtype has_qo_indptr has_sinks has_first_page_offset has_token_order num_large",
)
AttentionArrays = struct(
    "AttentionArrays",
    ptr="q k v kv_indptr kv_indices last tiles merge qo_indptr offset sinks token_order out lse partial_v partial_lse counters",
    i32="num_indices evict_first",
)
MergeParams = struct("MergeParams", i32="num_in num_out num_heads head_dim dtype")
NormParams = struct("NormParams", i64="rows", i32="hidden dtype", f32="eps bias")
RopeParams = struct(
    "RopeParams",
    i32_a="tokens num_qo_heads num_kv_heads head_dim rotary_dim interleaved page_size num_pages",
    i64="stride_page stride_token stride_head",
    f32="scale",
    i32_b="dtype kv_dtype",
)


class Kernels:
    """The library, and a timer for its calls."""

    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(str(Path(path).resolve()))
        self.evict = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        self.num_sms = torch.cuda.get_device_properties(0).multi_processor_count

    def __call__(self, name: str, *args: Any) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        raw = [ctypes.c_void_p(a.data_ptr()) if torch.is_tensor(a) else ctypes.byref(a) for a in args]
        if getattr(self.lib, f"mlxcel_raw_{name}")(*raw, stream) != 0:
            raise RuntimeError(f"{name} failed")

    def time(self, run: Callable[[], None], iterations: int = 21) -> dict[str, float]:
        """Median, p10 and p90 in us."""
        pairs = []
        for i in range(iterations + 2):
            self.evict.fill_(i & 1)
            torch.cuda._sleep(150_000)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        us = [begin.elapsed_time(end) * 1e3 for begin, end in pairs[2:]]
        return {n: round(float(np.percentile(us, q)), 2) for n, q in (("us", 50), ("p10", 10), ("p90", 90))}


class Attention:
    """One launch over pools of exactly the pages in use, dealt in random order.

    `shared`: tokens at the front that all requests share; `plan` makes the plan of a table.
    """

    def __init__(
        self,
        kernels: Kernels,
        heads: tuple[int, int],
        kv_len: list[int],
        page: int = PAGE,
        qo_len: list[int] | None = None,
        shared: int = 0,
        plan: Callable[..., Any] = plan_attention,
    ) -> None:
        hq, hkv = heads
        counts = [-(-n // page) for n in kv_len]
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        common = shared // page
        num_pages = int(indptr[-1]) - common * (len(kv_len) - 1) if common else int(indptr[-1])
        dealt = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
        own = np.split(dealt[common:], np.cumsum([c - common for c in counts])[:-1])
        ids = np.concatenate([np.concatenate([dealt[:common], pages]) for pages in own])
        last = np.array([n - (c - 1) * page for n, c in zip(kv_len, counts, strict=True)], np.int32)
        qo_indptr = None if qo_len is None else np.concatenate([[0], np.cumsum(qo_len)]).astype(np.int32)
        plan = plan(
            PageTable(indptr, ids, last, page),
            qo_indptr,
            num_qo_heads=hq,
            num_kv_heads=hkv,
            target=cuda_target(kernels.num_sms),
        )
        num_q = len(kv_len) if qo_len is None else sum(qo_len)
        self.kernels, self.heads, self.kv_len, self.page, self.qo_len = kernels, heads, kv_len, page, qo_len
        self.ids, self.indptr = ids, indptr
        self.q = torch.randn(num_q, hq, DIM, device="cuda").bfloat16()
        self.k, self.v = (
            torch.randn(num_pages, page, hkv, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        self.out, self.lse = torch.full_like(self.q, math.nan), torch.empty(num_q, hq, device="cuda")
        self.num_tiles = len(plan.tiles)
        rows = max(plan.num_partials, 1)
        self.held = [
            torch.from_numpy(np.ascontiguousarray(a)).cuda()
            for a in (indptr, ids, last, plan.tiles, plan.merge_indptr)
        ] + [
            torch.empty(rows, hq, DIM, device="cuda"),
            torch.empty(rows, hq, device="cuda"),
            torch.zeros(num_q * hkv, dtype=torch.int32, device="cuda"),
        ]
        order = plan._plan.token_order
        for a in (qo_indptr, order if len(order) else None):
            self.held.append(None if a is None else torch.from_numpy(np.ascontiguousarray(a)).cuda())
        self.kv_bytes = 4 * hkv * DIM * (sum(kv_len) - shared * (len(kv_len) - 1))
        self.params = AttentionParams(
            *(num_q, len(kv_len), hq, hkv, DIM, page, page * hkv * DIM, hkv * DIM, DIM),
            *(self.num_tiles, plan.num_partials, 0, plan._plan.max_q_len, plan._plan.chunks_each, -1, 1),
            *(
                DIM**-0.5 * math.log2(math.e),
                0.0,
                *2 * (DTYPES[torch.bfloat16],),
                int(qo_len is not None),
                0,
                0,
                int(len(order) > 0),
                plan._plan.num_large,
            ),
        )
        at = [0 if t is None else t.data_ptr() for t in self.held]
        self.arrays = AttentionArrays(
            *(self.q.data_ptr(), self.k.data_ptr(), self.v.data_ptr(), *at[:5], at[8], 0, 0, at[9]),
            *(self.out.data_ptr(), self.lse.data_ptr(), *at[5:8], len(ids), 0),
        )

    def __call__(self) -> None:
        self.kernels("paged_attention", self.params, self.arrays)

    def error(self) -> float:
        """Relative error of up to four requests against float64."""
        self.out.fill_(math.nan)
        self()
        hq, hkv = self.heads
        starts = np.concatenate([[0], np.cumsum(self.qo_len or [1] * len(self.kv_len))])
        errors = []
        for r in sorted({0, 1, len(self.kv_len) // 2, len(self.kv_len) - 1} & set(range(len(self.kv_len)))):
            n, length = int(starts[r + 1] - starts[r]), self.kv_len[r]
            pages = torch.from_numpy(self.ids[self.indptr[r] : self.indptr[r + 1]]).long().cuda()
            k, v = (p[pages].reshape(-1, hkv, DIM)[:length].double() for p in (self.k, self.v))
            rows = slice(max(0, n - 64), n)  # the last query tokens
            q = self.q[starts[r] : starts[r + 1]][rows].double().reshape(-1, hkv, hq // hkv, DIM)
            logits = torch.einsum("nkgd,lkd->nkgl", q, k) * DIM**-0.5
            position = torch.arange(n, device="cuda")[rows] + length - n
            logits.masked_fill_(
                torch.arange(length, device="cuda") > position[:, None, None, None], -math.inf
            )
            want = torch.einsum("nkgl,lkd->nkgd", logits.softmax(-1), v).reshape(-1, hq, DIM)
            got = self.out[starts[r] : starts[r + 1]][rows].double()
            errors.append(float((got - want).norm() / want.norm()))
        return float(np.max(errors))  # which a NaN is too, unlike Python's

    def record(self, op: str, **more: Any) -> dict[str, Any]:
        error = self.error()
        if not error < 8e-3:
            raise AssertionError(f"{op} {more}: relative error {error}")
        times = self.kernels.time(self)
        gbps = self.kv_bytes / times["us"] / 1e3
        return {
            "op": op,
            "heads": f"{self.heads[0]}/{self.heads[1]}",
            "page": self.page,
            **more,
            **times,
            "tiles": self.num_tiles,
            "kv_mb": round(self.kv_bytes / 1e6, 1),
            "gbps": round(gbps),
            "share_of_4300": round(gbps / 4300, 3),
            "error": round(error, 6),
        }


def decode(kernels: Kernels) -> Iterator[dict[str, Any]]:
    peers = json.loads(PEERS.read_text())["decode"]
    for heads in ((32, 8), (64, 8), (28, 4)):
        for page in (16, 64):
            for batch in (1, 8, 64):
                for ctx in (1024, 4096, 16384):
                    row = Attention(kernels, heads, [ctx] * batch, page).record(
                        "decode", batch=batch, ctx=ctx
                    )
                    peer = peers[f"{heads[0]}/{heads[1]} page {page} batch {batch} ctx {ctx}"]["us"]
                    yield row | {"flashinfer_us": peer, "ratio": round(row["us"] / peer, 3)}


def skewed(kernels: Kernels) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(7)
    lengths = {
        "zipf": np.clip(128 * rng.zipf(1.2, 64), 128, 32768),
        "log-uniform": np.exp(rng.uniform(np.log(128), np.log(32768), 64)),
    }
    for kind, length in lengths.items():
        kv_len = [int(n) for n in length]
        yield Attention(kernels, (32, 8), kv_len).record("skewed", kind=kind, batch=64, longest=max(kv_len))


def cascade(kernels: Kernels) -> Iterator[dict[str, Any]]:
    """A prefix that all requests share, with it stacked in shared tiles and flat."""
    peers = {
        (2048, 8): (24.7, 30.3),
        (2048, 64): (90.2, 62.0),
        (8192, 8): (48.2, 42.3),
        (8192, 64): (258.8, 78.2),
    }
    always = CascadeCosts(reread=1.0, row=0.0, tile=0.0, merge=0.0, launch=0.0)
    for prefix, batch in (*peers, (32768, 256)):
        for name, plan in (
            ("flat", plan_attention),
            ("cascade", functools.partial(plan_cascade, costs=always)),
        ):
            launch = Attention(kernels, (32, 8), [prefix + 256] * batch, shared=prefix, plan=plan)
            row = launch.record("cascade", plan=name, prefix=prefix, batch=batch)
            if (prefix, batch) in peers:
                row["flashinfer_us"] = peers[prefix, batch][name == "cascade"]
            yield row


def merge_states(kernels: Kernels) -> Iterator[dict[str, Any]]:
    for tokens, states in ((64, 8), (64, 64), (512, 8), (2048, 2)):
        v = torch.randn(tokens * states, 32, DIM, device="cuda")
        lse = torch.randn(tokens * states, 32, device="cuda")
        indptr = torch.arange(0, tokens * states + 1, states, device="cuda", dtype=torch.int32)
        out, out_lse = v.new_empty(tokens, 32, DIM), lse.new_empty(tokens, 32)
        params = MergeParams(tokens * states, tokens, 32, DIM, DTYPES[v.dtype])
        args = (params, v, lse, indptr, out, out_lse)
        kernels("merge_states", *args)
        weights = lse.double().mul(math.log(2)).reshape(tokens, states, 32).softmax(1)
        want = (weights[..., None] * v.double().reshape(tokens, states, 32, DIM)).sum(1)
        times = kernels.time(lambda args=args: kernels("merge_states", *args))
        yield {
            "op": "merge_states",
            "tokens": tokens,
            "states": states,
            **times,
            "gbps": round(4 * (v.numel() + out.numel()) / times["us"] / 1e3),
            "error": round(float((out.double() - want).norm() / want.norm()), 9),
        }


def verify(kernels: Kernels) -> Iterator[dict[str, Any]]:
    for tokens in (1, 2, 4, 8, 16):
        qo_len = None if tokens == 1 else [tokens] * 32
        yield Attention(kernels, (32, 8), [4096] * 32, qo_len=qo_len).record(
            "verify", batch=32, ctx=4096, tokens=tokens
        )


def mixed(kernels: Kernels) -> Iterator[dict[str, Any]]:
    """A prompt's chunk in one launch with decode rows."""
    for rows, ctx in ((8, 4096), (64, 1024), (64, 4096), (64, 16384)):
        for tokens, cached in ((512, 0), (512, 8192), (2048, 0)):
            launch = Attention(
                kernels, (32, 8), [ctx] * rows + [tokens + cached], qo_len=[1] * rows + [tokens]
            )
            yield launch.record("mixed", decode=rows, ctx=ctx, tokens=tokens, cached=cached)


def prefill(kernels: Kernels) -> Iterator[dict[str, Any]]:
    """With the tensor-core rate of cuDNN's attention (the one MLX calls) on contiguous K and V beside it."""
    for tokens, cached in ((512, 0), (2048, 0), (8192, 0), (512, 8192), (2048, 8192)):
        attention = Attention(kernels, (32, 8), [tokens + cached], qo_len=[tokens])
        row = attention.record("prefill", tokens=tokens, cached=cached)
        q = torch.randn(1, 32, tokens, DIM, device="cuda").bfloat16()
        k, v = (torch.randn(1, 8, tokens + cached, DIM, device="cuda").bfloat16() for _ in range(2))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            times = kernels.time(
                lambda q=q, k=k, v=v, whole=cached == 0: torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=whole, enable_gqa=True
                )
            )
        pairs = tokens * cached + tokens * (tokens + 1) / 2
        all_pairs = pairs if cached == 0 else tokens * (tokens + cached)
        rate, peer = (4 * 32 * DIM * n / us / 1e6 for n, us in ((pairs, row["us"]), (all_pairs, times["us"])))
        yield row | {
            "tflops": round(rate, 1),
            "cudnn_us": times["us"],
            "cudnn_tflops": round(peer, 1),
            "share": round(rate / peer, 3),
        }


def add_rms_norm(kernels: Kernels) -> Iterator[dict[str, Any]]:
    peers = json.loads(PEERS.read_text())["add_rms_norm"]
    for hidden in (4096, 8192):
        for rows in (1, 8, 64, 512):
            x, residual = (torch.randn(rows, hidden, device="cuda").bfloat16() for _ in range(2))
            weight = torch.randn(hidden, device="cuda").bfloat16()
            out, total = torch.empty_like(x), torch.empty_like(x)
            args = (NormParams(rows, hidden, DTYPES[x.dtype], 1e-5, 0.0), x, residual, weight, out, total)
            kernels("add_rms_norm", *args)
            if not torch.equal(total, x + residual):
                raise AssertionError("the sum differs")
            want = total.double()
            want = want * torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
            times = kernels.time(lambda args=args: kernels("add_rms_norm", *args))
            peer = peers[f"{hidden} x {rows}"]
            yield {
                "op": "add_rms_norm",
                "hidden": hidden,
                "rows": rows,
                **times,
                "flashinfer_us": peer,
                "ratio": round(times["us"] / peer, 3),
                "error": round(float((out.double() - want).norm() / want.norm()), 6),
            }


def rope_append(kernels: Kernels) -> Iterator[dict[str, Any]]:
    peers = json.loads(PEERS.read_text())["rope_then_append"]
    frequencies = (500000.0 ** (-torch.arange(0, DIM, 2, device="cuda").double() / DIM)).float()
    for hq, hkv in ((32, 8), (64, 8)):
        for tokens in (1, 8, 32, 64, 128, 512, 2048):
            num_pages = tokens // PAGE + 64
            q = torch.randn(tokens, hq, DIM, device="cuda").bfloat16()
            k, v = (torch.randn(tokens, hkv, DIM, device="cuda").bfloat16() for _ in range(2))
            pools = [torch.zeros(num_pages, PAGE, hkv, DIM, device="cuda").bfloat16() for _ in range(2)]
            turned = torch.empty_like(q)
            slots = torch.randperm(num_pages * PAGE, device="cuda")[:tokens].int()
            positions = torch.randint(0, 100_000, (tokens,), device="cuda").int()
            params = RopeParams(
                *(tokens, hq, hkv, DIM, DIM, 0, PAGE, num_pages, PAGE * hkv * DIM, hkv * DIM, DIM, 1.0),
                *2 * (DTYPES[q.dtype],),
            )
            args = (params, q, k, v, slots, positions, frequencies, turned, *pools)
            kernels("rope_append", *args)
            angle = (positions.double()[:, None] * frequencies.double())[:, None]
            error = 0.0
            for x, got in ((q, turned), (k, pools[0].reshape(-1, hkv, DIM)[slots.long()])):
                a, b = x.double().chunk(2, -1)
                want = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
                error = max(error, float((got.double() - want).norm() / want.norm()))
            if not torch.equal(pools[1].reshape(-1, hkv, DIM)[slots.long()], v):
                raise AssertionError("v differs")
            times = kernels.time(lambda args=args: kernels("rope_append", *args))
            yield {
                "op": "rope_append",
                "heads": f"{hq}/{hkv}",
                "tokens": tokens,
                **times,
                "flashinfer_two_launches_us": peers[f"{hq}/{hkv} x {tokens}"],
                "error": round(error, 6),
            }


def empty(kernels: Kernels) -> Iterator[dict[str, Any]]:
    yield {"op": "empty kernel", **kernels.time(lambda: kernels("empty"))}


SECTIONS = (empty, add_rms_norm, rope_append, merge_states, decode, skewed, verify, cascade, mixed, prefill)


def main() -> None:
    library, out, *names = sys.argv[1:]
    kernels = Kernels(library)
    rows = []
    with open(out, "w", buffering=1) as file:  # by lines: a run that is stopped leaves what it had
        for section in SECTIONS:
            if names and section.__name__ not in names:
                continue
            for row in section(kernels):
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
    ratios = [r["ratio"] for r in rows if r["op"] == "decode"]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(
            f"decode against FlashInfer: geometric mean {mean:.3f}, worst {max(ratios):.3f}, {len(ratios)} cells"
        )


if __name__ == "__main__":
    main()

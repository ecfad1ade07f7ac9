"""One small case of each kernel, run straight from its source against numpy: what a mutant of it must fail."""

from __future__ import annotations

import functools
import importlib.util
import pathlib

import numpy as np
import numpy.typing as npt

from tests.metal_host.dispatch import Library, from_bf16, to_bf16

ROOT = pathlib.Path(__file__).parents[2]
KERNELS = ROOT / "metal" / "kernels"
F32, BF16 = 0, 2  # FloatType


@functools.cache
def _embedder():
    spec = importlib.util.spec_from_file_location("embed_kernels", ROOT / "metal" / "embed_kernels.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def flat_source(stem: str) -> str:
    """A kernel's source as the host code embeds it."""
    path = KERNELS / f"{stem}.h"
    return "\n".join(_embedder().flatten(path, [KERNELS, ROOT / "csrc"], set())) + "\n"


def flat_metal(stem: str) -> str:
    """The same with all instances of the .metal file."""
    lines = (KERNELS / f"{stem}.metal").read_text().splitlines()
    return flat_source(stem) + "\n".join(x for x in lines if not x.startswith("#include")) + "\n"


def instantiate(source: str, expression: str) -> str:
    name = f"mlxcel::{expression}"
    return source + f'template [[host_name("k")]] [[kernel]] decltype({name}) {name};\n'


def library(source: str, expression: str) -> Library:
    return Library(instantiate(source, expression), lint=False)


def run_add_rms_norm(source: str, seed: int = 1) -> None:
    rng = np.random.default_rng(3)
    rows, hidden = 3, 270  # 270: no multiple of four; 64 threads need two rounds
    x, residual = (rng.standard_normal((rows, hidden)).astype(np.float32) for _ in range(2))
    weight = rng.standard_normal(hidden).astype(np.float32)
    params = np.array([(rows, hidden, BF16, 1e-5, 1.0)], "i8,i4,i4,f4,f4")
    normed, total = np.zeros((rows, hidden), np.uint16), np.zeros((rows, hidden), np.uint16)
    buffers = dict(enumerate([to_bf16(x), to_bf16(residual), to_bf16(weight), normed, total, params]))
    library(source, "add_rms_norm<bfloat>").run(
        "k", buffers, groups=(rows,), group=(64,), outputs=(3, 4), seed=seed
    )
    x, residual, weight = (from_bf16(to_bf16(a)).astype(np.float64) for a in (x, residual, weight))
    np.testing.assert_array_equal(total, to_bf16(x + residual))
    rounded = from_bf16(total).astype(np.float64)
    want = rounded / np.sqrt((rounded**2).mean(-1, keepdims=True) + 1e-5) * (weight + 1.0)
    np.testing.assert_allclose(from_bf16(normed), want, rtol=1 / 128, atol=1e-6)


def run_rope_append(source: str, seed: int = 1) -> None:
    rng = np.random.default_rng(4)
    tokens, hq, hkv, dim, rotary, page_size, pages = 3, 5, 2, 12, 8, 4, 3
    q, k, v = (rng.standard_normal((tokens, h, dim)).astype(np.float32) for h in (hq, hkv, hkv))
    pools = [np.full((pages, page_size, hkv, dim), np.nan, np.float32) for _ in range(2)]
    slots, positions = np.array([7, -1, 2], np.int32), np.array([5, 70_000, 3_000_001], np.int32)
    inv_freq = np.array([1.0, 0.1, 0.01, 0.001], np.float32)
    stride_page, stride_token = page_size * hkv * dim, hkv * dim
    fields = (tokens, hq, hkv, dim, rotary, 0, page_size, pages, stride_page, stride_token, dim, 1.5, F32)
    params = np.array([fields], "i4,i4,i4,i4,i4,i4,i4,i4,i8,i8,i8,f4,i4")
    q_rot = np.zeros_like(q)
    buffers = dict(enumerate([q, k, v, slots, positions, inv_freq, q_rot, *pools, params]))
    library(source, "rope_append<float>").run(
        "k", buffers, threads=(dim // 2, 2, tokens), group=(32, 1, 1), outputs=(6,), inout=(7, 8), seed=seed
    )

    def rotated(x: npt.NDArray) -> npt.NDArray:
        angle = positions[:, None, None].astype(np.float64) * inv_freq.astype(np.float64)
        a, b = x[..., :4].astype(np.float64), x[..., 4:8].astype(np.float64)
        cos, sin = 1.5 * np.cos(angle), 1.5 * np.sin(angle)
        return np.concatenate([a * cos - b * sin, a * sin + b * cos, x[..., 8:]], axis=-1)

    np.testing.assert_allclose(q_rot, rotated(q), atol=3e-6)
    for pool, want in zip(pools, (rotated(k), v), strict=True):
        flat = pool.reshape(-1, hkv, dim)
        np.testing.assert_allclose(flat[[7, 2]], want[[0, 2]], atol=3e-6)
        assert np.isnan(np.delete(flat, [7, 2], axis=0)).all()


def run_merge_states(source: str, seed: int = 1) -> None:
    rng = np.random.default_rng(5)
    rows, heads, dim, indptr = 6, 2, 40, np.array([0, 0, 1, 4, 6], np.int32)
    v = rng.standard_normal((rows, heads, dim)).astype(np.float32)
    lse = rng.standard_normal((rows, heads)).astype(np.float32) * 4
    v[2], lse[2] = np.nan, -np.inf
    v_out, lse_out = np.zeros((4, heads, dim), np.float32), np.zeros((4, heads), np.float32)
    params = np.array([(rows, 4, heads, dim, F32)], "i4,i4,i4,i4,i4")
    buffers = dict(enumerate([v, lse, indptr, v_out, lse_out, params]))
    library(source, "merge_states<float>").run(
        "k", buffers, threads=(dim, heads, 4), group=(64, 1, 1), outputs=(3, 4), seed=seed
    )
    weights = np.exp2(lse.astype(np.float64))
    for m in range(4):
        span = slice(indptr[m], indptr[m + 1])
        total = weights[span].sum(0)
        want = np.einsum("nh,nhd->hd", weights[span], np.nan_to_num(v[span].astype(np.float64)))
        np.testing.assert_allclose(v_out[m], want / np.maximum(total, 1e-30)[:, None], atol=1e-5)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse_out[m], np.log2(total), atol=1e-4)


class AttentionProblem:
    """Two requests over shuffled pages with NaN in every slot that is not theirs."""

    page_size = 4
    hq, hkv = 4, 2

    def __init__(self, kv_len: list[int], qo_len: list[int], chunk_pages: int, dim: int):
        self.dim = dim
        rng = np.random.default_rng(6)
        counts = [-(-n // self.page_size) for n in kv_len]
        self.kv_len, self.qo_len = kv_len, qo_len
        self.indptr = np.cumsum([0, *counts]).astype(np.int32)
        self.pages = rng.permutation(sum(counts) + 2)[: sum(counts)].astype(np.int32)
        shape = (sum(counts) + 2, self.page_size, self.hkv, self.dim)
        self.k, self.v = (np.full(shape, np.nan, np.float32) for _ in range(2))
        for r, n in enumerate(kv_len):
            for t in range(n):
                at = self.pages[self.indptr[r] + t // self.page_size], t % self.page_size
                self.k[at], self.v[at] = rng.standard_normal((2, self.hkv, self.dim))
        self.qo_indptr = np.cumsum([0, *qo_len]).astype(np.int32)
        self.q = rng.standard_normal((sum(qo_len), self.hq, self.dim)).astype(np.float32)
        self.last = np.array([(n - 1) % self.page_size + 1 for n in kv_len], np.int32)
        tiles, merged = [], [0]
        for r, n in enumerate(qo_len):
            spans = range(0, counts[r], chunk_pages)
            direct = len(spans) == 1
            for c, begin in enumerate(spans):
                end = min(begin + chunk_pages, counts[r])
                tiles.append((r, self.qo_indptr[r], n, begin, end, -1 if direct else c, 0, 0))
            merged += [0 if direct else len(spans)] * n
        self.merge = np.cumsum(merged, dtype=np.int32)
        self.tiles, self.num_partials = np.array(tiles, np.int32), int(self.merge[-1])
        self.max_chunks = max(merged)

    def run(self, source: str, kernel: str, row_block: int, threads: int, seed: int, window: int) -> None:
        num_q, group = len(self.q), self.hq // self.hkv
        partial_v = np.full((max(self.num_partials, 1), self.hq, self.dim), np.nan, np.float32)
        partial_lse = np.full((max(self.num_partials, 1), self.hq), np.nan, np.float32)
        out, lse = np.full_like(self.q, np.nan), np.full((num_q, self.hq), np.nan, np.float32)
        stride = (self.page_size * self.hkv * self.dim, self.hkv * self.dim, self.dim)
        fields = (num_q, len(self.kv_len), self.hq, self.hkv, self.dim, self.page_size, *stride)
        fields += (len(self.tiles), self.num_partials, 0, max(self.qo_len), self.max_chunks, window, 1)
        fields += (0.125 * 1.4426950408889634, 0.0, F32, 1, 0, 0, 0)
        params = np.array([fields], "i4,i4,i4,i4,i4,i4,i8,i8,i8,i4,i4,i4,i4,i4,i4,i4,f4,f4,i4,i4,i4,i4,i4")
        inputs = [self.q, self.k, self.v, self.indptr, self.pages, self.last, self.tiles, self.qo_indptr]
        inputs += [self.indptr, np.zeros(self.hq, np.float32)]
        buffers = dict(enumerate([*inputs, partial_v, partial_lse, out, lse, params, self.merge]))
        rows = max(self.qo_len) * group
        library(source, kernel).run(
            "k", buffers, groups=(self.hkv, -(-rows // row_block), len(self.tiles)), group=(threads,),
            inout=(10, 11, 12, 13), constants={"has_qo_indptr": True}, seed=seed,
        )  # fmt: skip
        self._check(partial_v, partial_lse, out, lse, window)

    def _check(self, partial_v, partial_lse, out, lse, window: int) -> None:
        for r, n in enumerate(self.kv_len):
            tokens = [
                (self.pages[self.indptr[r] + t // self.page_size], t % self.page_size) for t in range(n)
            ]
            k, v = (np.array([pool[t] for t in tokens], np.float64) for pool in (self.k, self.v))
            for i in range(self.qo_len[r]):
                row, own = self.qo_indptr[r] + i, n - self.qo_len[r] + i
                low = max(0, own - window) if window >= 0 else 0
                begin, end = self.merge[row], self.merge[row + 1]
                for h in range(self.hq):
                    s = k[low : own + 1, h // 2] @ self.q[row, h].astype(np.float64) * 0.125
                    p = np.exp(s - s.max())
                    want, want_lse = (
                        p @ v[low : own + 1, h // 2] / p.sum(),
                        (s.max() + np.log(p.sum())) / np.log(2),
                    )
                    got, got_lse = out[row, h], lse[row, h]
                    if end > begin:
                        w = np.exp2(partial_lse[begin:end, h].astype(np.float64))
                        got, got_lse = w @ partial_v[begin:end, h] / w.sum(), np.log2(w.sum())
                    np.testing.assert_allclose(got, want, atol=3e-6)
                    np.testing.assert_allclose(got_lse, want_lse, atol=1e-5)


def run_paged_attention(source: str, seed: int = 1) -> None:
    problem = AttentionProblem([37, 21], [2, 3], chunk_pages=6, dim=128)  # two passes of the final merge
    problem.run(source, "paged_attention<float, 128, 8>", 8, 256, seed, window=-1)
    problem.run(source, "paged_attention<float, 128, 8>", 8, 256, seed, window=16)


def run_paged_attention_matrix(source: str, seed: int = 1) -> None:
    problem = AttentionProblem([75, 23], [18, 9], chunk_pages=14, dim=64)  # two blocks of tokens
    problem.run(source, "paged_attention_matrix<float, 64>", 32, 128, seed, window=-1)
    problem.run(source, "paged_attention_matrix<float, 64>", 32, 128, seed, window=3)


CASES = {
    "add_rms_norm": run_add_rms_norm,
    "rope_append": run_rope_append,
    "merge_states": run_merge_states,
    "paged_attention": run_paged_attention,
    "paged_attention_matrix": run_paged_attention_matrix,
}

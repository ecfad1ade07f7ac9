"""One small case of each kernel, run straight from its source against numpy: what a mutant of it must fail."""

from __future__ import annotations

import functools
import importlib.util
import pathlib

import numpy as np
import numpy.typing as npt

from mlxcel_ext.ops import reference_sampling
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


def instantiate(source: str, *expressions: str) -> str:
    """The source with these template instances, each under its function's name."""
    for name in expressions:
        host_name = name.split("<")[0]
        source += (
            f'template [[host_name("{host_name}")]] [[kernel]] decltype(mlxcel::{name}) mlxcel::{name};\n'
        )
    return source


def library(source: str, *expressions: str) -> Library:
    return Library(instantiate(source, *expressions), lint=False)


def run_add_rms_norm(source: str, seed: int = 1) -> None:
    rng = np.random.default_rng(3)
    rows, hidden = 3, 270  # 270: no multiple of four; 64 threads need two rounds
    x, residual = (rng.standard_normal((rows, hidden)).astype(np.float32) for _ in range(2))
    weight = rng.standard_normal(hidden).astype(np.float32)
    params = np.array([(rows, hidden, BF16, 1e-5, 1.0)], "i8,i4,i4,f4,f4")
    normed, total = np.zeros((rows, hidden), np.uint16), np.zeros((rows, hidden), np.uint16)
    buffers = dict(enumerate([to_bf16(x), to_bf16(residual), to_bf16(weight), normed, total, params]))
    library(source, "add_rms_norm<bfloat>").run(
        "add_rms_norm", buffers, groups=(rows,), group=(64,), outputs=(3, 4), seed=seed
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
        "rope_append", buffers, threads=(dim // 2, 2, tokens), group=(32, 1, 1), outputs=(6,), inout=(7, 8),
        seed=seed,
    )  # fmt: skip

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
        "merge_states", buffers, threads=(dim, heads, 4), group=(64, 1, 1), outputs=(3, 4), seed=seed
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
    """Two requests over shuffled pages with NaN in every slot that is not theirs; the first pages may be shared."""

    page_size = 4
    hq, hkv = 4, 2

    def __init__(self, kv_len: list[int], qo_len: list[int], chunk_pages: int, dim: int, shared: int = 0):
        self.dim = dim
        rng = np.random.default_rng(6)
        counts = [-(-n // self.page_size) for n in kv_len]
        self.kv_len, self.qo_len = kv_len, qo_len
        self.indptr = np.cumsum([0, *counts]).astype(np.int32)
        self.pages = rng.permutation(sum(counts) + 2)[: sum(counts)].astype(np.int32)
        for begin in self.indptr[1:-1]:
            self.pages[begin : begin + shared] = self.pages[:shared]
        shape = (sum(counts) + 2, self.page_size, self.hkv, self.dim)
        self.k, self.v = (np.full(shape, np.nan, np.float32) for _ in range(2))
        for r, n in enumerate(kv_len):
            for t in range(n):
                at = self.pages[self.indptr[r] + t // self.page_size], t % self.page_size
                self.k[at], self.v[at] = rng.standard_normal((2, self.hkv, self.dim))
        self.qo_indptr = np.cumsum([0, *qo_len]).astype(np.int32)
        self.q = rng.standard_normal((sum(qo_len), self.hq, self.dim)).astype(np.float32)
        self.last = np.array([(n - 1) % self.page_size + 1 for n in kv_len], np.int32)
        self.order = np.append(0, rng.permutation(sum(qo_len))).astype(np.int32)  # the tile begins at 1
        tiles, merged = [(1, 1, sum(qo_len), 0, shared, 0, 1, -1)] if shared else [], [0]
        for r, n in enumerate(qo_len):
            spans = range(shared, counts[r], chunk_pages)
            direct = len(spans) == 1 and not shared
            for c, begin in enumerate(spans):
                end = min(begin + chunk_pages, counts[r])
                chunk = -1 if direct else c + (shared > 0)
                tiles.append((r, self.qo_indptr[r], n, begin, end, chunk, 0, 0))
            merged += [0 if direct else len(spans) + (shared > 0)] * n
        self.merge = np.cumsum(merged, dtype=np.int32)
        self.tiles, self.num_partials = np.array(tiles, np.int32), int(self.merge[-1])

    def run(
        self,
        source: str,
        kernel: str,
        row_block: int,
        threads: int,
        seed: int,
        window: int,
        invariant: bool = False,
    ) -> npt.NDArray:
        """Checks the launch and returns its output; NaN where a row is in parts."""
        num_q, group = len(self.q), self.hq // self.hkv
        partial_v = np.full((max(self.num_partials, 1), self.hq, self.dim), np.nan, np.float32)
        partial_lse = np.full((max(self.num_partials, 1), self.hq), np.nan, np.float32)
        out, lse = np.full_like(self.q, np.nan), np.full((num_q, self.hq), np.nan, np.float32)
        stride = (self.page_size * self.hkv * self.dim, self.hkv * self.dim, self.dim)
        fields = (num_q, len(self.kv_len), self.hq, self.hkv, self.dim, self.page_size, *stride)
        most_tokens = int(self.tiles[:, 2].max())
        shared = bool(self.tiles[0, 6])
        fields += (len(self.tiles), self.num_partials, invariant, most_tokens, 0, window, 1)
        fields += (0.125 * 1.4426950408889634, 0.0, F32, 1, 0, 0, shared)
        params = np.array([fields], "i4,i4,i4,i4,i4,i4,i8,i8,i8,i4,i4,i4,i4,i4,i4,i4,f4,f4,i4,i4,i4,i4,i4")
        inputs = [self.q, self.k, self.v, self.indptr, self.pages, self.last, self.tiles, self.qo_indptr]
        inputs += [self.indptr, np.zeros(self.hq, np.float32)]
        buffers = dict(enumerate([*inputs, partial_v, partial_lse, out, lse, params, self.merge, self.order]))
        rows = most_tokens * group
        library(source, kernel).run(
            kernel.split("<")[0], buffers, groups=(self.hkv, -(-rows // row_block), len(self.tiles)), group=(threads,),
            inout=(10, 11, 12, 13), constants={"has_qo_indptr": True, "has_token_order": shared}, seed=seed,
        )  # fmt: skip
        self._check(partial_v, partial_lse, out, lse, window)
        return out

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
    problem = AttentionProblem([37, 19], [5, 2], chunk_pages=4, dim=128, shared=4)
    problem.run(source, "paged_attention<float, 128, 8>", 8, 256, seed, window=-1)


def run_paged_attention_matrix(source: str, seed: int = 1) -> None:
    problem = AttentionProblem([75, 23], [18, 9], chunk_pages=14, dim=64)  # two blocks of tokens
    problem.run(source, "paged_attention_matrix<float, 64>", 32, 128, seed, window=-1)
    problem.run(source, "paged_attention_matrix<float, 64>", 32, 128, seed, window=3)
    problem = AttentionProblem([75, 43], [18, 9], chunk_pages=9, dim=64, shared=8)
    problem.run(source, "paged_attention_matrix<float, 64>", 32, 128, seed, window=-1)


SAMPLE_ROW = "f4,i4,f4,f4,u4,u4,u4,u4"  # temperature, top_k, top_p, min_p, seed, draw


class SampleProblem:
    """Rows with every kind of filter, of many equal values; more tokens than the kernels can list."""

    # temperature, top_k, top_p, min_p
    rows = (
        (0.0, 0, 1.0, 0.0),
        (0.8, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.3, 0, 0.97, 0.0),
        (1.0, 0, 0.4, 0.0),
        (1.0, 0, 1.0, 0.3),
        (1.0, 1000, 0.9, 0.0),
        (1.0, 40, 0.7, 0.1),
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 0.5, 0.0),
        (1.0, 1400, 1.0, 0.0),
        *[(1.0, 2, 0.99, 0.0)] * 4,
        *[(1.0, 0, 0.5, 0.3)] * 4,
        *[(1.0, 0, 0.4, 0.0)] * 3,
    )

    def __init__(self, vocab: int = 1502):
        rng = np.random.default_rng(7)
        self.logits = np.round(rng.standard_normal((len(self.rows), vocab)) * 4).astype(np.float32) / 4
        self.logits[0, [40, 41, 900]] = 9.0
        self.logits[3] *= 0.25
        self.logits[8, 77] = np.nan
        self.logits[9] = -np.inf
        self.logits[10] = 0.0
        self.logits[11:15, [3, 900, 1200]] = 9.0
        self.seeds = rng.integers(0, 2**64, len(self.rows), np.uint64)
        self.draws = rng.integers(0, 2**40, len(self.rows), np.uint64)
        words = [(int(s) & 0xFFFFFFFF, int(s) >> 32) for s in self.seeds]
        draws = [(int(d) & 0xFFFFFFFF, int(d) >> 32) for d in self.draws]
        self.params = np.array(
            [(*row, *w, *d) for row, w, d in zip(self.rows, words, draws, strict=True)], SAMPLE_ROW
        )

    def run(self, source: str, seed: int) -> None:
        batch, vocab = self.logits.shape
        kernels = library(source, "sample_scan<float>", "sample_filter<float>")
        part, parts = np.array([752], np.int32), np.zeros((batch, 2, 5), np.int32)
        count = np.array([2], np.int32)
        inputs = [self.logits, self.params, parts]
        for joint in (False, True):
            launch = np.array([(batch, vocab, F32, 3, joint, 0)], "i4,i4,i4,i4,i4,i4")
            if not joint:
                kernels.run(
                    "sample_scan", dict(enumerate([*inputs, launch, part])), groups=(2, batch), group=(64,),
                    outputs=(2,), seed=seed,
                )  # fmt: skip
                self._check_scores(parts)
                out = self._outputs()
                kernels.run(
                    "sample_pick", dict(zip((2, 3, 4, 5, 7), [parts, *out, count], strict=True)), groups=(batch,),
                    group=(32,), outputs=(3, 4, 5), seed=seed,
                )  # fmt: skip
                self._check(*out, filtered=False, joint=joint)
            out = self._outputs()
            kernels.run(
                "sample_filter", dict(enumerate([*inputs, *out, launch, count])), groups=(batch,), group=(96,),
                outputs=(3, 4, 5), seed=seed,
            )  # fmt: skip
            self._check(*out, filtered=True, joint=joint)

    def _outputs(self) -> list[npt.NDArray]:
        batch = len(self.rows)
        return [np.zeros(batch, np.int32), np.zeros(batch, np.uint8), np.zeros(batch, np.int32)]

    def _check_scores(self, parts: npt.NDArray) -> None:
        """Scores of the parts' winners: in units of log2, the noise less log2(ln 2)."""
        for b in (1, 3, 4, 5):
            noise = reference_sampling.gumbel(int(self.seeds[b]), int(self.draws[b]), self.logits.shape[1])
            score = (self.logits[b] / self.rows[b][0] + noise) / np.log(2) + np.log2(np.log(2))
            want = [score[:752].max(), score[752:].max()]
            np.testing.assert_allclose(parts[b, :, 2].copy().view(np.float32), want, rtol=1e-5)

    def _check(self, ids, valid, rounds, *, filtered: bool, joint: bool) -> None:
        for b, row in enumerate(self.rows):
            if not filtered and row[1:] != (0, 1.0, 0.0):
                continue
            want = reference_sampling.sample_row(
                self.logits[b], *row, seed=int(self.seeds[b]), draw=int(self.draws[b]), joint=joint
            )
            assert valid[b] == want.valid, f"row {b}"
            assert 0 <= ids[b] < self.logits.shape[1]
            assert ids[b] == want.id or not want.valid, f"row {b}: {ids[b]}, {want}"
            assert rounds[b] in (0, 1)


def run_sample(source: str, seed: int = 1) -> None:
    SampleProblem().run(source, seed)


def run_sample_chain(source: str, seed: int = 1) -> None:
    rng = np.random.default_rng(8)
    batch, n, vocab, draw = 6, 35, 300, 2**32 - 2
    draft = rng.dirichlet(np.ones(vocab), (batch, n)).astype(np.float32)
    target = rng.dirichlet(np.ones(vocab), (batch, n + 1)).astype(np.float32)
    ids = rng.integers(0, vocab, (batch, n)).astype(np.int32)
    target[0, :n], target[5, :n] = draft[0], draft[5]  # all are accepted
    target[1, :33], target[2, :n] = draft[1, :33], 0.5 * target[2, :n] + 0.5 * draft[2]
    ids[1, 33] = vocab  # in the second run of 32 positions
    target[3, 0], draft[3, 0] = 0.0, 0.0
    ids[4, 1], target[4, 0], draft[4, 1] = -1, draft[4, 0], target[4, 1]
    seeds = rng.integers(0, 2**64, batch, np.uint64)
    rows = np.array(
        [(int(s) & 0xFFFFFFFF, int(s) >> 32, draw & 0xFFFFFFFF, draw >> 32) for s in seeds], "u4,u4,u4,u4"
    )
    launch, part, count = np.array([(batch, n, vocab)], "i4,i4,i4"), np.array([152], np.int32), np.array([2])
    parts, count = np.zeros((batch, 2, 5), np.int32), count.astype(np.int32)
    kernels = library(source)
    inputs = [ids, draft, target, rows]
    kernels.run(
        "chain_scan", dict(enumerate([*inputs, parts, launch, part])), groups=(2, batch), group=(64,),
        outputs=(4,), seed=seed,
    )  # fmt: skip
    out, accepted = np.zeros((batch, n + 1), np.int32), np.zeros(batch, np.int32)
    kernels.run(
        "chain_pick", dict(enumerate([*inputs, parts, out, accepted, launch, count])), groups=(batch,),
        group=(32,), outputs=(5, 6), seed=seed,
    )  # fmt: skip
    for b in range(batch):
        if b == 3:  # no mass at all: any id
            assert accepted[b] == 0
            assert 0 <= out[b, 0] < vocab
            continue
        want = reference_sampling.chain(ids[b], draft[b], target[b], int(seeds[b]), draw)
        assert out[b].tolist() == want + [-1] * (n + 1 - len(want)), f"row {b}"
        assert accepted[b] == len(want) - 1


def run_sample_edit(source: str, seed: int = 1) -> None:
    rng = np.random.default_rng(9)
    vocab, slots = 1100, 3
    logits = rng.standard_normal((4, vocab)).astype(np.float32)
    masks = rng.integers(0, 2**32, (2, 34), np.uint32)  # tokens from 1088 on are forbidden
    counts = np.full((slots, vocab), 7, np.uint32)
    prompt, output = rng.integers(0, vocab, 300), rng.integers(0, 40, 500)
    kernels = library(source, "edit_logits<float>")

    def count(ids, slot: int, reset: bool) -> None:
        n = len(ids) + 2
        ids = np.array([*ids, vocab, -1], np.int32)
        rows = np.full(n, slot, np.int32)
        launch = np.array([(n, slots, vocab, reset)], "i4,i4,i4,i4")
        if reset:
            kernels.run(
                "clear_counts", {0: rows, 1: counts, 2: launch}, threads=(vocab,), group=(128,), inout=(1,),
                seed=seed,
            )  # fmt: skip
        kernels.run(
            "count_tokens", {0: rows, 1: ids, 2: counts, 3: launch}, threads=(n,), group=(64,), inout=(2,),
            seed=seed,
        )  # fmt: skip

    count(prompt, 1, True)
    count(output, 1, False)
    count(output, slots, True)  # no such row
    assert (np.delete(counts, 1, axis=0) == 7).all()
    bias = {5: 1.5, 1023: -2.0, 1024: -np.inf, 1099: 3.0}
    rows = np.array(
        [
            (1.0, 0.0, 0.0, -1, -1, 0, 0, 0),
            (1.3, 0.4, 0.7, 1, -1, 0, 4, 0),
            (1.0, 0.0, 0.0, -1, 1, 1, 2, 0),
            (1.0, 0.0, 1.0, slots, 2, 4, 2**31 - 1, 0),  # points at nothing
        ],
        "f4,f4,f4,i4,i4,i4,i4,i4",
    )
    out = np.zeros_like(logits)
    launch = np.array([(4, vocab, F32, 34, 4, slots, 2)], "i4,i4,i4,i4,i4,i4,i4")
    ids, values = np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)
    kernels.run(
        "edit_logits", dict(enumerate([logits, rows, ids, values, counts, masks, out, launch])),
        groups=(2, 4), group=(256,), outputs=(6,), seed=seed,
    )  # fmt: skip
    edit = reference_sampling.edit_logits
    want = [
        logits[0],
        edit(logits[1], bias=bias, prompt=prompt, output=output, repetition=1.3, presence=0.4, frequency=0.7),
        edit(logits[2], mask=masks[1], bias={1023: -2.0}),
        logits[3],
    ]
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


def run_sample_logprobs(source: str, seed: int = 1) -> None:
    rng = np.random.default_rng(10)
    vocab = 1300
    logits = np.round(rng.standard_normal((4, vocab)) * 8).astype(np.float32) / 8
    logits[1] = 0.25  # more ties than the list holds
    logits[2, 5:] = -np.inf
    logits[3, 3:] = np.nan
    ids = np.array([17, 1299, vocab, 1], np.int32)
    for num_top in (0, 6, 64):
        out = [np.zeros(4, np.float32), np.zeros(4, np.int32)]
        out += [np.zeros((4, max(num_top, 1)), np.int32), np.zeros((4, max(num_top, 1)), np.float32)]
        launch = np.array([(4, vocab, num_top, F32)], "i4,i4,i4,i4")
        written = {"outputs": (2, 3, 4, 5)} if num_top else {"outputs": (2, 3), "inout": (4, 5)}
        library(source, "token_logprobs<float>").run(
            "token_logprobs", dict(enumerate([logits, ids, *out, launch])), groups=(4,), group=(96,), seed=seed,
            **written,
        )  # fmt: skip
        for b in range(4):
            x = logits[b][~np.isnan(logits[b])].astype(np.float64)
            want = reference_sampling.log_softmax(x)
            drawn = x[ids[b]] if ids[b] < vocab else -np.inf
            np.testing.assert_allclose(out[0][b], want[ids[b]] if ids[b] < vocab else -np.inf, atol=2e-5)
            assert out[1][b] == np.count_nonzero(x >= drawn)
            order = np.lexsort((np.arange(x.size), -x))[:num_top]
            assert out[2][b, : order.size].tolist() == order.tolist()
            np.testing.assert_allclose(out[3][b, : order.size], want[order], atol=2e-5)
            assert not out[2][b, order.size : num_top].any()
            assert np.isneginf(out[3][b, order.size : num_top]).all()


def run_sample_renorm(source: str, seed: int = 1) -> None:
    rng = np.random.default_rng(11)
    vocab = 1300
    x = np.exp(np.round(rng.standard_normal((5, vocab)) * 4).astype(np.float32) / 4)
    x[0] /= x[0].sum()
    x[1, ::3], x[1, 7], x[1, 8] = 0.0, np.nan, -1.0
    x[2] = 0.5
    x[3] = 0.0
    x[4] = np.where(np.arange(vocab) < 96, rng.random(vocab), 0.0)  # a token for each thread
    top_k, top_p, min_p = [5, 700, 1299, 3, 50], [0.3, 0.9, 0.5, 0.5, 1.0], [0.1, 0.0, 1.0, 0.5, 0.3]
    renorms = [
        reference_sampling.top_k_renorm,
        reference_sampling.top_p_renorm,
        reference_sampling.min_p_renorm,
    ]
    logits = np.where(np.isnan(x), -np.inf, x - 1.0).astype(np.float32)
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    for kind, values in enumerate([top_k, top_p, min_p, top_k]):
        given = logits if kind == 3 else x
        out = np.zeros_like(given)
        launch = np.array([(5, vocab, F32, kind)], "i4,i4,i4,i4")
        limits = np.array(values, np.float32 if kind in (1, 2) else np.int32)
        library(source, "renorm<float>").run(
            "renorm", {0: given, 1: limits, 2: out, 3: launch}, groups=(5,), group=(96,), outputs=(2,),
            seed=seed,
        )  # fmt: skip
        for b, value in enumerate(values):
            want = (*renorms, reference_sampling.top_k_mask)[kind](given[b], value)
            np.testing.assert_allclose(out[b], want, rtol=2e-6, err_msg=f"kind {kind} row {b}")


CASES = {
    "add_rms_norm": run_add_rms_norm,
    "rope_append": run_rope_append,
    "merge_states": run_merge_states,
    "paged_attention": run_paged_attention,
    "paged_attention_matrix": run_paged_attention_matrix,
    "sample": run_sample,
    "sample_chain": run_sample_chain,
    "sample_edit": run_sample_edit,
    "sample_logprobs": run_sample_logprobs,
    "sample_renorm": run_sample_renorm,
}

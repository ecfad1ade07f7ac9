"""The CUDA sampling kernels alone, cold L2, CUDA events: python benchmarks/cuda_sampling_raw.py LIBRARY OUT.jsonl.

LIBRARY is cuda/raw/sample_api.cu linked with cuda/{sample*,launch}.cu. Needs PyTorch for memory and events.
Ids are compared with the float64 reference before anything is timed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import pathlib
import sys

import numpy as np
import torch

ROOT = pathlib.Path(__file__).parent.parent
# Loaded by path: this machine need not have MLX.
spec = importlib.util.spec_from_file_location(
    "reference_sampling", ROOT / "python/mlxcel_ext/ops/reference_sampling.py"
)
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)

SAMPLE_ROW = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_k", "<i4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("seed", "<u8"),
        ("draw", "<u8"),
    ]
)
GREEDY, TEMPERATURE, TOP_K, FILTERS = range(4)
CASES = {
    "greedy": (GREEDY, {"temperature": 0.0}),
    "temperature": (TEMPERATURE, {}),
    "top_p": (FILTERS, {"top_p": 0.9}),
    "min_p": (FILTERS, {"min_p": 0.1}),
    "top_k": (TOP_K, {"top_k": 50}),
    "top_k_top_p": (TOP_K, {"top_k": 50, "top_p": 0.9}),
    # All rows greedy but the first: what the launch of a mixed batch costs them.
    "one_of_top_k_top_p": (TOP_K, {"top_k": 50, "top_p": 0.9}),
}
VOCABS = (32000, 128256, 151936)
#: kind (csrc/params/sample_renorm.h) and value
RENORMS = {"top_k_renorm": (0, 50), "top_p_renorm": (1, 0.9), "top_k_mask": (3, 50)}


class Sample:
    """One launch of mlxcel_raw_sample on its own buffers."""

    def __init__(
        self,
        library: ctypes.CDLL,
        logits: torch.Tensor,
        work: int,
        params: dict[str, float],
        *,
        one: bool = False,
    ) -> None:
        batch, vocab = logits.shape
        rows = np.zeros(batch, SAMPLE_ROW)
        for name, default in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            rows[name] = params.get(name, default)
        rows["seed"] = np.arange(batch) + 12345678901234567
        if one:
            rows["temperature"][1:] = 0.0
        self.host_rows = rows
        self.library, self.logits = library, logits
        self.params = (ctypes.c_int32 * 6)(batch, vocab, 0, work, 0, 0)
        self.rows = torch.from_numpy(rows.view(np.uint8).reshape(batch, -1).copy()).cuda()
        self.ids = torch.full((batch,), -1, dtype=torch.int32, device="cuda")
        self.valid = torch.zeros(batch, dtype=torch.bool, device="cuda")
        self.rounds = torch.zeros(batch, dtype=torch.int32, device="cuda")

    def __call__(self) -> None:
        pointers = [
            ctypes.c_void_p(t.data_ptr()) for t in (self.logits, self.rows, self.ids, self.valid, self.rounds)
        ]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if self.library.mlxcel_raw_sample(self.params, *pointers, 0, stream) != 0:
            raise RuntimeError(self.library.mlxcel_raw_error().decode())

    def check(self) -> None:
        self()
        for logits, row, token in zip(
            self.logits.cpu().numpy(), self.host_rows, self.ids.cpu().numpy(), strict=True
        ):
            want = reference.sample_row(logits, *(v.item() for v in row))
            assert token == want.id or want.margin < 1e-5, f"{row}: {token}, {want}"


class Renorm:
    """One launch of mlxcel_raw_renorm."""

    def __init__(self, library: ctypes.CDLL, logits: torch.Tensor, name: str) -> None:
        kind, value = RENORMS[name]
        batch, vocab = logits.shape
        self.library, self.name = library, name
        self.x = logits if kind == 3 else torch.softmax(logits, -1)
        dtype = torch.float32 if kind == 1 else torch.int32
        self.values = torch.full((batch,), value, dtype=dtype, device="cuda")
        self.out = torch.full_like(logits, float("nan"))
        self.params = (ctypes.c_int32 * 4)(batch, vocab, 0, kind)

    def __call__(self) -> None:
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (self.x, self.values, self.out)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if self.library.mlxcel_raw_renorm(self.params, *pointers, stream) != 0:
            raise RuntimeError(self.library.mlxcel_raw_error().decode())

    def check(self) -> None:
        self()
        value = self.values[0].item()
        for x, got in zip(self.x.cpu().numpy(), self.out.cpu().numpy(), strict=True):
            want = getattr(reference, self.name)(x, value)
            out = -np.inf if self.name == "top_k_mask" else 0.0
            assert np.count_nonzero((got > out) != (want > out)) <= (self.name == "top_p_renorm")
            kept = (want > out) & (got > out)
            np.testing.assert_allclose(got[kept], want[kept], rtol=1e-4)


class Logprobs:
    """One launch of mlxcel_raw_logprobs with 5 top tokens."""

    TOP = 5

    def __init__(self, library: ctypes.CDLL, logits: torch.Tensor) -> None:
        batch, vocab = logits.shape
        self.library, self.logits = library, logits
        self.ids = torch.zeros(batch, dtype=torch.int32, device="cuda")
        shapes = ((batch,), torch.float32), ((batch,), torch.int32), ((batch, self.TOP), torch.int32)
        self.outs = [
            torch.empty(shape, dtype=dtype, device="cuda")
            for shape, dtype in (*shapes, ((batch, self.TOP), torch.float32))
        ]
        self.params = (ctypes.c_int32 * 4)(batch, vocab, self.TOP, 0)

    def __call__(self) -> None:
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (self.logits, self.ids, *self.outs)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if self.library.mlxcel_raw_logprobs(self.params, *pointers, stream) != 0:
            raise RuntimeError(self.library.mlxcel_raw_error().decode())

    def check(self) -> None:
        self()
        want, ids = torch.log_softmax(self.logits.double(), -1).topk(self.TOP)
        assert torch.equal(self.outs[2].long(), ids)
        assert torch.allclose(self.outs[3].double(), want, atol=1e-4)


class Chain:
    """One launch of mlxcel_raw_chain: drafts drawn from a distribution other than the target."""

    def __init__(
        self, library: ctypes.CDLL, batch: int, n: int, vocab: int, generator: torch.Generator
    ) -> None:
        def distribution(count: int) -> torch.Tensor:
            shape = (batch, count, vocab)
            return torch.softmax(torch.randn(shape, device="cuda", generator=generator), -1)

        self.library = library
        self.draft, self.target = distribution(n), distribution(n + 1)
        drawn = torch.multinomial(self.draft.view(-1, vocab), 1, generator=generator)
        self.drafted = drawn.view(batch, n).to(torch.int32)
        self.host_rows = np.zeros((batch, 2), np.uint64)
        self.host_rows[:, 0] = np.arange(batch) + 12345678901234567
        self.rows = torch.from_numpy(self.host_rows.view(np.uint8)).cuda()
        self.ids = torch.full((batch, n + 1), -2, dtype=torch.int32, device="cuda")
        self.accepted = torch.full((batch,), -1, dtype=torch.int32, device="cuda")
        self.params = (ctypes.c_int32 * 3)(batch, n, vocab)

    def __call__(self) -> None:
        arrays = (self.drafted, self.draft, self.target, self.rows, self.ids, self.accepted)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in arrays]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if self.library.mlxcel_raw_chain(self.params, *pointers, 0, stream) != 0:
            raise RuntimeError(self.library.mlxcel_raw_error().decode())

    def check(self) -> None:
        self()
        arrays = [t.cpu().numpy() for t in (self.drafted, self.draft, self.target, self.ids)]
        for (seed, draw), ids, draft, target, got in zip(self.host_rows, *arrays, strict=True):
            want = reference.chain(ids, draft, target, int(seed), int(draw))
            assert got.tolist() == want + [-1] * (len(got) - len(want))


Op = Sample | Renorm | Logprobs | Chain


def cold(op: Op, evict: torch.Tensor, iterations: int = 15) -> dict[str, float]:
    """Microseconds: median, p10, p90. A spin kernel hides the enqueueing."""
    spans = []
    for i in range(iterations + 3):
        evict.fill_(i % 256)
        torch.cuda._sleep(120_000)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        op()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    times = [1e3 * begin.elapsed_time(end) for begin, end in spans[3:]]
    return {name: float(np.percentile(times, q)) for name, q in (("us", 50), ("p10", 10), ("p90", 90))}


def main(library_path: str, out: str) -> None:
    library = ctypes.CDLL(library_path)
    library.mlxcel_raw_error.restype = ctypes.c_char_p
    evict = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)

    with open(out, "w") as file:

        def measure(op: Op, **row: float | str) -> None:
            if row["batch"] <= 8:
                op.check()
            row |= cold(op, evict)
            file.write(json.dumps(row) + "\n")
            print(row)

        for sigma in (1.0, 5.0):
            for vocab in VOCABS:
                for batch in (1, 8, 64, 256):
                    logits = torch.randn(batch, vocab, device="cuda", generator=generator) * sigma
                    for name, (work, params) in CASES.items():
                        op = Sample(library, logits, work, params, one=name.startswith("one_of"))
                        measure(op, sigma=sigma, vocab=vocab, batch=batch, case=name)
                    for name in RENORMS:
                        op = Renorm(library, logits, name)
                        measure(op, sigma=sigma, vocab=vocab, batch=batch, case=name)
                    measure(Logprobs(library, logits), sigma=sigma, vocab=vocab, batch=batch, case="logprobs")
        for vocab in VOCABS:
            for batch in (1, 8, 64):
                for n in (3, 5, 7):
                    op = Chain(library, batch, n, vocab, generator)
                    measure(op, vocab=vocab, batch=batch, case="chain", n=n)


if __name__ == "__main__":
    main(*sys.argv[1:3])

"""Rows of a packed embedding against MLX's gather and dequantize of the row-major one.

PYTHONPATH=python:. python -m pytest benchmarks/bench_packed_rows.py -s
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from benchmarks.harness import check_equal, interleaved

from mlxcel_ext import PackedWeight

VOCAB, HIDDEN, GROUP = 49152, 576, 32  # SmolLM2-135M


@pytest.mark.parametrize("tokens", [1, 32, 512])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows(benchmark, bits, tokens):
    dense = mx.random.normal((VOCAB, HIDDEN))
    triple = mx.quantize(dense, GROUP, bits, stream=mx.cpu)
    packed = PackedWeight(*triple, GROUP, bits)
    ids = mx.array(np.random.default_rng(0).integers(0, VOCAB, tokens), mx.int32)
    mx.eval(packed.arrays, ids)

    def ours() -> mx.array:
        return packed.rows(ids, mx.float32)

    def gathered() -> mx.array:
        rows = [mx.take(a, ids, axis=0, stream=mx.cpu) for a in triple]
        return mx.dequantize(*rows, GROUP, bits, stream=mx.cpu)

    check_equal(ours(), np.asarray(gathered()), 1e-6)
    times = interleaved({"ours": ours, "ours again": ours, "mlx": gathered}, rounds=21)
    ratio = times["mlx"].median / times["ours"].median
    print(f"\nrows q{bits} {tokens} tokens: ours {times['ours']}, again {times['ours again']}")
    print(f"  mlx {times['mlx']}, mlx / ours {ratio:.1f}")
    benchmark.extra_info["mlx_over_ours"] = ratio
    benchmark.pedantic(lambda: mx.eval(ours()), rounds=10, warmup_rounds=2)

"""Small launches of the CUDA attention, merge, rope and norm kernels, each checked against float64: for compute-sanitizer.

    PYTHONPATH=python:. compute-sanitizer --tool memcheck --kernel-name kernel_substring=mlxcel \\
        python benchmarks/cuda_sanitize.py build/cuda/libmlxcel_cuda_raw.so [part parts]

Needs what bench_cuda_kernels.py needs. racecheck takes half a minute for a half (`0 2`, `1 2`).
"""

from __future__ import annotations

import functools
import sys

import torch
from benchmarks import bench_cuda_kernels as bench

from mlxcel_ext import plan_attention, plan_cascade
from mlxcel_ext.ops import CascadeCosts

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
#: head_dim, dtype, query and KV heads, page size, kv_len, qo_len, tokens that all requests share
Case = tuple[int, torch.dtype, tuple[int, int], int, list[int], list[int] | None, int]


def cases() -> list[Case]:
    found: list[Case] = []
    for dim in (64, 80, 96, 112, 128, 192, 256):
        found.append((dim, BF16, (8, 2), 16, [70, 5, 300], None, 0))
        found.append((dim, F16, (8, 2), 8, [200, 37], [90, 1], 0))
    for page in (1, 2, 4, 8, 32, 64, 256):
        found.append((128, BF16, (8, 2), page, [333, 1, 64], None, 0))
        found.append((64, BF16, (8, 2), page, [333, 64], [70, 3], 0))
    for heads in ((1, 1), (5, 1), (7, 1), (14, 2), (16, 1), (32, 1)):
        found.append((128, BF16, heads, 16, [700, 64], None, 0))
        found.append((128, BF16, heads, 16, [700, 64], [4, 2], 0))
    found.append((128, F32, (8, 2), 16, [300, 5], None, 0))
    found.append((64, F32, (8, 2), 4, [100, 50], [20, 3], 0))
    found.append((128, BF16, (8, 2), 16, [1600] * 3, None, 1280))
    found.append((64, BF16, (8, 2), 16, [1600] * 20, None, 1280))
    found.append((128, BF16, (8, 2), 16, [4000], None, 0))
    # Large tiles and decode tiles in one launch.
    found.append((128, BF16, (8, 2), 16, [3000, 70, 1], [256, 1, 1], 0))
    found.append((64, F16, (8, 2), 8, [1500, 1, 300], [200, 1, 1], 0))
    # Several large tiles a block.
    found.append((128, BF16, (32, 8), 16, [2048, 700], [2048, 1], 0))
    return found


def cast(launch: bench.Attention, dtype: torch.dtype) -> None:
    for name in ("q", "k", "v", "out"):
        tensor = getattr(launch, name).to(dtype)
        setattr(launch, name, tensor)
        setattr(launch.arrays, name, tensor.data_ptr())
    launch.params.dtype = bench.DTYPES[dtype]


def main() -> None:
    kernels = bench.Kernels(sys.argv[1])
    part, parts = map(int, sys.argv[2:4] or ("0", "1"))
    always = CascadeCosts(reread=1.0, row=0.0, tile=0.0, merge=0.0, launch=0.0)
    done = 0
    for dim, dtype, heads, page, kv_len, qo_len, shared in cases()[part::parts]:
        bench.DIM = dim
        plan = functools.partial(plan_cascade, costs=always) if shared else plan_attention
        launch = bench.Attention(kernels, heads, kv_len, page, qo_len, shared, plan)
        cast(launch, dtype)
        for invariant in (0,) if shared else (0, 1):
            launch.params.batch_invariant = invariant
            error = launch.error()
            if not error < TOLERANCE[dtype]:
                raise AssertionError(
                    f"{(dim, dtype, heads, page, kv_len, qo_len, shared, invariant)}: {error}"
                )
            done += 1
    if part == 0:
        bench.DIM = 128
        kernels.time = lambda run, iterations=0: {"us": 1.0}  # the sections check what they launch
        for section in (bench.merge_states, bench.add_rms_norm, bench.rope_append):
            done += sum(1 for _ in section(kernels))
    print(f"{done} launches, all right")


if __name__ == "__main__":
    main()

"""What the mlx-metal wheel for macOS can tell on Linux. MLX_METAL_WHEEL names the folder where it was unpacked.

Apple's compiler built the wheel's kernels: run beside ours from the same headers, they calibrate the front-end. And
its metal-cpp and MLX headers are those of a macOS build: the host code in metal/ must compile against them.
"""

from __future__ import annotations

import os
import pathlib
import subprocess

import numpy as np
import pytest

from tests.metal_host.air import AppleKernel, Metallib
from tests.metal_host.build import CLANG, HERE
from tests.metal_host.dispatch import RACES, Library, from_bf16, to_bf16

WHEEL = pathlib.Path(os.environ["MLX_METAL_WHEEL"]) / "mlx"
ROOT = HERE.parents[1]
HOST_FILES = sorted(p.name for p in (ROOT / "metal").glob("*.cpp"))


@pytest.mark.parametrize("file", HOST_FILES)
def test_host_code_compiles_against_metal_cpp(file):
    command = [CLANG, "-std=c++20", "-fsyntax-only", "-Wall", "-fblocks", "-D_METAL_", "-Dweak_import=weak"]
    command += ["-D__MAC_26_0=260000", "-D__MAC_15_0=150000"]
    for folder in (HERE / "apple_headers", WHEEL / "include" / "metal_cpp", WHEEL / "include"):
        command += ["-isystem", str(folder)]
    command += [f"-I{ROOT}/csrc", f"-I{ROOT}/metal", str(ROOT / "metal" / file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def metallib() -> Metallib:
    return Metallib(WHEEL / "lib" / "mlx.metallib")


TYPES = {
    "float": ("float32", np.float32, lambda x: x),
    "float16_t": ("float16", np.float16, lambda x: x.astype(np.float32)),
    "bfloat16_t": ("bfloat16", to_bf16, from_bf16),
}
PRELUDE = """
#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/HEADER"
INSTANCES
"""


def ours(header: str, instances: dict[str, str]) -> Library:
    lines = "\n".join(
        f'template [[host_name("{n}")]] [[kernel]] decltype({e}) {e};' for n, e in instances.items()
    )
    source = PRELUDE.replace("HEADER", header).replace("INSTANCES", lines)
    return Library(source, include=(str(WHEEL / "include"),), lint=False)


@pytest.fixture(scope="module")
def softmax() -> Library:
    return ours(
        "softmax.h", {f"block_softmax_{n}": f"softmax_single_row<{t}>" for t, (n, *_) in TYPES.items()}
    )


@pytest.fixture(scope="module")
def sdpa() -> Library:
    return ours("sdpa_vector.h", {f"sdpa_vector_{t}_64_64": f"sdpa_vector<{t}, 64, 64>" for t in TYPES})


def assert_identical(metallib, library, name, buffers, output, **grid) -> None:
    apple = AppleKernel(metallib, name, library)
    mine = [(i, p.name) for i, p in library.kernels[name].parameters]
    assert [(a.index, a.name) for a in apple.arguments if a.kind == "buffer"] == mine
    results = []
    for kernel in (library, apple):
        bound = dict(buffers)
        # Apple's code has no instrumentation, and binds what the function constants switch off as well.
        bound |= {i: np.zeros(64, np.uint8) for i, _ in mine if i not in bound and kernel is apple}
        bound[output] = np.zeros_like(buffers[output])
        kernel.dispatch(name, bound, outputs=(output,), options=RACES, **grid)
        results.append(bound[output])
    np.testing.assert_array_equal(*results)
    assert np.abs(results[0].astype(np.float64)).max() > 0


@pytest.mark.parametrize("kind", TYPES)
def test_softmax_is_bit_identical_to_apples_compiler(metallib, softmax, kind):
    name, convert, _ = TYPES[kind]
    x = convert(np.random.default_rng(5).standard_normal((3, 1000)).astype(np.float32))
    buffers = {0: x, 1: np.zeros_like(x), 2: np.array([1000], np.int32)}
    assert_identical(metallib, softmax, f"block_softmax_{name}", buffers, 1, groups=(3,), group=(256,))


@pytest.mark.parametrize("kind", TYPES)
def test_attention_is_bit_identical_to_apples_compiler(metallib, sdpa, kind):
    _, convert, _ = TYPES[kind]
    rng = np.random.default_rng(6)
    n, d, heads, kv_heads = 300, 64, 4, 2
    q, k, v = (
        convert(rng.standard_normal(s).astype(np.float32)) for s in ((heads, 2, d), *[(kv_heads, n, d)] * 2)
    )
    numbers = [np.int32(2), np.int32(n), *map(np.uint64, (n * d, d, n * d, d)), np.float32(0.125)]
    buffers = dict(enumerate([q, k, v, np.zeros_like(q), *(np.atleast_1d(x) for x in numbers)]))
    constants = dict.fromkeys(sdpa.transform.function_constants, False) | {"do_causal": True}
    grid = {"groups": (heads, 2), "group": (1024,), "constants": constants}
    assert_identical(metallib, sdpa, f"sdpa_vector_{kind}_64_64", buffers, 3, **grid)

"""Fixtures shared by all tests."""

from __future__ import annotations

import logging
import os
import pathlib
import zlib
from collections.abc import Iterator

# Before MLX is used: f32 products in full precision on a GPU too, so that tolerances are those of f32.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx
import numpy as np
import pytest

from tests.support.device import default_device

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


#: scripts/test_metal_emulated.sh sets it, with a build of _ext whose Metal device is emulated on the CPU stream.
METAL_EMULATED = os.environ.get("MLXCEL_TEST_DEVICE") == "metal-emulated"


#: Draws of a test of a distribution: emulated threads are some thousand times slower.
MANY = 2_000 if METAL_EMULATED else 1_000_000


def examples(count: int) -> int:
    """Examples of a property that launches kernels: a quarter of them where threads are emulated."""
    return count // 4 if METAL_EMULATED else count


def devices() -> list[str]:
    """Devices that the op tests run on: the CPU, and the GPU where MLX has one. Or emulated Metal alone."""
    if METAL_EMULATED:
        return ["metal-emulated"]
    return ["cpu", "gpu"] if mx.cuda.is_available() or mx.metal.is_available() else ["cpu"]


@pytest.fixture(params=devices())
def stream(request: pytest.FixtureRequest) -> mx.Device:
    """Each device in turn. A GPU whose kernels were not built fails the test: nothing is skipped."""
    return mx.gpu if request.param == "gpu" else mx.cpu


@pytest.fixture(autouse=METAL_EMULATED)
def no_late_errors():
    """A task's error is raised by the stream's next wait: let that come within the test that caused it."""
    yield
    if METAL_EMULATED:
        mx.synchronize(mx.default_stream(mx.cpu))


@pytest.fixture
def on_each_device(stream: mx.Device) -> Iterator[None]:
    """For what takes no stream: each device in turn as default device."""
    with default_device(stream):
        yield


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """For what a GPU does otherwise: the CPU as default device."""
    with default_device(mx.cpu):
        yield


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> mx.Dtype:
    return DTYPES[request.param]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator whose seed is the test's id."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def smollm2_path() -> pathlib.Path:
    """SmolLM2-135M-Instruct in Q4_1, fetched into the user's cache by the first test that wants it."""
    from mlxcel_ext.models import hub

    return hub.resolve("smollm2", progress=False)


@pytest.fixture(autouse=True)
def logs_end_with_the_test() -> Iterator[None]:
    """A server in a test sends its logs to that test's stderr, which is closed behind it."""
    loggers = [logging.getLogger(name) for name in ("mlxcel_ext", "uvicorn.error")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)

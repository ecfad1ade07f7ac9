"""Threads and instruction sets of the CPU kernels."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import textwrap

import mlx.core as mx
import pytest

import mlxcel_ext
from mlxcel_ext import add_rms_norm


@pytest.fixture
def threads():
    before = mlxcel_ext.num_threads()
    yield mlxcel_ext.set_num_threads
    mlxcel_ext.set_num_threads(before)


def norm_of_a_big_batch() -> mx.array:
    x = mx.random.normal((300, 1000), key=mx.random.key(0))
    return add_rms_norm(x, x, mx.ones(1000), 1e-5, stream=mx.cpu)[0]


def test_results_do_not_depend_on_the_number_of_threads(threads):
    threads(1)
    want = norm_of_a_big_batch()
    mx.eval(want)
    for n in (2, 3, 8, 64):
        threads(n)
        assert mlxcel_ext.num_threads() == n
        assert mx.array_equal(norm_of_a_big_batch(), want)


@pytest.mark.parametrize("n", [0, -1, 65])
def test_thread_count_out_of_range_is_a_value_error(n):
    with pytest.raises(ValueError, match=rf"\[set_num_threads\] n must be in 1..64, got {n}"):
        mlxcel_ext.set_num_threads(n)


def test_calls_from_several_python_threads(threads):
    """The pool serves one call at a time; the others work alone and none waits for ever."""
    threads(4)
    want = norm_of_a_big_batch()
    mx.eval(want)

    def work(_: int) -> bool:
        # MLX's streams belong to threads: each makes its own.
        stream = mx.new_stream(mx.cpu)
        x = mx.random.normal((300, 1000), key=mx.random.key(0), stream=stream)
        y, _ = add_rms_norm(x, x, mx.ones(1000, stream=stream), 1e-5, stream=stream)
        return bool(mx.array_equal(y, want, stream=stream).item())

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(32)))


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set_gives_the_same_answers(isa):
    """The op tests, with what this process may use lowered to `isa`."""
    code = """
        import pytest, sys, mlxcel_ext
        from mlxcel_ext import _ext
        assert not (_ext.cpu_features()["avx2"] and ISA == "baseline")
        files = [f"tests/ops/test_{name}.py" for name in ("add_rms_norm", "rope_append", "linear")]
        chosen = "(matches_reference or batches or packed_equals) and not bfloat16"
        sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *files, "-k", chosen]))
    """
    code = f"ISA = {isa!r}\n" + textwrap.dedent(code)
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MLXCEL_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 0, out.stdout + out.stderr
    assert " passed" in out.stdout or "[100%]" in out.stdout


def test_unknown_instruction_set_is_an_error():
    out = subprocess.run(
        [sys.executable, "-c", "from mlxcel_ext import _ext; print(_ext.cpu_features())"],
        env={**os.environ, "MLXCEL_CPU_ISA": "sse9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "MLXCEL_CPU_ISA must be baseline, avx2 or avx512, got 'sse9'" in out.stderr

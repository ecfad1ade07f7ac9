"""The binary module shares MLX's nanobind domain, and says so clearly where it cannot."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import textwrap

import mlx.core as mx
import pytest

import mlxcel_ext
from mlxcel_ext import _ext


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )


def test_built_for_the_running_mlx():
    major, minor, patch = (int(part) for part in mx.__version__.split("+")[0].split("."))
    assert major * 1_000_000 + minor * 1000 + patch == _ext.MLX_BUILD_VERSION


@pytest.mark.parametrize("device", [None, mx.cpu, mx.default_stream(mx.cpu)])
def test_arrays_and_streams_cross_the_boundary(device):
    x = mx.ones((2, 4))
    normed, _ = _ext.add_rms_norm(x, x, mx.ones(4), 1e-5, stream=device if device is not None else mx.cpu)
    assert isinstance(normed, mx.array)


@pytest.mark.parametrize("first", ["mlx.core", "mlxcel_ext"])
def test_import_order_does_not_matter(first):
    second = "mlxcel_ext" if first == "mlx.core" else "mlx.core"
    out = run(
        f"""
        import {first}
        import {second}
        import mlx.core as mx, mlxcel_ext
        print(mlxcel_ext.add_rms_norm(mx.ones((1, 4)), mx.zeros((1, 4)), mx.ones(4), 0.0, stream=mx.cpu)[0].tolist())
        """
    )
    assert out.stdout.strip() == "[[1.0, 1.0, 1.0, 1.0]]", out.stderr


def test_wrong_mlx_version_is_one_clear_import_error():
    out = run("import mlx.core as mx; mx.__version__ = '0.31.0'; import mlxcel_ext")
    assert "ImportError: mlxcel_ext" in out.stderr
    assert "pip install 'mlx==0.32.4'" in out.stderr


def test_missing_mlx_is_one_clear_import_error():
    out = run("import sys; sys.modules['mlx.core'] = None; import mlxcel_ext")
    assert "ImportError: mlxcel_ext needs MLX 0.32.4" in out.stderr


@pytest.mark.parametrize("damage", ["missing", "of another build"])
def test_a_binary_that_does_not_load_is_one_clear_import_error(damage, tmp_path):
    package = pathlib.Path(mlxcel_ext.__file__).parent
    shutil.copytree(package, tmp_path / "mlxcel_ext", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if damage != "missing":
        (tmp_path / "mlxcel_ext" / pathlib.Path(_ext.__file__).name).write_bytes(b"no library")
    out = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mlxcel_ext")
    assert "ImportError: mlxcel_ext 0.1.0 has no binary module that this Python" in out.stderr
    assert "pip install --force-reinstall" in out.stderr


def test_malformed_switch_is_an_error_at_start():
    out = run("import os; os.environ['MLXCEL_FUSED_ROPE_APPEND'] = 'maybe'; import mlxcel_ext")
    assert (
        "MLXCEL_FUSED_ROPE_APPEND must be one of 1, true, on, yes, 0, false, off, no; got 'maybe'"
        in out.stderr
    )


def test_backends_say_what_is_there_and_why_not():
    found = mlxcel_ext.backends()
    assert found["cpu"] is None
    assert set(found) == {"cpu", "cuda", "metal"}
    assert all(reason is None or reason for reason in found.values())


def test_missing_gpu_kernel_names_op_and_remedy():
    with pytest.raises(
        RuntimeError, match=r"\[some_op\] (cannot run on the GPU|has no cuda kernel).*stream=mx.cpu"
    ):
        _ext.throw_no_gpu_backend("some_op")

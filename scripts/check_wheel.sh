#!/usr/bin/env bash
# Install a wheel into a clean environment where no compiler can be found, and use it.
#   scripts/check_wheel.sh dist/mlxcel_ext-*.whl
set -euo pipefail
wheel=$(realpath "$1")
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
python3 -m venv "$out/venv"
"$out/venv/bin/pip" install -q "$wheel" 'mlx[cpu]==0.32.4'
cd "$out"
env -i HOME="$out" PATH="$out/venv/bin" "$out/venv/bin/python" - <<'PY'
import shutil

import mlx.core as mx

import mlxcel_ext

assert shutil.which("cc") is shutil.which("c++") is shutil.which("nvcc") is None
assert "site-packages" in mlxcel_ext.__file__
x = mx.ones((2, 64))
normed, total = mlxcel_ext.add_rms_norm(x, x, mx.ones(64), 1e-5, stream=mx.cpu)
assert mx.allclose(normed, mx.ones((2, 64)), atol=1e-4) and mx.array_equal(total, 2 * x)
print("the wheel works without a compiler:", mlxcel_ext.__version__, mlxcel_ext.backends())
PY

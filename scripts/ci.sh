#!/usr/bin/env bash
# The whole check on a machine without a GPU: installs what is missing, builds, lints, tests. Needs Python 3.11 and a
# C++ compiler; root where Debian packages are missing. Nothing is skipped silently.
set -euo pipefail
cd "$(dirname "$0")/.."

stage() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }

stage "environment"
nvcc --version 2>/dev/null | tail -n 1 || echo "nvcc is not on PATH: the CUDA library is NOT compiled in this run"
# The dashboard is tested in a real browser; clang compiles the Metal kernels for the emulation.
if ! { command -v chromium && command -v clang++-19 && command -v llvm-dis-19; } >/dev/null; then
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends chromium clang-19 llvm-19 >/dev/null
fi
venv=build/ci-venv
python3 -m venv "$venv"
bin=$PWD/$venv/bin
"$bin/pip" install -q --upgrade pip

stage "build a wheel, install it"
"$bin/pip" wheel -q --no-deps -w build/dist . -C cmake.define.MLXCEL_WERROR=ON -C cmake.define.MLXCEL_CUDA_ARCHS=90a
wheel=$(ls build/dist/mlxcel_ext-*.whl)
"$bin/pip" install -q "mlxcel-ext[cpu,dev] @ file://$PWD/$wheel" -r tests/requirements.txt
"$bin/python" -m mlxcel_ext info

stage "format, lint, types"
"$bin/ruff" format --check .
"$bin/ruff" check .
git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs "$bin/clang-format" --dry-run --Werror
"$bin/mypy"

stage "the wheel on a machine without a compiler"
scripts/check_wheel.sh "$wheel"

stage "the README's test command"
"$bin/python" -m pytest

stage "the dashboard in a browser"
"$bin/python" -m pytest -m browser tests/server

stage "fuzz the server from its OpenAPI document"
python3 -m venv build/fuzz-venv
build/fuzz-venv/bin/pip install -q schemathesis
PYTHON=$bin/python ST=$PWD/build/fuzz-venv/bin/st scripts/fuzz_openapi.sh 10

stage "Metal, emulated (never run on Apple hardware)"
"$bin/pip" install -q nanobind==3.1.0 cmake ninja
"$bin/pip" download -q --no-deps --only-binary=:all: --platform macosx_14_0_arm64 -d build/mlx-metal mlx-metal==0.32.4
"$bin/python" -m zipfile -e build/mlx-metal/*.whl build/mlx-metal/unpacked
PATH=$bin:$PATH PYTHON=$bin/python MLX_METAL_WHEEL=$PWD/build/mlx-metal/unpacked scripts/test_metal_emulated.sh

stage "done"

#!/usr/bin/env bash
# The whole check on a machine without a GPU: installs what is missing, builds, lints, tests. Needs Python 3.11 and a
# C++ compiler; root where Debian packages are missing. Nothing is skipped silently.
set -euo pipefail
cd "$(dirname "$0")/.."

stage() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }

stage "environment"
nvcc --version 2>/dev/null | tail -n 1 || echo "nvcc is not on PATH: the CUDA library is NOT compiled in this run"
# The dashboard is tested in a real browser.
command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; }
venv=build/ci-venv
python3 -m venv "$venv"
bin=$PWD/$venv/bin
"$bin/pip" install -q --upgrade pip

stage "build and install"
"$bin/pip" install -q '.[cpu,dev]' -r tests/requirements.txt -C cmake.define.MLXCEL_WERROR=ON
"$bin/python" -m mlxcel_ext info

stage "format, lint, types"
"$bin/ruff" format --check .
"$bin/ruff" check .
git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs "$bin/clang-format" --dry-run --Werror
"$bin/mypy"

stage "a wheel for a machine without a compiler"
PYTHON=$bin/python scripts/check_wheel.sh

stage "the README's test command"
"$bin/python" -m pytest

stage "fuzz the server from its OpenAPI document"
python3 -m venv build/fuzz-venv
build/fuzz-venv/bin/pip install -q schemathesis
PYTHON=$bin/python ST=$PWD/build/fuzz-venv/bin/st scripts/fuzz_openapi.sh 10

stage "done"

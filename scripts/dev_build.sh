#!/usr/bin/env bash
# Build the extension in place for development: PYTHONPATH=python then imports it.
#   scripts/dev_build.sh [extra cmake options, e.g. -DMLXCEL_CUDA=OFF -DMLXCEL_WERROR=ON]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
launcher=()
export CCACHE_SLOPPINESS=pch_defines,time_macros
command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE="$(command -v "$python")" "${launcher[@]}" \
  -DCMAKE_BUILD_RPATH="$("$python" -c 'import mlx.core as c, pathlib; print(pathlib.Path(c.__file__).parent / "lib")')" "$@" >build-dev.log \
  || { cat build-dev.log; exit 1; }
rm -f build-dev.log
cmake --build build/dev --parallel "${JOBS:-2}"
# cp --remove-destination: a process that has the old file mapped keeps it.
cp --remove-destination build/dev/_ext*.so python/mlxcel_ext/
if [ -e build/dev/cuda/libmlxcel_cuda.so ]; then
  cp --remove-destination build/dev/cuda/libmlxcel_cuda.so python/mlxcel_ext/
fi

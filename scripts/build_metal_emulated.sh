#!/usr/bin/env bash
# Build the extension with an emulated Metal device into build/metal-emulated/package/mlxcel_ext (tests only). Without
# optimisation, which is half of a Release build's time: the host code that it tests waits for emulated kernels.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
mlx_lib=$("$python" -c 'import mlx.core as c, pathlib; print(pathlib.Path(c.__file__).parent / "lib")')
out=build/metal-emulated
mkdir -p $out
cmake -S . -B $out -G Ninja -DPython_EXECUTABLE="$(command -v "$python")" -DMLXCEL_METAL_EMULATED=ON -DMLXCEL_CUDA=OFF \
  -DCMAKE_CXX_FLAGS_RELEASE="-O0 -D_GLIBCXX_ASSERTIONS" -DCMAKE_BUILD_RPATH="$mlx_lib" "${launcher[@]}" >$out/configure.log || { cat $out/configure.log; exit 1; }
cmake --build $out --parallel "${JOBS:-2}"
# The package's Python files, by links, beside the emulated module.
rm -rf $out/package
mkdir -p $out/package/mlxcel_ext
for file in python/mlxcel_ext/*; do
  case $file in *.so) ;; *) ln -s "$PWD/$file" $out/package/mlxcel_ext/ ;; esac
done
cp $out/_ext*.so $out/package/mlxcel_ext/

#!/usr/bin/env bash
# Compiles the CPU kernels for aarch64 and runs the linear ones, under emulation where this is another machine.
# Debian: apt-get install g++-aarch64-linux-gnu qemu-user
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=${CXX_AARCH64:-aarch64-linux-gnu-g++}
flags=(-std=c++20 -O2 -ffp-contract=off -Wall -Wextra -Werror -Icsrc)
for kernel in csrc/cpu/kernels/*.cpp; do
  case $kernel in *_avx2.cpp | *_avx512.cpp) continue ;; esac
  "$compiler" "${flags[@]}" -fsyntax-only "$kernel"
done
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$compiler" "${flags[@]}" -static tests/native/linear_check.cpp csrc/cpu/kernels/{linear,swiglu}.cpp csrc/common/{parallel,cpu_features}.cpp \
  -o "$out/linear_check"
if [ "$(uname -m)" = aarch64 ]; then "$out/linear_check"; else qemu-aarch64 "$out/linear_check"; fi

#!/usr/bin/env bash
# Compile every CUDA kernel for every GPU generation, warnings as errors. Needs nvcc 13 and no GPU; about half an hour of
# one core.
#   scripts/check_cuda_archs.sh [architecture ...]   (80 90a 100 120)
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- 80 90a 100 120
archs=$(IFS=';' && echo "$*")
cmake -S . -B build/archs -G Ninja -DMLXCEL_CUDA=ON "-DMLXCEL_CUDA_ARCHS=$archs" -DMLXCEL_WERROR=ON >/dev/null
cmake --build build/archs --target mlxcel_cuda_kernels --parallel "${JOBS:-2}"
echo "compiled for $archs"

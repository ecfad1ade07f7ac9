#!/usr/bin/env bash
# Build the Metal backend for emulated hardware and run everything that can be checked of it on Linux: the op tests on
# device "metal-emulated", the harness, seeded bugs, and against the mlx-metal wheel. Nothing here touches a Mac.
#
#   PYTHON=... [MLX_METAL_WHEEL=folder where the macOS wheel was unpacked] scripts/test_metal_emulated.sh
#
# METAL_HOST_ALL=1 seeds all bugs of the lists, not every third. Installs nothing. Needs clang-19 and llvm-19 (Debian has both), cmake, ninja, g++, and the test requirements.
# The wheel: pip download --no-deps --only-binary=:all: --platform macosx_14_0_arm64 mlx-metal==0.32.4, then unzip.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
for tool in clang++-19 llvm-dis-19 llvm-symbolizer-19; do
  command -v $tool >/dev/null || { echo "$tool is missing: apt-get install clang-19 llvm-19" >&2; exit 1; }
done
[[ -n ${MLX_METAL_WHEEL:-} ]] ||
  echo "MLX_METAL_WHEEL is not set: Apple's headers and kernels are NOT compared with in this run"

SECONDS=0
PYTHON=$python scripts/build_metal_emulated.sh >build-metal.log 2>&1 || { cat build-metal.log; exit 1; }
rm -f build-metal.log
printf '== emulated build: %s s\n' "$SECONDS"

export MLXCEL_TEST_DEVICE=metal-emulated
export PYTHONPATH=$PWD/build/metal-emulated/package:$PWD
# All op tests but those that have nothing to do with a device or run on the CPU alone.
ops=(tests/ops)
for name in attention_plan page_table shared_prefix arguments linear cuda_dispatch memory; do ops+=(--ignore "tests/ops/test_$name.py"); done
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# Two at a time: all of it is single-threaded, and both halves take about as long.
op_tests() {
  METAL_HOST_SEED=$1 "$python" -m pytest -p no:cacheprovider --durations=5 "${ops[@]}" -k "$2" || status=1
  printf '== op tests, schedule seed %s: %s s\n' "$1" "$SECONDS"
}
# The dearest test in one dtype and head_dim.
most="not (invariant_plan and (f16 or 80))"
some="strided or bitwise or long_and_skewed or nan or every_head_dim and bf16 or descending or other_orders"
some+=" or ties and 1000 or reference and 1000 or renorm and 1000 or mask and 1000 or cascade and random"
status=0
(
  "$python" -m pytest -p no:cacheprovider --durations=5 tests/metal_host || status=1
  printf '== harness, seeded bugs, Apple comparison: %s s\n' "$SECONDS"
  op_tests 3 "$some"
  exit $status
) >"$log" 2>&1 &
rest=$!
op_tests 1 "$most"
op_tests 2 "$some"
wait $rest || status=1
cat "$log"
printf '== all: %s s\n' "$SECONDS"
exit $status

"""These tests need clang-19 and llvm-19: scripts/test_metal_emulated.sh runs them, plain `pytest` does not."""

from __future__ import annotations

import os

from tests.conftest import METAL_EMULATED

collect_ignore_glob = []
if not METAL_EMULATED:
    collect_ignore_glob.append("test_*.py")
elif "MLX_METAL_WHEEL" not in os.environ:  # scripts/test_metal_emulated.sh says so
    collect_ignore_glob.append("test_apple.py")

"""These tests need clang-19 and llvm-19: scripts/test_metal_emulated.sh runs them, plain `pytest` does not."""

from __future__ import annotations

from tests.conftest import METAL_EMULATED

if not METAL_EMULATED:
    collect_ignore_glob = ["test_*.py"]

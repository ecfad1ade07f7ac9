"""`python -m mlxcel_ext` is the mlxcel-ext command."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

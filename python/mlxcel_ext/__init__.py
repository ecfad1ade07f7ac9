"""LLM serving kernels as compiled MLX primitives for CPU, CUDA and Metal."""

from __future__ import annotations

import platform as _platform

__version__ = "0.1.0"

_MLX_PIN = "0.32.4"

try:
    import mlx.core as _mx
except ImportError as error:
    raise ImportError(
        f"mlxcel_ext needs MLX {_MLX_PIN} with a backend: pip install 'mlx[cpu]=={_MLX_PIN}' "
        f"(or mlx[cuda13], or mlx on a Mac). The import of mlx.core failed: {error}"
    ) from error

_mlx_version = getattr(_mx, "__version__", "an unknown version")
if _mlx_version.split("+")[0] != _MLX_PIN:
    raise ImportError(
        f"mlxcel_ext {__version__} was built for MLX {_MLX_PIN}, but {_mlx_version} is installed. "
        f"libmlx promises no ABI between releases: pip install 'mlx=={_MLX_PIN}'"
    )

try:
    from ._ext import num_threads, set_num_threads
except ImportError as error:
    raise ImportError(
        f"mlxcel_ext {__version__} has no binary module that this Python {_platform.python_version()} can load: a "
        f"build serves one Python version. pip install --force-reinstall --no-cache-dir mlxcel-ext. "
        f"The import failed: {error}"
    ) from error

from . import _backends, env  # noqa: E402
from ._backends import backends  # noqa: E402
from .ops import *  # noqa: E402, F403
from .ops import __all__ as _ops  # noqa: E402

env.check_switches()
_backends.load()

__all__ = [
    "__version__",
    "backends",
    "num_threads",
    "set_num_threads",
    *_ops,
]

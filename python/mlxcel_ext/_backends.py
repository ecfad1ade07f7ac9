"""Which backends are there, and why not."""

from __future__ import annotations

import pathlib

import mlx.core as mx

from . import _ext

_REASONS: dict[str, str] = {}


def load() -> None:
    """Load the CUDA library where a CUDA device is there; called once at import."""
    library = pathlib.Path(__file__).parent / "libmlxcel_cuda.so"
    if _ext.gpu_backend_name() == "metal":  # linked in
        return
    if mx.metal.is_available():
        reason = "the Metal kernels are not part of this build"
        _REASONS["metal"] = reason
    elif not mx.cuda.is_available():
        reason = "MLX sees no CUDA device (pip install 'mlx[cuda13]==0.32.4' on a machine with an NVIDIA GPU)"
        _REASONS["cuda"] = reason
    elif not library.exists():
        reason = "this build has no CUDA library: no nvcc was found when it was built"
        _REASONS["cuda"] = reason
    else:
        try:
            _ext.load_gpu_backend(str(library))
            return
        except RuntimeError as error:
            reason = f"the CUDA library did not load: {error}"
            _REASONS["cuda"] = reason
    _ext.set_gpu_backend_missing(reason)


def backends() -> dict[str, str | None]:
    """Every backend by name: None where it is usable, else the reason why it is not."""
    name = _ext.gpu_backend_name()
    out: dict[str, str | None] = {"cpu": None}
    for gpu in ("cuda", "metal"):
        out[gpu] = None if name == gpu else _REASONS.get(gpu, "not this kind of machine")
    return out

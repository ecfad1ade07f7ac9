"""What `mlxcel-ext info` prints: versions, backends and why one is missing, CPU features."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import platform
from typing import Any

import mlx.core as mx

from . import __version__, backends, env, num_threads

_PACKAGES = ("mlx", "numpy", "tokenizers", "jinja2", "gguf", "starlette", "uvicorn", "msgspec", "llguidance")
_FEATURES = (
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "amx_tile",
    "asimd",
    "asimdhp",
    "bf16",
    "i8mm",
)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    """Model name and the SIMD features that the kernels or their peers make use of."""
    fields: dict[str, str] = {}
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    present = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "machine": platform.machine(),
        "model": fields.get("model name") or platform.processor() or "unknown",
        "threads": num_threads(),
        "features": [feature for feature in _FEATURES if feature in present],
    }


def collect() -> dict[str, Any]:
    """The report as plain data."""
    return {
        "mlxcel_ext": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {package: _version(package) for package in _PACKAGES},
        "default_device": str(mx.default_device()),
        "backends": {name: reason or "available" for name, reason in backends().items()},
        "cpu": _cpu(),
        "switches": env.check_switches(),
    }


def render(report: dict[str, Any], as_json: bool = False) -> str:
    """The report as text for people, or as JSON."""
    if as_json:
        return json.dumps(report, indent=2)
    lines = [
        f"mlxcel-ext {report['mlxcel_ext']} · Python {report['python']} · {report['platform']}",
        "packages:  "
        + ", ".join(f"{name} {version or 'missing'}" for name, version in report["packages"].items()),
        f"device:    {report['default_device']}",
        "backends:",
        *(f"  {name:<7}{status}" for name, status in report["backends"].items()),
        f"cpu:       {report['cpu']['model']} ({report['cpu']['machine']}), {report['cpu']['threads']} threads",
        f"           {' '.join(report['cpu']['features']) or 'no features known'}",
        "switches:",
        *(f"  {name} = {'on' if value else 'off'}" for name, value in report["switches"].items()),
    ]
    return "\n".join(lines)

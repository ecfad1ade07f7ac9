"""Constants that were measured on a device: one small JSON file each, the user's own before the packaged one."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import mlx.core as mx

from .. import env

_PACKAGED = pathlib.Path(__file__).parent


def device_name(on_cpu: bool) -> str:
    """Name of the machine's CPU or GPU as file names have it: "nvidia-h200"."""
    info = mx.device_info(mx.cpu if on_cpu else mx.gpu)
    name = re.sub(r"[^a-z0-9]+", "-", str(info.get("device_name", "unknown")).lower()).strip("-")
    return f"cpu-{name}" if on_cpu else name


def path(device: str) -> pathlib.Path:
    """Where this user's measurements of a device are kept."""
    return env.cache_dir() / "tuning" / f"{device}.json"


def load(section: str, on_cpu: bool) -> dict[str, float]:
    """The constants of one kernel family on this machine.

    What was measured here, else the packaged constants of the device, else those of the nearest kind.
    """
    device = device_name(on_cpu)
    nearest = "cpu" if on_cpu else "nvidia-h200"
    for file in (path(device), _PACKAGED / f"{device}.json", _PACKAGED / f"{nearest}.json"):
        if file.exists():
            found = _read(file).get(section)
            if found is not None:
                try:
                    return {str(name): float(value) for name, value in dict(found).items()}
                except (TypeError, ValueError):
                    raise ValueError(
                        f"[tuning] {section} of {file} must map names to numbers, got {found!r}: delete it, or "
                        "tune again."
                    ) from None
    raise ValueError(f"[tuning] no file has a section {section!r} for {device}.")


def save(section: str, on_cpu: bool, constants: dict[str, float]) -> pathlib.Path:
    """Keep the constants of one kernel family, beside those of others; the file."""
    file = path(device_name(on_cpu))
    known = _read(file) if file.exists() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known | {section: constants}, indent=2) + "\n")
    return file


def _read(file: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"[tuning] {file} is not JSON ({error}): delete it, or tune again.") from None
    if not isinstance(found, dict):
        raise ValueError(f"[tuning] {file} must hold an object, got {type(found).__name__}.")
    return found

"""The one place that reads MLXCEL_ environment variables (the C++ side reads MLXCEL_CPU_ISA alone)."""

from __future__ import annotations

import os
import pathlib

_TRUE = frozenset({"1", "true", "on", "yes"})
_FALSE = frozenset({"0", "false", "off", "no"})

#: Kill switches and their defaults; docs/architecture.md says what each turns off.
SWITCHES: dict[str, bool] = {
    "MLXCEL_PAGED_ATTENTION_V2": True,
    "MLXCEL_CASCADE_ATTENTION": True,
    "MLXCEL_SAMPLING_GUMBEL": True,
    "MLXCEL_SAMPLING_REJECTION": True,
    "MLXCEL_FUSED_ADD_RMSNORM": True,
    "MLXCEL_FUSED_ROPE_APPEND": True,
    "MLXCEL_FUSED_LAYERS": True,
}


#: Whole numbers that are not set by default; docs/kernels/cascade.md says what they mean.
COUNTS = ("MLXCEL_CASCADE_MIN_SHARED_PAGES", "MLXCEL_CASCADE_MIN_MEMBERS")


def parse_flag(name: str, raw: str) -> bool:
    """Truth value of a text. A malformed one is a ValueError, never a silent default."""
    value = raw.strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"{name} must be one of 1, true, on, yes, 0, false, off, no; got {raw!r}.")


def flag(name: str, default: bool) -> bool:
    """Value of a boolean variable, or the default where it is not set."""
    raw = os.environ.get(name)
    return default if raw is None or raw == "" else parse_flag(name, raw)


def switch(name: str) -> bool:
    """Value of a kill switch from SWITCHES."""
    return flag(name, SWITCHES[name])


def count(name: str) -> int | None:
    """Value of a variable from COUNTS, None where it is not set. A malformed one is a ValueError."""
    raw = text(name)
    if raw is None:
        return None
    if not (raw.strip().isdecimal() and 1 <= int(raw) < 2**31):
        raise ValueError(f"{name} must be a whole number, 1 or more; got {raw!r}.")
    return int(raw)


def check_switches() -> dict[str, bool]:
    """Every switch with its value; raises ValueError on the first malformed variable. Called at start."""
    for name in COUNTS:
        count(name)
    return {name: switch(name) for name in SWITCHES}


def text(name: str, default: str | None = None) -> str | None:
    """Value of a text variable."""
    raw = os.environ.get(name)
    return default if raw is None or raw == "" else raw


def given(name: str) -> str | None:
    """Value of a text variable that counts as set where it is empty."""
    return os.environ.get(name)


def cache_dir() -> pathlib.Path:
    """Where downloaded models are kept: MLXCEL_CACHE, else mlxcel-ext under XDG_CACHE_HOME or ~/.cache."""
    own = text("MLXCEL_CACHE")
    if own is not None:
        return pathlib.Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "mlxcel-ext"


def of_child(**variables: str) -> dict[str, str]:
    """The environment for a subprocess, with a few variables set."""
    return os.environ | variables

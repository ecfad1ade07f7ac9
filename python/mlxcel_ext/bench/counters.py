"""Counters of /metrics around a level: proof of which path the measured requests took."""

from __future__ import annotations

import re
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from .client import Target

Key = tuple[str, frozenset[tuple[str, str]]]
_SPEC = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(\w+)=\"?([^\"}]*)\"?\})?")


@dataclass(frozen=True)
class Expected:
    """A counter that must move: its name, and one label where given (name{label=value})."""

    text: str
    name: str
    label: tuple[str, str] | None

    @classmethod
    def parse(cls, text: str) -> Expected:
        match = _SPEC.fullmatch(text)
        if not match:
            raise ValueError(f"--metrics wants NAME or NAME{{label=value}}, got {text!r}")
        return cls(text, match[1], (match[2], match[3]) if match[2] else None)

    def value(self, moved: dict[Key, float]) -> float:
        names = (self.name, f"{self.name}_total")
        return sum(
            delta
            for (name, labels), delta in moved.items()
            if name in names and (not self.label or self.label in labels)
        )


async def scrape(target: Target) -> dict[Key, float]:
    """Every counter of the server now."""
    status, body = await target.fetch("GET", "/metrics")
    if status != 200:
        raise ValueError(f"--metrics: {target.url}/metrics answered {status}")
    families = text_string_to_metric_families(body.decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        if family.type == "counter"
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def moved(before: dict[Key, float], after: dict[Key, float]) -> dict[Key, float]:
    """What moved between two scrapes; a counter that was not there before began at 0."""
    deltas = {key: value - before.get(key, 0.0) for key, value in after.items()}
    return {key: delta for key, delta in deltas.items() if delta}


def named(key: Key) -> str:
    name, labels = key
    inner = ",".join(
        f'{label}="{value}"' for label, value in sorted(labels) if label not in ("model_name", "engine")
    )
    return f"{name}{{{inner}}}" if inner else name


def of_path(deltas: dict[Key, float], path: str) -> list[str]:
    """A line for each moved counter of a path, by its name or by a label's value."""
    return [
        f"{named(key)}: +{delta:g}"
        for key, delta in sorted(deltas.items(), key=lambda item: named(item[0]))
        if path in key[0] or any(value == path for label, value in key[1] if label != "model_name")
    ]


def notes(expected: list[Expected], deltas: dict[Key, float]) -> list[str]:
    """A line for each expected counter; NOTE where it stood still, since the numbers then measure something else."""
    lines = []
    for one in expected:
        value = one.value(deltas)
        line = f"{one.text}: +{value:g}"
        lines.append(
            line if value else f"NOTE: {one.text} did not move: this level did not take the path it counts"
        )
    return lines

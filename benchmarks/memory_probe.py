"""A server that writes down where its memory is: for soak.py, which says why resident memory grows.

    python benchmarks/memory_probe.py OUT.jsonl SNAPSHOT_SECONDS serve --model smollm2 ...

Runs `mlxcel-ext` with the rest of the line. A thread writes a line every ten seconds: resident memory, what malloc
holds for whom, MLX's active and cached bytes, Python's blocks and objects. Python allocations are traced;
SNAPSHOT_SECONDS after the start a snapshot is taken, and SIGUSR1 (soak.py sends it when nothing runs any more)
compares a second one with it, then asks malloc to give back what it can.
"""

from __future__ import annotations

import collections
import ctypes
import gc
import json
import os
import pathlib
import signal
import sys
import threading
import time
import tracemalloc
from typing import Any

import mlx.core as mx

from mlxcel_ext.cli import main

INTERVAL = 10.0
MIB = 2**20


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc: sums over all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Mallinfo


def measured() -> dict[str, float]:
    """Where the memory of this process is now, in MiB and in counts."""
    status = pathlib.Path("/proc/self/status").read_text()
    kib = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.endswith("kB")}
    info = _libc.mallinfo2()
    return {
        "rss": int(kib["VmRSS"]) / 1024,
        "rss_anonymous": int(kib["RssAnon"]) / 1024,
        "malloc_used": info.uordblks / MIB,
        "malloc_free": info.fordblks / MIB,
        "malloc_mapped": info.hblkhd / MIB,
        "mlx_active": mx.get_active_memory() / MIB,
        "mlx_cache": mx.get_cache_memory() / MIB,
        "python_traced": tracemalloc.get_traced_memory()[0] / MIB,
        "python_tracer": tracemalloc.get_tracemalloc_memory() / MIB,
        "python_blocks": sys.getallocatedblocks(),
        "python_objects": len(gc.get_objects()),
        "threads": threading.active_count(),
    }


def types() -> collections.Counter[str]:
    return collections.Counter(type(thing).__name__ for thing in gc.get_objects())


def grown(before: tracemalloc.Snapshot, after: tracemalloc.Snapshot) -> list[str]:
    """The source lines whose live allocations grew most."""
    lines = []
    for change in after.compare_to(before, "lineno")[:25]:
        frame = change.traceback[0]
        place = "/".join(frame.filename.split(os.sep)[-3:])
        lines.append(
            f"{change.size_diff / 1024:+.1f} KiB in {change.count_diff:+d} blocks: {place}:{frame.lineno}"
        )
    return lines


def watch(out: pathlib.Path, snapshot_after: float, finish: threading.Event) -> None:
    started = time.monotonic()
    first: tuple[tracemalloc.Snapshot, collections.Counter[str]] | None = None

    def write(**fields: Any) -> None:
        with out.open("a") as file:
            file.write(json.dumps({"seconds": round(time.monotonic() - started, 1), **fields}) + "\n")

    while not finish.wait(INTERVAL):
        write(**measured())
        if first is None and time.monotonic() - started >= snapshot_after:
            gc.collect()
            first = tracemalloc.take_snapshot(), types()
    gc.collect()
    write(event="idle", **measured())
    if first is not None:
        more = types()
        more.subtract(first[1])
        write(event="grown", lines=grown(first[0], tracemalloc.take_snapshot()), types=more.most_common(15))
        first = None
    tracemalloc.stop()
    gc.collect()
    write(event="untraced", **measured())
    _libc.malloc_trim(0)
    write(event="trimmed", **measured())


if __name__ == "__main__":
    out, snapshot_after = pathlib.Path(sys.argv[1]), float(sys.argv[2])
    out.unlink(missing_ok=True)
    tracemalloc.start()
    finish = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: finish.set())
    threading.Thread(target=watch, args=(out, snapshot_after, finish), daemon=True).start()
    sys.exit(main(sys.argv[3:]))

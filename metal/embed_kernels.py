"""Write a C++ file that holds every kernel source of a folder, flattened, as a string.

    python embed_kernels.py KERNEL_FOLDER INCLUDE_FOLDER OUTPUT.cpp FLAT_FOLDER

MLX compiles kernels from strings (Device::get_library), without an include path: local #include lines are
replaced by the files, each once. FLAT_FOLDER receives the same texts with the explicit instantiations of the
.metal files appended, for a metallib that is compiled ahead and for the checks.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
import sys

_LOCAL = re.compile(r'^\s*#include "([^"]+)"\s*$')
# Metal's own headers have the fixed-width types.
_DROPPED = re.compile(r"^\s*#(?:pragma once|include <cstdint>)\s*$")


def flatten(path: pathlib.Path, folders: list[pathlib.Path], seen: set[pathlib.Path]) -> list[str]:
    """Lines of `path` with its local includes in place, each file once."""
    seen.add(path)
    lines = []
    for line in path.read_text(encoding="ascii").splitlines():
        m = _LOCAL.match(line)
        if not m:
            if not _DROPPED.match(line):
                lines.append(line)
            continue
        included = next((f / m[1] for f in [path.parent, *folders] if (f / m[1]).exists()), None)
        if included is None:
            raise SystemExit(f"{path}: {m[1]} is in none of {[str(f) for f in folders]}")
        if included.resolve() not in {s.resolve() for s in seen}:
            lines += flatten(included, folders, seen)
    return lines


def main(kernels: str, include: str, output: str, flat: str) -> None:
    folders = [pathlib.Path(kernels), pathlib.Path(include)]
    flat_folder = pathlib.Path(flat)
    flat_folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for metal in sorted(folders[0].glob("*.metal")):
        header = metal.with_suffix(".h")
        source = "\n".join(flatten(header, folders, set())) + "\n"
        instances = [
            line for line in metal.read_text(encoding="ascii").splitlines() if not _LOCAL.match(line)
        ]
        (flat_folder / metal.name).write_text(source + "\n".join(instances) + "\n")
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        entries.append(
            f'const KernelSource k_{metal.stem}{{"{metal.stem}", "{digest}", R"msl(\n{source})msl"}};\n'
        )
    text = '#include "library.h"\n\nnamespace mlxcel::metal::sources {\n\n' + "\n".join(entries) + "\n}\n"
    pathlib.Path(output).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])

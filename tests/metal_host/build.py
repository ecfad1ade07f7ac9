"""Compile a .metal source for the host: a shared library of launchers and a table of its kernels.

The stand-in for MLX's Metal device runs it as a program, where the real one calls Apple's compiler:
    python -m tests.metal_host.build runtime              prints the path of the runtime library, and a folder for
                                                          what this version of the harness compiles
    python -m tests.metal_host.build kernels SOURCE STEM  writes STEM.so and STEM.txt, one line a kernel:
                                                          host name, symbol, its buffer indices
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from tests.metal_host.transform import MetalError, Parameter, Transform

HERE = pathlib.Path(__file__).parent
CLANG = os.environ.get("METAL_HOST_CLANG", "clang++-19")
MSL_VERSION = 310

_LANGUAGE = [
    "-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-target", "x86_64-linux-gnu",
    "-Xclang", "-fbfloat16-excess-precision=none", "-Wno-unknown-attributes", "-Wno-unused-value",
]  # fmt: skip
_CODE = [
    "-O1", "-fPIC", "-gline-tables-only", "-fno-vectorize", "-fno-slp-vectorize", "-ffp-contract=off",
    "-ftrivial-auto-var-init=pattern",
]  # fmt: skip
# Calls that runtime/hooks.cpp answers.
_CHECKS = [
    "-fsanitize=thread,bounds,alignment,shift,integer-divide-by-zero,signed-integer-overflow,"
    "float-cast-overflow,return,unreachable",
    "-fsanitize-recover=all", "-fno-sanitize-recover=return,unreachable",
    "-mllvm", "-tsan-instrument-func-entry-exit=0",
]  # fmt: skip
_WARNINGS = ["-Wimplicit-float-conversion", "-Wno-implicit-int-float-conversion"]
_MSL_HEADERS = [
    "stdlib",
    "array",
    "atomic",
    "common",
    "compute",
    "geometric",
    "integer",
    "limits",
    "logging",
    "math",
    "matrix",
    "numeric",
    "relational",
    "simdgroup",
    "simdgroup_matrix",
    "type_traits",
    "types",
]


@dataclasses.dataclass
class Kernel:
    """One kernel that the host can dispatch."""

    symbol: str
    expression: str
    parameters: list[tuple[int, Parameter]]  # of buffers, with their index
    threadgroup: list[tuple[int, Parameter]]


def cache_folder() -> pathlib.Path:
    folder = pathlib.Path(
        os.environ.get("METAL_HOST_CACHE", pathlib.Path(tempfile.gettempdir()) / "metal_host")
    )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _run(command: list[str], **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@functools.cache
def _translation_sources() -> tuple[str, ...]:
    """What a compiled kernel depends on beside its source."""
    files = [*sorted((HERE / "msl").iterdir()), HERE / "build.py", HERE / "transform.py"]
    return tuple(p.read_text() for p in files)


def runtime_library() -> pathlib.Path:
    """The fibre runtime as a shared library, built on first use."""
    sources = sorted((HERE / "runtime").glob("*.cpp"))
    texts = [p.read_text() for p in [*sources, HERE / "runtime" / "runtime.h"]]
    target = cache_folder() / f"runtime-{_digest(*texts)}.so"
    with open(cache_folder() / "runtime.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            part = target.with_suffix(".part")
            flags = ["-std=c++20", "-O2", "-g", "-fPIC", "-shared", "-Wall", "-Wextra"]
            done = _run(["g++", *flags, *map(str, sources), "-o", str(part), "-ldl"])
            if done.returncode:
                raise MetalError(done.stderr)
            part.rename(target)
    return target


def _stub_headers() -> pathlib.Path:
    """<metal_stdlib> and its kin are empty while preprocessing: their contents come from msl/."""
    folder = cache_folder() / "msl_headers"
    folder.mkdir(exist_ok=True)
    for name in _MSL_HEADERS:
        (folder / f"metal_{name}").touch()
    return folder


def preprocess(source: str, *, path: str = "", include: tuple[str, ...] = ()) -> str:
    command = [CLANG, "-E", "-x", "c++", "-std=c++17", "-undef", "-nostdinc", "-nostdinc++"]
    command += [f"-D__METAL_VERSION__={MSL_VERSION}", "-D__METAL__=1", "-I", str(_stub_headers())]
    for folder in include:
        command += ["-I", folder]
    done = _run([*command, path or "-"], input=None if path else source)
    if done.returncode:
        raise MetalError(done.stderr)
    return done.stdout


def _launcher(host_name: str, expression: str, transform: Transform, number: int) -> tuple[Kernel, str]:
    function = re.sub(r"<.*$", "", expression, flags=re.S).strip().split("::")[-1].strip()
    if function not in transform.kernels:
        raise MetalError(f"{host_name} instantiates {function}, which is no kernel of this source")
    parameters = transform.kernels[function]
    taken = {int(p.attributes["buffer"]) for p in parameters if "buffer" in p.attributes}
    kernel = Kernel(f"mtlh_k{number}", expression, [], [])
    arguments, next_free = [], 0
    for p in parameters:
        if p.builtin is not None:
            arguments.append(f"mtlh::input({p.builtin})")
        elif "threadgroup" in p.attributes:
            index = int(p.attributes["threadgroup"])
            arguments.append(f"mtlh::Pointer{{A->threadgroup_[{index}]}}")
            kernel.threadgroup.append((index, p))
        elif p.is_pointer:
            if "buffer" in p.attributes:
                index = int(p.attributes["buffer"])
            else:
                while next_free in taken:
                    next_free += 1
                index = next_free
                taken.add(index)
            arguments.append(f"mtlh::Pointer{{A->buffer[{index}]}}")
            kernel.parameters.append((index, p))
        else:
            raise MetalError(f"{function}: parameter without a known attribute: {p.text} {p.attributes}")
    call = f"{expression}({', '.join(arguments)});"
    return kernel, f'extern "C" MTLH_NOSAN void {kernel.symbol}(const mtlh::Arguments* A) {{ {call} }}'


class CompiledSource:
    """A compiled source: `library` is the shared object, `kernels` its kernels by host name."""

    def __init__(self, source: str = "", *, path: str = "", include: tuple[str, ...] = (), lint: bool = True):
        self.transform = Transform(preprocess(source, path=path, include=include))
        body = self.transform.run()
        self.kernels: dict[str, Kernel] = {}
        launchers = []
        for name, expression in self.transform.host_names.items():
            self.kernels[name], text = _launcher(name, expression, self.transform, len(launchers))
            launchers.append(text)
        text = "struct mtlh_user_begin;\n" + body + '\n# 1 "<launchers>"\n' + "\n".join(launchers) + "\n"
        stem = cache_folder() / _digest(text, *_translation_sources(), CLANG)
        self.library = stem.with_suffix(".so")
        self._translated = stem.with_suffix(".cl")
        checked = stem.with_suffix(".checked")
        if not self.library.exists():
            self._translated.write_text(text)
            self._compile()
        if lint and not checked.exists():
            problems = self._missing_address_spaces()
            if problems:
                raise MetalError("\n".join(problems))
            checked.touch()

    def _compile(self) -> None:
        part = self.library.with_suffix(f".{os.getpid()}.o")
        header = ["-I", str(HERE / "msl"), "-include", "metal_host.clh"]
        flags = [*_LANGUAGE, *_CODE, *_CHECKS, *_WARNINGS, *header]
        done = _run([CLANG, *flags, "-S", "-emit-llvm", str(self._translated), "-o", "-"])
        if done.returncode:
            raise MetalError(done.stderr)
        # The checks are in. MLX's CPU allocator aligns to 8 bytes where Metal's buffers begin at pages, so the
        # machine code must not rely on more: the runtime judges alignment relative to the buffer.
        code = re.sub(r"(?m)^(.*\b(?:load|store) .*), align \d+", r"\1, align 1", done.stdout)
        back_end = ["-x", "ir", "-O1", "-fPIC", "-w", "-Xclang", "-disable-llvm-passes"]
        assembled = _run([CLANG, *back_end, "-c", "-", "-o", str(part)], input=code)
        if assembled.returncode:
            raise MetalError(assembled.stderr)
        # clang narrows float to bfloat silently; Metal's compiler refuses it.
        narrowing = {
            line.replace("warning: implicit", "error: MSL has no such implicit")
            for line in done.stderr.splitlines()
            if "loses floating-point precision" in line and re.search(r"to '[^']*\b(bfloat\w*|__bf16)'", line)
        }
        if narrowing:
            raise MetalError("\n".join(sorted(narrowing)))
        # Calls into the runtime stay open: the process has loaded it before.
        linked = self.library.with_suffix(f".{os.getpid()}.part")
        done = _run(["g++", "-shared", "-o", str(linked), str(part), "-lm"])
        part.unlink()
        if done.returncode:
            raise MetalError(done.stderr)
        linked.rename(self.library)

    def _missing_address_spaces(self) -> list[str]:
        """Pointers and references that name no address space: clang makes them generic, MSL refuses them."""
        flags = [*_LANGUAGE, "-w", "-fsyntax-only", "-fno-color-diagnostics", "-I", str(HERE / "msl")]
        dump = _run(
            [CLANG, *flags, "-include", "metal_host.clh", "-Xclang", "-ast-dump", str(self._translated)]
        ).stdout
        found: set[str] = set()
        file, line, in_source = "", 0, False
        for row in dump.splitlines():
            place = r"([^\s<>:,]+\.(?:metal|h|cl|clh)|<stdin>|<launchers>|line):(\d+):\d+"
            for name, number in re.findall(place, row):
                file, line = (file if name == "line" else name), int(number)
            in_source = in_source or "mtlh_user_begin" in row
            m = in_source and re.search(r"-(?:ParmVar|Var|Field)Decl .*? ((?:\w+ )?)'([^']*[*&][^']*)'", row)
            if not m or file == "<launchers>":
                continue
            name, kind = m.group(1).strip(), m.group(2)
            if name in ("", "used", "referenced", "invalid") or kind.startswith("auto"):
                continue
            if "__generic" in kind or not re.search(r"__(global|local|private|constant)\b", kind):
                found.add(
                    f"{file}:{line}: error: '{name}' has type '{kind}': MSL needs an address space here"
                )
        return sorted(found)


def write_library(source: str, stem: str) -> None:
    compiled = CompiledSource(pathlib.Path(source).read_text(), lint=False)
    lines = []
    for name, kernel in compiled.kernels.items():
        indices = sorted(index for index, _ in kernel.parameters)
        lines.append(" ".join([name, kernel.symbol, *map(str, indices)]))
    part = f"{stem}.{os.getpid()}"
    pathlib.Path(part).write_text("\n".join(lines) + "\n")
    os.rename(part, stem + ".txt")
    shutil.copy(compiled.library, part)
    os.rename(part, stem + ".so")  # last: where it is, all is there


def main(command: str, *arguments: str) -> None:
    if command == "runtime":
        folder = cache_folder() / f"jit-{_digest(*_translation_sources())}"
        folder.mkdir(exist_ok=True)
        print(runtime_library(), folder, sep="\n")
    elif command == "kernels":
        write_library(*arguments)
    else:
        raise MetalError(f"unknown command {command}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except MetalError as error:
        sys.exit(str(error))

"""Dispatch single kernels from Python over numpy arrays, for tests of kernels and of the harness itself."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tests.metal_host.build import CompiledSource, runtime_library
from tests.metal_host.transform import MetalError

OUTPUT, INPUT, INOUT = 0, 1, 2
RACES, STRICT = 1, 2
#: Issues whose code address is not one: they name a call site themselves.
_SITED = frozenset(
    ["simd-divergence", "barrier-divergence", "inactive-lane", "threadgroup-memory", "deadlock", "unwritten"]
)
_CONSTANT_TYPES = {
    "bool": np.uint8, "int": np.int32, "uint": np.uint32, "float": np.float32, "short": np.int16,
    "ushort": np.uint16,
}  # fmt: skip


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("index", ctypes.c_int32),
        ("access", ctypes.c_int32),
        ("allocation", ctypes.c_uint64),
    ]


class _Dispatch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("threads", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("num_buffers", ctypes.c_uint32),
        ("options", ctypes.c_uint32),
        ("threadgroup_memory", ctypes.c_uint64 * 32),
        ("threadgroup_memory_limit", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("shuffle", ctypes.c_uint32),
        ("fuzz", ctypes.c_float),
        ("max_accesses", ctypes.c_uint64),
    ]


@functools.cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)
    library.mtlh_dispatch.restype = ctypes.c_char_p
    return library


def _three(values: Sequence[int]) -> tuple[int, ...]:
    return (*values, *(1,) * (3 - len(values)))


class Library(CompiledSource):
    """A compiled source whose kernels can be dispatched."""

    def __init__(self, source: str = "", **options):
        super().__init__(source, **options)
        _runtime()
        self._library = ctypes.CDLL(str(self.library))

    def _set_constants(self, constants: Mapping[str, object]) -> None:
        table = (ctypes.c_uint64 * 256).in_dll(_runtime(), "mtlh_fc_table")
        ctypes.memset(table, 0, ctypes.sizeof(table))
        for name, value in constants.items():
            index, kind = self.transform.function_constants[name]
            table[index] = int.from_bytes(_CONSTANT_TYPES[kind](value).tobytes(), "little")

    def dispatch(
        self,
        name: str,
        buffers: Mapping[int, npt.NDArray],
        *,
        threads: Sequence[int] | None = None,
        groups: Sequence[int] | None = None,
        group: Sequence[int] = (32,),
        outputs: Sequence[int] = (),
        inout: Sequence[int] = (),
        constants: Mapping[str, object] | None = None,
        threadgroup_memory: Mapping[int, int] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        fuzz: float = 0.0,
        options: int = RACES | STRICT,
        memory_limit: int = 32768,
        max_accesses: int = 50_000_000,
    ) -> list[tuple[str, str]]:
        """Run one dispatch; returns its issues as (kind, text). `threads` or `groups` gives the grid."""
        kernel = self.kernels[name]
        group = _three(group)
        threads = (
            _three(threads) if threads else tuple(a * b for a, b in zip(_three(groups), group, strict=True))
        )
        self._set_constants(constants or {})
        wanted = {i for i, p in kernel.parameters if "function_constant" not in p.attributes}
        if missing := wanted - set(buffers):
            raise MetalError(f"{name}: buffer({min(missing)}) is not bound")
        bound = []
        for index, array in buffers.items():
            access = OUTPUT if index in outputs else INOUT if index in inout else INPUT
            assert array.flags.c_contiguous
            bound.append(_Buffer(array.ctypes.data, array.nbytes, index, access, array.ctypes.data))
        job = _Dispatch(
            ctypes.cast(getattr(self._library, kernel.symbol), ctypes.c_void_p),
            (ctypes.c_uint32 * 3)(*threads),
            (ctypes.c_uint32 * 3)(*group),
            (_Buffer * len(bound))(*bound),
            len(bound),
            options,
            (ctypes.c_uint64 * 32)(*[(threadgroup_memory or {}).get(i, 0) for i in range(32)]),
            memory_limit,
            seed,
            int(shuffle),
            fuzz,
            max_accesses,
        )
        statistics = (ctypes.c_uint64 * 3)()
        report = _runtime().mtlh_dispatch(ctypes.byref(job), statistics).decode()
        issues = []
        for line in report.splitlines():
            kind, offset, text = line.split("\t", 2)
            issues.append((kind, text + self._where(kind, int(offset, 16))))
        return issues

    def run(self, name: str, buffers: Mapping[int, npt.NDArray], **options) -> None:
        """Like dispatch, but any issue is a MetalError."""
        if issues := self.dispatch(name, buffers, **options):
            raise MetalError(f"{name}:\n" + "\n".join(f"  {kind}: {text}" for kind, text in issues))

    def _where(self, kind: str, offset: int) -> str:
        """The source line of a code offset."""
        if kind in _SITED or not offset:
            return ""
        command = ["llvm-symbolizer-19", f"--obj={self.library}", "--no-demangle", hex(offset)]
        rows = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
        places = [r for r in rows if re.search(r":\d+:\d+$", r)]
        places = [p for p in places if ".clh:" not in p] or places
        return f" at {places[0]}" if places else ""


def to_bf16(x: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Nearest-even bfloat16, as bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)

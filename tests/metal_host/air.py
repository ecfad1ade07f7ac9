"""Kernels that Apple's own compiler built, run on the host: the oracle for our front-end.

mlx.metallib in the macOS wheel of MLX holds each kernel as AIR, which is LLVM bitcode. Debian's llvm-dis reads it; with
the target and the address spaces taken out it compiles for the host, and its air.* intrinsics become calls into the
same MSL library and runtime that our translated sources use.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
import re
import struct
import subprocess

from tests.metal_host.build import _LANGUAGE, CLANG, HERE, cache_folder
from tests.metal_host.dispatch import Library
from tests.metal_host.transform import BUILTIN_INPUTS

DISASSEMBLER = "llvm-dis-19"
_CODE = ["-O1", "-w", "-fPIC", "-ffp-contract=off"]

# The intrinsics that the oracle's kernels use.
_INTRINSICS = """
#include "metal_host.clh"
extern "C" {
#define REDUCTION(name, T, suffix)                               \
  T air_##name##_##suffix(T x) __asm__("air." #name "." #suffix); \
  T air_##name##_##suffix(T x) { return metal::name(x, (ulong)1); }
REDUCTION(simd_sum, float, f32)
REDUCTION(simd_max, float, f32)
REDUCTION(simd_sum, half, f16)
REDUCTION(simd_max, half, f16)
void air_barrier(int flags, int) __asm__("air.wg.barrier");
void air_barrier(int flags, int) { mtlh_threadgroup_barrier((uint)flags, 1); }
#define FUNCTION(name, symbol, R, parameters, value) \
  R name parameters __asm__(symbol);                 \
  R name parameters { return value; }
FUNCTION(air_exp, "air.fast_exp.f32", float, (float x), expf(x))
FUNCTION(air_exp_half, "air.fast_exp.f16", half, (half x), (half)expf((float)x))
FUNCTION(air_max, "air.fmax.f32", float, (float x, float y), fmaxf(x, y))
FUNCTION(air_flag, "air.normalize_function_constant_predicate.i8", char, (char x), x != 0)
FUNCTION(air_from_bfloat, "air.convert.f.f32.f.bf16", float, (bfloat x), (float)x)
FUNCTION(air_to_bfloat, "air.convert.f.bf16.f.f32", bfloat, (float x), (bfloat)x)
FUNCTION(air_from_half, "air.convert.f.f32.f.f16", float, (half x), (float)x)
FUNCTION(air_to_half, "air.convert.f.f16.f.f32", half, (float x), (half)x)
FUNCTION(air_from_uint, "air.convert.f.f32.u.i32", float, (uint x), (float)x)
}
"""
_TYPES = {"uint3": "metal::uint3", "uint2": "metal::uint2", "uint": "uint", "ushort": "ushort"}


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a compiled kernel, from its metadata."""

    kind: str  # "buffer" or a built-in input
    index: int | None
    type: str
    name: str


class Metallib:
    """The functions of a .metallib file."""

    def __init__(self, path: pathlib.Path):
        self._data = path.read_bytes()
        function_list, *_, bitcode, _ = struct.unpack_from("<8Q", self._data, 24)
        self._bitcode = bitcode
        (count,) = struct.unpack_from("<I", self._data, function_list)
        self._functions: dict[str, tuple[int, int]] = {}
        at = function_list + 4
        for _ in range(count):
            (size,) = struct.unpack_from("<I", self._data, at)
            tags, tag_at = {}, at + 4
            while (tag := self._data[tag_at : tag_at + 4]) != b"ENDT":
                (length,) = struct.unpack_from("<H", self._data, tag_at + 4)
                tags[tag] = self._data[tag_at + 6 : tag_at + 6 + length]
                tag_at += 6 + length
            offset = struct.unpack("<3Q", tags[b"OFFT"])[2]
            self._functions[tags[b"NAME"].rstrip(b"\0").decode()] = (
                offset,
                struct.unpack("<Q", tags[b"MDSZ"])[0],
            )
            at += size

    def __len__(self) -> int:
        return len(self._functions)

    def disassemble(self, name: str) -> str:
        offset, size = self._functions[name]
        bitcode = self._data[self._bitcode + offset : self._bitcode + offset + size]
        command = [DISASSEMBLER, "-", "-o", "-"]
        return subprocess.run(command, input=bitcode, capture_output=True, check=True).stdout.decode()


def arguments_of(ll: str) -> list[Argument]:
    """The kernel's arguments as Apple's compiler recorded them."""
    metadata = dict(re.findall(r"^(!\d+) = (?:distinct )?(!\{.*\})$", ll, re.M))
    kernel = re.search(r"!air\.kernel = !\{(!\d+)\}", ll).group(1)
    listed = re.findall(r"!\d+", metadata[re.findall(r"!\d+", metadata[kernel])[-1]])
    kinds = "|".join(["buffer", *BUILTIN_INPUTS])
    out = []
    for node in listed:
        text = metadata[node]
        kind = re.search(rf'!"air\.({kinds})"', text).group(1)
        index = re.search(r'"air\.location_index", i32 (\d+)', text)
        type_name = re.search(r'"air\.arg_type_name", !"(\w+)"', text).group(1)
        name = re.search(r'"air\.arg_name", !"(\w+)"', text).group(1)
        out.append(Argument(kind, int(index.group(1)) if kind == "buffer" else None, type_name, name))
    return out


def retarget(ll: str) -> tuple[str, str | None]:
    """AIR as host LLVM IR, and the name of its constructor of function constants."""
    ll = re.sub(r"^@llvm\.(global_ctors|compiler\.used).*\n", "", ll, flags=re.M)
    ll = re.sub(r"^target (datalayout|triple).*\n", "", ll, flags=re.M)
    constant = r"^(@\S*\.MTL_FC_INIT_(\d+)_\w+) = .*?(i\d+|float) undef.*$"
    ll = re.sub(constant, lambda m: f"@mtlh_fc_{m.group(2)} = external global {m.group(3)}", ll, flags=re.M)
    ll = re.sub(r"@\S*?\.MTL_FC_INIT_(\d+)_\w+", r"@mtlh_fc_\1", ll)
    ll = re.sub(r"addrspace\(\d\) ?", "", ll)
    ll = re.sub(r', section "air\.\w+"', "", ll)
    constructor = re.search(r"define internal void (@_GLOBAL__\S+)\(", ll)
    ll = ll.replace("define internal void @_GLOBAL__", "define void @_GLOBAL__")
    ll = re.sub(r"^!(air\.|llvm\.module\.flags).*\n", "", ll, flags=re.M)
    return ll, constructor.group(1)[1:] if constructor else None


class AppleKernel(Library):
    """A kernel from a metallib with the dispatch interface of `like`, the same kernel through our front-end."""

    def __init__(self, metallib: Metallib, name: str, like: Library):
        ll = metallib.disassemble(name)
        self.arguments = arguments_of(ll)
        code, constructor = retarget(ll)
        stem = cache_folder() / f"air_{name}"
        stem.with_suffix(".ll").write_text(code)
        parameters, values = [], []
        for a in self.arguments:
            parameters.append("ulong" if a.kind == "buffer" else _TYPES[a.type])
            is_buffer = a.kind == "buffer"
            values.append(
                f"A->buffer[{a.index}]"
                if is_buffer
                else f"({_TYPES[a.type]})mtlh::input({BUILTIN_INPUTS[a.kind]})"
            )
        set_up = f'void set_up() __asm__("{constructor}");' if constructor else "void set_up() {}"
        launcher = (
            f'extern "C" {{ void kern({", ".join(parameters)}) __asm__("{name}"); {set_up}\n'
            f"MTLH_NOSAN void mtlh_k0(const mtlh::Arguments* A) {{ set_up(); kern({', '.join(values)}); }} }}\n"
        )
        stem.with_suffix(".cl").write_text(_INTRINSICS + launcher)
        objects = []
        for suffix, flags in ((".cl", [*_LANGUAGE, "-I", str(HERE / "msl")]), (".ll", [])):
            objects.append(f"{stem}{suffix}.o")
            command = [CLANG, *flags, *_CODE, "-c", str(stem.with_suffix(suffix)), "-o", objects[-1]]
            subprocess.run(command, check=True)
        subprocess.run(["g++", "-shared", "-o", f"{stem}.so", *objects, "-lm"], check=True)
        self.library = stem.with_suffix(".so")
        self.transform = like.transform
        self.kernels = {name: dataclasses.replace(like.kernels[name], symbol="mtlh_k0")}
        self._library = ctypes.CDLL(str(self.library))

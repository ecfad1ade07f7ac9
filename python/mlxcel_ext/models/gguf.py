"""Reading GGUF files: header, metadata, and tensors as the arrays that the models use.

Block formats whose groups are affine with one scale and offset per 32 weights become MLX's quantized
triples, so nothing is widened in memory; the remaining ones are dequantized to float16 by the `gguf` package.
"""

from __future__ import annotations

import mmap
import pathlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .weights import Weight

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_GROUP = 32

Bytes = npt.NDArray[np.uint8]
#: Weights of one tensor as small integers [rows, cols], with scales and offsets [rows, cols / 32].
Affine = tuple[Bytes, int, npt.NDArray[np.float16], npt.NDArray[np.float16]]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file. `shape` has the rows first, as arrays have it."""

    name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    nbytes: int


class _Cursor:
    """Bounds-checked little-endian reads."""

    def __init__(self, data: mmap.mmap, path: pathlib.Path) -> None:
        self.data, self.path, self.pos = data, path, 0

    def take(self, count: int, what: str) -> int:
        start, end = self.pos, self.pos + count
        if end > len(self.data):
            raise ValueError(
                f"[gguf] {self.path}: the file is truncated: {what} needs bytes {start} to {end}, but the file "
                f"has {len(self.data)}. Download it again."
            )
        self.pos = end
        return start

    def scalar(self, kind: str, what: str) -> Any:
        return struct.unpack_from(kind, self.data, self.take(struct.calcsize(kind), what))[0]

    def text(self, what: str) -> str:
        size = self.scalar("<Q", what)
        start = self.take(size, what)
        return self.data[start : start + size].decode("utf-8", errors="replace")

    def texts(self, count: int, what: str) -> list[str]:
        # A vocabulary has 10^5 strings: one tight loop, checked at its end.
        data, pos, size_at = self.data, self.pos, struct.Struct("<Q").unpack_from
        out = []
        for _ in range(count):
            if pos + 8 > len(data):
                break
            end = pos + 8 + size_at(data, pos)[0]
            out.append(data[pos + 8 : end].decode("utf-8", errors="replace"))
            pos = end
        self.take(pos - self.pos + 8 * (count - len(out)), what)
        return out

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            raise ValueError(f"[gguf] {self.path}: {what} has the unknown value type {kind}.")
        item, count = self.scalar("<I", what), self.scalar("<Q", what)
        if item in _SCALARS:
            kind_of_item = _SCALARS[item]
            start = self.take(count * struct.calcsize(kind_of_item), what)
            return np.frombuffer(self.data, kind_of_item, count, start).tolist()
        if item == _STRING:
            return self.texts(count, what)
        return [self.value(item, what) for _ in range(count)]


class GGUFFile:
    """An open GGUF file: `metadata` by key and `tensors` by name. The header is checked against the size."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise ValueError(f"[gguf] {path}: {size} bytes are too few for a GGUF header.")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._data, path)
        if self._data[:4] != b"GGUF":
            raise ValueError(f"[gguf] {path}: not a GGUF file (it begins with {self._data[:4]!r}).")
        cursor.pos = 4
        version = cursor.scalar("<I", "the version")
        if version not in (2, 3):
            raise ValueError(f"[gguf] {path}: GGUF version {version} is not supported (2 and 3 are).")
        num_tensors, num_values = cursor.scalar("<Q", "the header"), cursor.scalar("<Q", "the header")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.text("a metadata key")
            self.metadata[key] = cursor.value(cursor.scalar("<I", key), key)
        infos = [self._read_info(cursor) for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-cursor.pos // alignment) * alignment
        self.tensors = {name: self._place(name, *rest, start) for name, *rest in infos}

    def _read_info(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.text("a tensor name")
        num_dims = cursor.scalar("<I", name)
        if num_dims > _MAX_DIMS:
            raise ValueError(f"[gguf] {self.path}: tensor {name} has {num_dims} dimensions, at most 4 are possible.")
        dims = [cursor.scalar("<Q", name) for _ in range(num_dims)]
        return name, tuple(reversed(dims)), cursor.scalar("<I", name), cursor.scalar("<Q", name)

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int) -> TensorInfo:
        try:
            tensor_type = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise ValueError(f"[gguf] {self.path}: tensor {name} has the unknown quantization type {kind}.") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
        if shape and shape[-1] % block:
            raise ValueError(
                f"[gguf] {self.path}: tensor {name} has rows of {shape[-1]} weights, which {tensor_type.name} "
                f"cannot split into blocks of {block}."
            )
        nbytes = int(np.prod(shape, dtype=object)) // block * block_bytes
        end = start + offset + nbytes
        if end > len(self._data):
            raise ValueError(
                f"[gguf] {self.path}: the file is truncated: tensor {name} ends at byte {end}, but the file has "
                f"{len(self._data)}. Download it again."
            )
        return TensorInfo(name, shape, tensor_type, start + offset, nbytes)

    def read(self, name: str, *, unpermute_heads: int = 0) -> Weight:
        """One tensor, copied out of the file.

        Parameters
        ----------
        name : str
            Name in the file.
        unpermute_heads : int
            Number of heads whose rows are to go back from the converter's interleaved order
            (rotary pairs in neighbouring rows) to halves; 0 leaves the rows alone.
        """
        info = self.tensors[name]
        rows = info.shape[0] if len(info.shape) > 1 else 1
        raw = np.frombuffer(self._data, np.uint8, info.nbytes, info.offset).reshape(rows, -1)
        if unpermute_heads:
            # Vectors (biases) are permuted by element, matrices by whole rows of blocks.
            parts = raw if rows > 1 else raw.reshape(info.shape[-1], -1)
            pairs = parts.reshape(unpermute_heads, -1, 2, parts.shape[-1])
            raw = pairs.swapaxes(1, 2).reshape(raw.shape)
        if info.type in _DENSE:
            return Weight(_dense(raw, info))
        if info.type in _AFFINE:
            return _triple(*_AFFINE[info.type](raw))
        try:
            values = gguf.dequantize(raw, info.type)
        except NotImplementedError:
            raise ValueError(
                f"[gguf] {self.path}: tensor {name} is of type {info.type.name}, which is not supported."
            ) from None
        return Weight(mx.array(values.reshape(info.shape).astype(np.float16)))


_DENSE = {
    gguf.GGMLQuantizationType.F32: np.float32,
    gguf.GGMLQuantizationType.F16: np.float16,
    gguf.GGMLQuantizationType.BF16: np.uint16,
}


def _dense(raw: Bytes, info: TensorInfo) -> mx.array:
    values = mx.array(np.ascontiguousarray(raw).view(_DENSE[info.type]).reshape(info.shape))
    return values.view(mx.bfloat16) if info.type == gguf.GGMLQuantizationType.BF16 else values


def _blocks(raw: Bytes, size: int) -> Bytes:
    """[rows, blocks, bytes of a block]."""
    return raw.reshape(raw.shape[0], -1, size)


def _half(block: Bytes) -> npt.NDArray[np.float16]:
    """[rows, blocks, n] from pairs of bytes."""
    return np.ascontiguousarray(block).view(np.float16)


def _nibbles(packed: Bytes) -> Bytes:
    """Low halves of a run of bytes, then its high halves: ggml's order in a block."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(mask: Bytes) -> Bytes:
    """[rows, blocks, 32] of 16 or 0 from 4 bytes of bits."""
    return np.unpackbits(mask, axis=-1, bitorder="little") << 4


def _scaled(values: Bytes, bits: int, scales: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> Affine:
    rows = values.shape[0]
    half = [np.ascontiguousarray(a, np.float16).reshape(rows, -1) for a in (scales, offsets)]
    return values.reshape(rows, -1), bits, half[0], half[1]


def _q4_0(raw: Bytes) -> Affine:
    block = _blocks(raw, 18)
    scale = _half(block[..., :2])
    return _scaled(_nibbles(block[..., 2:]), 4, scale, scale * np.float16(-8))


def _q4_1(raw: Bytes) -> Affine:
    block = _blocks(raw, 20)
    return _scaled(_nibbles(block[..., 4:]), 4, _half(block[..., :2]), _half(block[..., 2:4]))


def _q5_0(raw: Bytes) -> Affine:
    block = _blocks(raw, 22)
    scale = _half(block[..., :2])
    values = _nibbles(block[..., 6:]) | _fifth_bits(block[..., 2:6])
    return _scaled(values, 5, scale, scale * np.float16(-16))


def _q5_1(raw: Bytes) -> Affine:
    block = _blocks(raw, 24)
    values = _nibbles(block[..., 8:]) | _fifth_bits(block[..., 4:8])
    return _scaled(values, 5, _half(block[..., :2]), _half(block[..., 2:4]))


def _q8_0(raw: Bytes) -> Affine:
    block = _blocks(raw, 34)
    scale = _half(block[..., :2])
    # MLX's integers are unsigned: flipping the sign bit adds 128.
    return _scaled(block[..., 2:] ^ 0x80, 8, scale, scale * np.float16(-128))


def _k_scales(block: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scales and offsets [rows, blocks, 8] of a Q4_K or Q5_K super-block: two f16, then 16 6-bit numbers.

    The products are rounded to f16 by the caller: an eighth of a percent of a step, where the step itself is
    the quantization.
    """
    super_scale, super_min = (_half(block[..., i : i + 2]).astype(np.float32) for i in (0, 2))
    low, middle, high = block[..., 4:8], block[..., 8:12], block[..., 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    mins = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=-1)
    return super_scale * scales, -super_min * mins


def _k_nibbles(packed: Bytes) -> Bytes:
    """[rows, blocks, 8, 32]: each run of 32 bytes holds two groups, low halves first."""
    runs = packed.reshape(*packed.shape[:2], 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=3).reshape(*packed.shape[:2], 8, 32)


def _q4_k(raw: Bytes) -> Affine:
    block = _blocks(raw, 144)
    return _scaled(_k_nibbles(block[..., 16:]), 4, *_k_scales(block))


def _q5_k(raw: Bytes) -> Affine:
    block = _blocks(raw, 176)
    fifth = (block[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return _scaled(_k_nibbles(block[..., 48:]) | fifth, 5, *_k_scales(block))


_AFFINE: dict[gguf.GGMLQuantizationType, Callable[[Bytes], Affine]] = {
    gguf.GGMLQuantizationType.Q4_0: _q4_0,
    gguf.GGMLQuantizationType.Q4_1: _q4_1,
    gguf.GGMLQuantizationType.Q5_0: _q5_0,
    gguf.GGMLQuantizationType.Q5_1: _q5_1,
    gguf.GGMLQuantizationType.Q8_0: _q8_0,
    gguf.GGMLQuantizationType.Q4_K: _q4_k,
    gguf.GGMLQuantizationType.Q5_K: _q5_k,
}


def _triple(values: Bytes, bits: int, scales: npt.NDArray[np.float16], offsets: npt.NDArray[np.float16]) -> Weight:
    if bits == 4:
        packed = values[:, ::2] | values[:, 1::2] << 4
    elif bits == 8:
        packed = np.ascontiguousarray(values)
    else:
        # A little-endian stream of bits, as MLX packs the widths that do not divide 32.
        stream = np.unpackbits(values[..., None], axis=-1, bitorder="little", count=bits)
        packed = np.packbits(stream.reshape(values.shape[0], -1), axis=-1, bitorder="little")
    return Weight(
        mx.array(packed.view(np.uint32)), mx.array(scales), mx.array(offsets), bits=bits, group_size=_GROUP
    )

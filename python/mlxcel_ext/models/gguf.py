"""Reading GGUF files: header, metadata, and tensors as the arrays that the models use."""

from __future__ import annotations

import mmap
import pathlib
import struct
from dataclasses import dataclass
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

from .gguf_blocks import AFFINE, Bytes, to_triple
from .weights import Weight

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


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
        raise ValueError(f"[gguf] {self.path}: {what} is an array of the unknown value type {item}.")


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
        parts = self.metadata.get("split.count")
        if parts is not None and parts != 1:
            raise ValueError(
                f"[gguf] {path}: one of {parts} parts of a model: join them first (llama-gguf-split --merge)."
            )
        headers = [self._read_header(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(
                f"[gguf] {path}: general.alignment must be a positive number, got {alignment!r}."
            )
        start = -(-cursor.pos // alignment) * alignment
        self.tensors = {header[0]: self._place(*header, start) for header in headers}

    def _read_header(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.text("a tensor name")
        num_dims = cursor.scalar("<I", name)
        if num_dims > _MAX_DIMS:
            raise ValueError(
                f"[gguf] {self.path}: tensor {name} has {num_dims} dimensions, at most 4 are possible."
            )
        dims = [cursor.scalar("<Q", name) for _ in range(num_dims)]
        return name, tuple(reversed(dims)), cursor.scalar("<I", name), cursor.scalar("<Q", name)

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int) -> TensorInfo:
        try:
            tensor_type = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise ValueError(
                f"[gguf] {self.path}: tensor {name} has the unknown quantization type {kind}."
            ) from None
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

        Block formats that are affine with one scale and offset per 32 weights become MLX's quantized triples;
        the remaining ones are dequantized to float16 by the `gguf` package.

        Parameters
        ----------
        name : str
            Name in the file.
        unpermute_heads : int
            Number of heads whose rows are to go back from the converter's interleaved order
            (rotary pairs in neighbouring rows) to halves; 0 leaves the rows alone.
        """
        info = self.tensors[name]
        self._data.madvise(mmap.MADV_DONTNEED)  # or the tensors read before stay resident beside their copies
        rows = info.shape[0] if len(info.shape) > 1 else 1
        raw = np.frombuffer(self._data, np.uint8, info.nbytes, info.offset).reshape(rows, -1)
        if unpermute_heads:
            # Vectors (biases) are permuted by element, matrices by whole rows of blocks.
            parts = raw if rows > 1 else raw.reshape(info.shape[-1], -1)
            pairs = parts.reshape(unpermute_heads, -1, 2, parts.shape[-1])
            raw = pairs.swapaxes(1, 2).reshape(raw.shape)
        if info.type in _DENSE:
            return Weight(_dense(raw, info))
        if info.type in AFFINE:
            return to_triple(AFFINE[info.type](raw))
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

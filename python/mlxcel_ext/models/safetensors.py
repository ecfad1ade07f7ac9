"""Weights of a folder of safetensors files, plain or quantized by MLX, in one file or in shards."""

from __future__ import annotations

import json
import pathlib
import struct

import mlx.core as mx

from .config import Quantization, read_json
from .weights import Weight

_INDEX = "model.safetensors.index.json"


class SafetensorsFolder:
    """The tensors of a folder by name. Data is read when it is used."""

    def __init__(self, folder: pathlib.Path, quantization: Quantization | None) -> None:
        self.path = folder
        self._quantization = quantization
        self._arrays: dict[str, mx.array] = {}
        for file in _files(folder):
            _check_size(file)
            try:
                arrays = mx.load(str(file))
            except RuntimeError as error:
                raise ValueError(f"[load] {file} cannot be read: {error}") from None
            assert isinstance(arrays, dict)
            self._arrays |= arrays

    def names(self) -> set[str]:
        """Names of the tensors, without the scales and offsets that belong to another one."""
        return {name for name in self._arrays if not self._is_part(name)}

    def read(self, name: str) -> Weight:
        """One tensor, which is then no longer kept here: joined copies would double the memory otherwise."""
        module = name.removesuffix(".weight")
        scales = self._arrays.pop(f"{module}.scales", None) if module != name else None
        if scales is None:
            return Weight(self._arrays.pop(name))
        rule = self._quantization.of(module) if self._quantization else None
        if rule is None:
            raise ValueError(
                f"[load] {self.path}: {name} has scales, but config.json does not say that it is quantized."
            )
        return Weight(
            self._arrays.pop(name),
            scales,
            self._arrays.pop(f"{module}.biases", None),
            rule.group_size,
            rule.bits,
            rule.mode,
        )

    def _is_part(self, name: str) -> bool:
        module, _, kind = name.rpartition(".")
        return kind in ("scales", "biases") and f"{module}.weight" in self._arrays


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    index = folder / _INDEX
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ValueError(
                f"[load] {folder} holds no .safetensors files (other weight formats are not supported)."
            )
        return found
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise ValueError(f"[load] {index}: weight_map must be an object, got {shards!r}.")
    files = [folder / name for name in sorted(set(shards.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"[load] {folder}: {_INDEX} names shards that are not there: {', '.join(missing)}.")
    return files


def _check_size(path: pathlib.Path) -> None:
    """A truncated file would fail only when it is read, in the middle of an evaluation."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(length))
        end = max(
            (info["data_offsets"][1] for name, info in header.items() if name != "__metadata__"), default=0
        )
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"[load] {path}: not a safetensors file, or a truncated one: {error}.") from None
    if 8 + length + end > size:
        raise ValueError(
            f"[load] {path}: the file is truncated: its tensors end at byte {8 + length + end}, but it has {size}. "
            "Download it again."
        )

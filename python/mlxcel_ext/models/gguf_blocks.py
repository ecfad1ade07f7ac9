"""From ggml's blocks to MLX's quantized triples, where each group of 32 weights is affine: w = scale * q + offset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .weights import Weight

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]

_U8 = np.uint8
_GROUP = 32
#: Width in which 5-bit weights are kept: bytes, for which there are compiled kernels.
_FIVE = 8


@dataclass(frozen=True)
class Affine:
    """Weights of one tensor as packed integers [rows, cols * bits / 8], scales and offsets [rows, cols / 32]."""

    packed: Bytes  # little-endian in each byte, as MLX packs
    bits: int
    scales: Halves
    offsets: Halves


def to_triple(blocks: Affine) -> Weight:
    """The same as MLX's packed words, scales and biases."""
    words = mx.array(np.ascontiguousarray(blocks.packed).view(np.uint32))
    return Weight(words, mx.array(blocks.scales), mx.array(blocks.offsets), _GROUP, blocks.bits)


def _blocks(raw: Bytes, size: int) -> Bytes:
    """[rows, blocks, bytes of a block]."""
    return raw.reshape(raw.shape[0], -1, size)


def _half(block: Bytes) -> Halves:
    """[rows, blocks, n] from pairs of bytes."""
    return np.ascontiguousarray(block).view(np.float16)


def _nibbles(run: Bytes) -> Bytes:
    """The weights of a run of bytes, one a byte: ggml has low halves first, then high halves."""
    return np.concatenate([run & 15, run >> 4], axis=-1)


def _repacked(run: Bytes) -> Bytes:
    """The same in as many bytes, neighbours together as MLX has them; pairs of bytes are moved at once."""
    pairs = np.ascontiguousarray(run).view(np.uint16)
    out = np.empty(run.shape, np.uint8)
    half = run.shape[-1] // 2
    for at, nibbles in ((0, pairs & 0x0F0F), (half, pairs >> 4 & 0x0F0F)):
        out[..., at : at + half] = nibbles | nibbles >> 4  # the cast keeps the low byte
    return out


def _fifth_bits(mask: Bytes) -> Bytes:
    """[rows, blocks, 32] of 16 or 0 from 4 bytes of bits."""
    return np.unpackbits(mask, axis=-1, bitorder="little") << _U8(4)


def _scaled(packed: Bytes, bits: int, scales: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> Affine:
    rows = packed.shape[0]
    half = [np.ascontiguousarray(a, np.float16).reshape(rows, -1) for a in (scales, offsets)]
    return Affine(packed.reshape(rows, -1), bits, half[0], half[1])


def _q4_0(raw: Bytes) -> Affine:
    block = _blocks(raw, 18)
    scale = _half(block[..., :2])
    return _scaled(_repacked(block[..., 2:]), 4, scale, scale * np.float16(-8))


def _q4_1(raw: Bytes) -> Affine:
    block = _blocks(raw, 20)
    return _scaled(_repacked(block[..., 4:]), 4, _half(block[..., :2]), _half(block[..., 2:4]))


def _q5_0(raw: Bytes) -> Affine:
    block = _blocks(raw, 22)
    scale = _half(block[..., :2])
    values = _nibbles(block[..., 6:]) | _fifth_bits(block[..., 2:6])
    return _scaled(values, _FIVE, scale, scale * np.float16(-16))


def _q5_1(raw: Bytes) -> Affine:
    block = _blocks(raw, 24)
    values = _nibbles(block[..., 8:]) | _fifth_bits(block[..., 4:8])
    return _scaled(values, _FIVE, _half(block[..., :2]), _half(block[..., 2:4]))


def _q8_0(raw: Bytes) -> Affine:
    block = _blocks(raw, 34)
    scale = _half(block[..., :2])
    # MLX's integers are unsigned: flipping the sign bit adds 128.
    return _scaled(block[..., 2:] ^ _U8(0x80), 8, scale, scale * np.float16(-128))


def _k_scales(block: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scales and offsets [rows, blocks, 8] of a Q4_K or Q5_K super-block: two f16, then 16 6-bit numbers.

    The caller rounds the products to f16, 2^-12 of their size: little beside the 2^-4 of the weights themselves.
    """
    super_scale, super_min = (_half(block[..., i : i + 2]).astype(np.float32) for i in (0, 2))
    low, middle, high = block[..., 4:8], block[..., 8:12], block[..., 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    mins = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=-1)
    return super_scale * scales, -super_min * mins


def _k_runs(block: Bytes) -> Bytes:
    """[rows, blocks, 4, 32]: each run of 32 bytes holds two groups, low halves first."""
    return block.reshape(*block.shape[:2], 4, 32)


def _q4_k(raw: Bytes) -> Affine:
    block = _blocks(raw, 144)
    return _scaled(_repacked(_k_runs(block[..., 16:])), 4, *_k_scales(block))


def _q5_k(raw: Bytes) -> Affine:
    block = _blocks(raw, 176)
    fifth = (block[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & _U8(1)) << _U8(4)
    values = _nibbles(_k_runs(block[..., 48:])).reshape(fifth.shape) | fifth
    return _scaled(values, _FIVE, *_k_scales(block))


#: The formats that are affine: from raw [rows, bytes] to Affine.
AFFINE: dict[gguf.GGMLQuantizationType, Callable[[Bytes], Affine]] = {
    gguf.GGMLQuantizationType.Q4_0: _q4_0,
    gguf.GGMLQuantizationType.Q4_1: _q4_1,
    gguf.GGMLQuantizationType.Q5_0: _q5_0,
    gguf.GGMLQuantizationType.Q5_1: _q5_1,
    gguf.GGMLQuantizationType.Q8_0: _q8_0,
    gguf.GGMLQuantizationType.Q4_K: _q4_k,
    gguf.GGMLQuantizationType.Q5_K: _q5_k,
}

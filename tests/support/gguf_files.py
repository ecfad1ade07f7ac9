"""Small GGUF files, written by the `gguf` package."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

#: Byte offsets of the super-block's scales.
_SCALES_AT = {
    gguf.GGMLQuantizationType.Q2_K: (80, 82),
    gguf.GGMLQuantizationType.Q3_K: (108,),
    gguf.GGMLQuantizationType.Q4_K: (0, 2),
    gguf.GGMLQuantizationType.Q5_K: (0, 2),
    gguf.GGMLQuantizationType.Q6_K: (208,),
}


def write(
    path: pathlib.Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[npt.NDArray[Any], gguf.GGMLQuantizationType]],
) -> pathlib.Path:
    """A file with these keys and tensors; a tensor's values are quantized to the type beside them."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (values, kind) in tensors.items():
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            dtype = np.float32 if kind == gguf.GGMLQuantizationType.F32 else np.float16
            writer.add_tensor(name, values.astype(dtype))
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantize(values: npt.NDArray[Any], kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    """Blocks of a type. For the K-quants, which the package cannot write, blocks of that type with random
    content: their values follow from the seed and the shape alone, not from `values`."""
    try:
        return gguf.quantize(values.astype(np.float32), kind)
    except NotImplementedError:
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(values.shape[-1])
        raw = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, nbytes), dtype=np.uint8)
        for at in _SCALES_AT[kind]:  # halves of about 1e-4, so that weights stay below one
            raw[..., at : at + 2] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
        return raw.reshape(*values.shape[:-1], -1)

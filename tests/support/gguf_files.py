"""Small GGUF files, written by the `gguf` package."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import pre_tokenizers

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


_NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
              "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
              "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
              "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}  # fmt: skip
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_model(
    path: pathlib.Path,
    config: Mapping[str, Any],
    weights: Mapping[str, npt.NDArray[Any]],
    kind: gguf.GGMLQuantizationType,
    metadata: Mapping[str, Any],
) -> pathlib.Path:
    """What a converter makes of a model: a Hugging Face configuration and weights by Hugging Face's names.

    Matrices are of type `kind`; `metadata` adds to and replaces the keys that follow from the configuration.
    """
    arch = config["model_type"]
    tensors = {}
    for name, value in weights.items():
        module, _, part = name.rpartition(".")
        rows = value
        for proj, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if arch == "llama" and module.endswith(proj):
                rows = (
                    value.reshape(config[heads], 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
                )
        tensors[_gguf_name(module, part)] = (rows, kind if rows.ndim == 2 else gguf.GGMLQuantizationType.F32)
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["head_dim"],
    }
    tokens = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    tokens += [f"<unused{i}>" for i in range(len(tokens), config["vocab_size"])]
    tokenizer = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "merges": ["a b"],
        "eos_token_id": 2,
    }
    values: dict[str, Any] = {"general.architecture": arch}
    values |= {f"{arch}.{key}": value for key, value in keys.items()}
    values |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    return write(path, values | dict(metadata), tensors)


def _gguf_name(module: str, part: str) -> str:
    if not module.startswith("model.layers."):
        return f"{_TOP[module]}.{part}"
    _, _, index, inner = module.split(".", 3)
    return f"blk.{index}.{_NAMES[inner]}.{part}"

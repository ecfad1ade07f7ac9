"""Tiny random models of each family: folders that mlx-lm made, and mlx-lm's own answers about them."""

from __future__ import annotations

import importlib
import json
import pathlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import tokenizers
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import decoders, models, pre_tokenizers

VOCAB = 320

_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # not hidden_size / num_attention_heads
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}

#: Configurations by name: the families, and the options that they share.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"model_type": "llama"},
    "llama-biases": _COMMON | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama3-rope": _COMMON | {"model_type": "llama", "rope_scaling": _LLAMA3_ROPE},
    "linear-rope": _COMMON | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "smollm": _COMMON
    | {
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "mistral-window": _COMMON
    | {
        "model_type": "mistral",
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen2": _COMMON
    | {
        "model_type": "qwen2",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_theta": 1e6,
        "head_dim": 64,
    },
    "qwen2-yarn": _COMMON
    | {"model_type": "qwen2", "num_attention_heads": 2, "num_key_value_heads": 2, "rope_scaling": _YARN_ROPE},
    "qwen3": _COMMON | {"model_type": "qwen3", "num_attention_heads": 5, "num_key_value_heads": 1},
}


def reference(config: dict[str, Any], *, bits: int = 0, seed: int = 0) -> nn.Module:
    """mlx-lm's model of a configuration with random weights, quantized in groups of 32 where bits is not 0."""
    name = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    # Norms and biases start as ones and small numbers: make all of them count.
    model.update(
        tree_map(lambda a: a + 0.2 * mx.random.normal(a.shape) if a.ndim == 1 else a, model.parameters())
    )
    if bits:
        nn.quantize(model, 32, bits)
    mx.eval(model.parameters())
    return model


def save(
    folder: pathlib.Path, config: dict[str, Any], model: nn.Module, *, bits: int = 0, shards: int = 1
) -> None:
    """The folder that mlx-lm and Hugging Face would write, with a byte-level tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    names = sorted(weights)
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
    else:
        placed = {
            name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)
        }
        for file in set(placed.values()):
            part = {name: weights[name] for name in names if placed[name] == file}
            mx.save_safetensors(str(folder / file), part)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    quantized = {"quantization": {"group_size": 32, "bits": bits}} if bits else {}
    (folder / "config.json").write_text(json.dumps(config | quantized))
    save_tokenizer(folder)


def save_tokenizer(folder: pathlib.Path) -> None:
    """Bytes as tokens, and a few special ones in front."""
    special = ["<unk>", "<s>", "</s>"]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": "</s>",
                "bos_token": "<s>",
                "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
            }
        )
    )


def reference_logits(model: nn.Module, tokens: list[int], num_prompt: int) -> npt.NDArray[np.float32]:
    """[len(tokens), vocab] from mlx-lm: a prefill of num_prompt tokens, and the rest one by one."""
    cache = make_prompt_cache(model)
    parts = [model(mx.array([tokens[:num_prompt]]), cache=cache)[0]]
    parts += [model(mx.array([[token]]), cache=cache)[0] for token in tokens[num_prompt:]]
    return np.array(mx.concatenate(parts).astype(mx.float32))


def as_float16(model: nn.Module) -> nn.Module:
    """The same with weights of half precision, as downloads have them."""
    model.update(tree_unflatten([(k, v.astype(mx.float16)) for k, v in tree_flatten(model.parameters())]))
    return model

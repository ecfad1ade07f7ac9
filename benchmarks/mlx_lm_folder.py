"""SmolLM2 as a folder that mlx-lm, lm-eval and others read, with the very weights of the GGUF file.

    python benchmarks/mlx_lm_folder.py OUT

The 4-bit and 8-bit codes are copied bit for bit; their scales are widened to f32, since MLX emulates half
precision on CPUs (0.1 token/s). Query and key rows stay in the file's interleaved order: rope_traditional.
"""

from __future__ import annotations

import json
import pathlib
import sys

import mlx.core as mx

from mlxcel_ext.models import ChatTemplate, Tokenizer, hub
from mlxcel_ext.models.gguf import GGUFFile

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "rope_theta": 100000,
    "rope_traditional": True,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "quantization": {"group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}},
}


def name_of(gguf_name: str) -> str:
    *layer, module, part = gguf_name.split(".")
    return (f"model.layers.{layer[1]}." if layer else "") + f"{NAMES[module]}.{part}"


def write(out: pathlib.Path) -> None:
    """Fill the folder; one that is complete is left alone."""
    if (out / "model.safetensors").exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    path = hub.resolve("smollm2")
    loaded = mx.load(str(path))
    assert isinstance(loaded, dict)
    weights = {
        name_of(name): value if value.dtype == mx.uint32 else value.astype(mx.float32)
        for name, value in loaded.items()
    }
    metadata = GGUFFile(path).metadata
    tokenizer = Tokenizer.from_gguf(metadata, path.name)
    template = ChatTemplate.from_gguf(metadata, tokenizer.special_tokens)
    assert template is not None
    tokenizer.backend.save(str(out / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": template.source,
        "model_max_length": 8192,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(described, indent=1))
    (out / "config.json").write_text(json.dumps(CONFIG, indent=1))
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))

"""The tensors of a GGUF file under Hugging Face's names and in Hugging Face's order of rows."""

from __future__ import annotations

import re

from .config import ModelConfig
from .gguf import GGUFFile
from .registry import ARCHITECTURES
from .weights import Weight

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFWeights:
    """The tensors of a GGUF file under Hugging Face's names."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.path = file.path
        self._file = file
        self._names = {self._translate(name): name for name in file.tensors}
        self._heads: dict[str, int] = {}
        if ARCHITECTURES[config.model_type].permuted_in_gguf:
            if config.rotary_dim != config.head_dim:
                raise ValueError(
                    f"[load] {file.path}: {config.model_type}.rope.dimension_count is {config.rotary_dim}, but heads "
                    f"have {config.head_dim}: partial rotation is not supported for this architecture."
                )
            self._heads = {"q_proj": config.num_qo_heads, "k_proj": config.num_kv_heads}

    def names(self) -> set[str]:
        return set(self._names)

    def read(self, name: str) -> Weight:
        module = name.split(".")[-2]
        return self._file.read(self._names[name], unpermute_heads=self._heads.get(module, 0))

    def _translate(self, name: str) -> str:
        """Hugging Face's name; a tensor that it does not know keeps its own, and is refused later."""
        match = _LAYER_NAME.fullmatch(name)
        if match and match[2] in _LAYER:
            return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
        module, _, kind = name.rpartition(".")
        return f"{_TOP[module]}.{kind}" if module in _TOP else name

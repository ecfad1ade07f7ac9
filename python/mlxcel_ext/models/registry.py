"""The model families, by the names that config.json and GGUF files use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """What a family's configuration files leave unsaid."""

    rope_theta: float = 10000.0
    qkv_bias: bool = False
    qk_norm: bool = False
    slides_by_default: bool = False
    #: GGUF converters reorder the rows of q and k from halves to interleaved pairs.
    permuted_in_gguf: bool = False


_LLAMA = Family(permuted_in_gguf=True)
_QWEN2 = Family(qkv_bias=True, rope_theta=1e6)
_QWEN3 = Family(qk_norm=True, rope_theta=1e6)

#: By config.json's model_type.
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(slides_by_default=True),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
}

#: By GGUF's general.architecture. Mistral and SmolLM files call themselves llama.
ARCHITECTURES: dict[str, Family] = {"llama": _LLAMA, "qwen2": _QWEN2, "qwen3": _QWEN3}

#: Sizes of heads, and query heads for each KV head, that the attention kernels know.
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
MAX_GROUP_SIZE = 32

"""Model configurations, from config.json and from GGUF metadata."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Quantization:
    """How the file says that its weights are quantized; `overrides` by module name, None for a dense one."""

    group_size: int
    bits: int
    mode: str = "affine"
    overrides: Mapping[str, Quantization | None] = field(default_factory=dict)

    def of(self, module: str) -> Quantization | None:
        return self.overrides.get(module, self)


@dataclass(frozen=True)
class ModelConfig:
    """Everything that the forward pass and the engine need to know of a model."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    #: The head is the embedding; None where the configuration leaves it to what the weights hold.
    tie_word_embeddings: bool | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    #: window_left of each layer: tokens to the left of its own that a query sees, -1 for all.
    windows: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    quantization: Quantization | None = None


class Fields:
    """Typed look-ups that name file and field when they fail."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values, self.source, self.prefix = values, source, prefix

    def integer(self, name: str, default: int | None = None, *, low: int = 1) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(
                f"[load] {self._where(name)} must be an integer of at least {low}, got {value!r}."
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"[load] {self._where(name)} must be a number above 0, got {value!r}.")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"[load] {self._where(name)} must be true or false, got {value!r}.")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise ValueError(f"[load] {self._where(name)} must be a string, got {value!r}.")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object; empty where it is missing or null."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"[load] {self._where(name)} must be an object, got {value!r}.")
        return value or {}

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Ids as configuration files write them: one, a list or null."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ValueError(f"[load] {self._where(name)} must be token ids, got {value!r}.")
        return tuple(dict.fromkeys(ids))

    def get(self, name: str) -> Any:
        """The value, or None where it is missing or null."""
        return self.values.get(self.prefix + name)

    def _get(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            if default is None:
                raise ValueError(f"[load] {self._where(name)} is missing.")
            return default
        return value

    def _where(self, name: str) -> str:
        return f"{self.source}: {self.prefix}{name}"


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"[load] {path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"[load] {path} must hold a JSON object, got {type(value).__name__}.")
    return value


def from_folder(folder: pathlib.Path, families: Mapping[str, Any]) -> ModelConfig:
    """Configuration of a Hugging Face or MLX folder.

    Parameters
    ----------
    folder : Path
        Holds config.json, and maybe generation_config.json.
    families : mapping
        `registry.FAMILIES`: the defaults of each model_type.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"[load] {folder} has no config.json: it is not a model folder.")
    values = read_json(path)
    f = Fields(values, str(path))
    model_type = f.text("model_type")
    if model_type not in families:
        raise ValueError(
            f"[load] {path}: model_type {model_type!r} is not supported. Known: {', '.join(sorted(families))}."
        )
    family = families[model_type]
    heads = f.integer("num_attention_heads")
    hidden = f.integer("hidden_size")
    head_dim = f.integer("head_dim", hidden // heads)
    layers = f.integer("num_hidden_layers")
    parameters = f.mapping("rope_parameters")
    rope = Fields(f.mapping("rope_scaling") or parameters, f"{path}: rope_scaling")
    theta = Fields(parameters if "rope_theta" in parameters else values, str(path))
    eos = f.token_ids("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos += Fields(read_json(generation), str(generation)).token_ids("eos_token_id")
    bias = f.boolean("attention_bias", False)
    return ModelConfig(
        model_type=model_type,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=f.integer("intermediate_size"),
        num_qo_heads=heads,
        num_kv_heads=_kv_heads(f, heads),
        head_dim=head_dim,
        vocab_size=f.integer("vocab_size"),
        max_position_embeddings=f.integer("max_position_embeddings", 4096),
        rms_norm_eps=f.number("rms_norm_eps", 1e-6),
        rope_theta=theta.number("rope_theta", family.rope_theta),
        rotary_dim=int(head_dim * rope.number("partial_rotary_factor", 1.0)),
        rope_scaling={
            k: v for k, v in rope.values.items() if k not in ("rope_theta", "partial_rotary_factor")
        },
        tie_word_embeddings=None
        if f.get("tie_word_embeddings") is None
        else f.boolean("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias or bias,
        output_bias=bias and not family.qkv_bias,
        mlp_bias=f.boolean("mlp_bias", False),
        qk_norm=family.qk_norm,
        windows=_windows(f, layers, family.slides_by_default),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        quantization=_quantization(f, path),
    )


def _kv_heads(f: Fields, heads: int) -> int:
    kv_heads = f.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(
            f"[load] {f.source}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})."
        )
    return kv_heads


def _windows(f: Fields, layers: int, by_default: bool) -> tuple[int, ...]:
    """A window of W tokens counts the query's own, so it sees W - 1 to the left."""
    if f.get("sliding_window") is None or not f.boolean("use_sliding_window", by_default or _has_types(f)):
        return (-1,) * layers
    window = f.integer("sliding_window") - 1
    kinds = f.get("layer_types")
    if kinds is None:
        first = f.integer("max_window_layers", 0, low=0)
        return tuple(window if i >= first else -1 for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"[load] {f.source}: layer_types must list {layers} layers, got {kinds!r}.")
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"[load] {f.source}: layer_types has {sorted(map(str, unknown))}, which is not supported."
        )
    return tuple(window if kind == "sliding_attention" else -1 for kind in kinds)


def _has_types(f: Fields) -> bool:
    return f.get("layer_types") is not None


def _quantization(f: Fields, path: pathlib.Path) -> Quantization | None:
    values = f.mapping("quantization")
    if not values:
        other = f.get("quantization_config")
        if other:
            method = other.get("quant_method", "unknown") if isinstance(other, dict) else other
            raise ValueError(
                f"[load] {path}: quantization_config of method {method!r} is not supported; "
                "MLX's own quantization is, and so is GGUF."
            )
        return None
    default = _one_quantization(Fields(values, f"{path}: quantization"))
    overrides = {
        name: None if value is False else _one_quantization(Fields(value, f"{path}: quantization.{name}"))
        for name, value in values.items()
        if value is False or isinstance(value, dict)
    }
    return Quantization(default.group_size, default.bits, default.mode, overrides)


def _one_quantization(f: Fields) -> Quantization:
    return Quantization(f.integer("group_size"), f.integer("bits"), f.text("mode", "affine"))


def from_gguf(
    metadata: Mapping[str, Any], tensors: Collection[str], source: str, architectures: Mapping[str, Any]
) -> ModelConfig:
    """Configuration from GGUF metadata; what it leaves unsaid (biases, a tied head), the tensors tell.

    Parameters
    ----------
    metadata : mapping
        Keys and values of the file.
    tensors : collection of str
        Names of its tensors.
    source : str
        The file's name, for errors.
    architectures : mapping
        `registry.ARCHITECTURES`: the family of each general.architecture.
    """
    arch = Fields(metadata, source).text("general.architecture")
    if arch not in architectures:
        raise ValueError(
            f"[load] {source}: general.architecture {arch!r} is not supported. "
            f"Known: {', '.join(sorted(architectures))}."
        )
    family = architectures[arch]
    f = Fields(metadata, source, f"{arch}.")
    heads, hidden = f.integer("attention.head_count"), f.integer("embedding_length")
    kv_heads = f.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise ValueError(
            f"[load] {source}: {arch}.attention.head_count ({heads}) must be a multiple of {kv_heads}."
        )
    if f.get("expert_count"):
        raise ValueError(f"[load] {source}: {arch}.expert_count: mixtures of experts are not supported.")
    layers = f.integer("block_count")
    head_dim = f.integer("attention.key_length", hidden // heads)
    window = f.integer("attention.sliding_window", 0, low=0)
    tokens = metadata.get("tokenizer.ggml.tokens")
    return ModelConfig(
        model_type=arch,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=f.integer("feed_forward_length"),
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=f.integer("vocab_size", len(tokens) if tokens else None),
        max_position_embeddings=f.integer("context_length"),
        rms_norm_eps=f.number("attention.layer_norm_rms_epsilon", 1e-5),
        rope_theta=f.number("rope.freq_base", 10000.0),
        rotary_dim=f.integer("rope.dimension_count", head_dim),
        rope_scaling=_gguf_rope(f),
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias=family.qkv_bias or "blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm=family.qk_norm,
        windows=(window - 1,) * layers,
    )


def _gguf_rope(f: Fields) -> dict[str, Any]:
    kind = f.text("rope.scaling.type", "none")
    if kind == "none":
        return {}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": f.number("rope.scaling.factor", 1.0)}
    if f.get("rope.scaling.original_context_length") is not None:
        scaling["original_max_position_embeddings"] = f.integer("rope.scaling.original_context_length")
    return scaling

"""From a name, folder or file to a model that is ready to run."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from . import config as configs
from . import hub
from .chat_template import ChatTemplate
from .config import ModelConfig
from .gguf import GGUFFile
from .gguf_weights import GGUFWeights
from .llama import Model
from .progress import Progress, reporter
from .registry import ARCHITECTURES, FAMILIES, HEAD_DIMS, MAX_GROUP_SIZE
from .safetensors import SafetensorsFolder
from .tokenizer import Tokenizer
from .weights import Weight

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass
class LoadedModel:
    """A model with all that turns text into its tokens and back."""

    model: Model
    tokenizer: Tokenizer
    config: ModelConfig
    name: str
    chat_template: ChatTemplate | None


def load(
    name_or_path: str, *, dtype: str = "auto", progress: bool | Callable[[int, int], None] = True
) -> LoadedModel:
    """Load a model.

    Parameters
    ----------
    name_or_path : str
        A known name (`hub.NAMES`), a folder with config.json and safetensors files, or a .gguf file.
    dtype : str
        Of activations and KV pages: "float32", "float16" or "bfloat16". "auto" is float32 on the CPU,
        where it is the fastest, and bfloat16 on a GPU. Weights stay as they are stored.
    progress : bool or callable
        True shows a bar on stderr; a callable gets (layers done, layers in all).

    Raises
    ------
    ValueError
        On an unknown name, an unsupported architecture or quantization, and on files that are truncated
        or inconsistent; the message names file and field.
    """
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"[load] dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}.")
    path = hub.resolve(name_or_path, progress=bool(progress))
    source: _Source
    if path.is_dir():
        config = configs.from_folder(path, FAMILIES)
        source = SafetensorsFolder(path, config.quantization)
        tokenizer = Tokenizer.from_folder(path)
        template = ChatTemplate.from_folder(path, tokenizer.special_tokens)
    else:
        file = GGUFFile(path)
        config = configs.from_gguf(file.metadata, file.tensors.keys(), str(path), ARCHITECTURES)
        source = GGUFWeights(file, config)
        tokenizer = Tokenizer.from_gguf(file.metadata, str(path))
        template = ChatTemplate.from_gguf(file.metadata, tokenizer.special_tokens)
        file.metadata.clear()  # the vocabulary's strings, before the weights come beside them
    _check_heads(config, path)
    weights = Weights(source)
    config = dataclasses.replace(
        config,
        tie_word_embeddings=weights.tied(config),
        eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + tokenizer.eos_token_ids)),
    )
    with reporter(progress, f"loading {path.name}") as step, _no_cache:
        model = build(config, weights, DTYPES[dtype] if dtype != "auto" else default_dtype(), step)
    return LoadedModel(model, tokenizer, config, name_or_path, template)


class _NoCache:
    """MLX lets go of buffers at once: those that weights are joined and packed from fit few others.

    The limit is the process's: the first of several loads at a time sets it, the last one puts it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._limit = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                mx.clear_cache()
                self._limit = mx.set_cache_limit(0)
            self._inside += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                mx.set_cache_limit(self._limit)


_no_cache = _NoCache()


def _check_heads(config: ModelConfig, path: pathlib.Path) -> None:
    if config.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(
            f"[load] {path}: heads of size {config.head_dim} are not supported (known: {known})."
        )
    group = config.num_qo_heads // config.num_kv_heads
    if group > MAX_GROUP_SIZE:
        raise ValueError(f"[load] {path}: {group} query heads share a KV head, at most {MAX_GROUP_SIZE} can.")


def default_dtype() -> mx.Dtype:
    """Of activations: float32 on the CPU, bfloat16 elsewhere."""
    return mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16


def build(config: ModelConfig, weights: Weights, dtype: mx.Dtype, step: Progress) -> Model:
    """Take every weight that the model has, and no other."""
    model = Model(config, weights, dtype, step)
    weights.refuse_rest(config)
    return model


class _Source(Protocol):
    path: pathlib.Path

    def names(self) -> set[str]: ...
    def read(self, name: str) -> Weight: ...


class Weights:
    """Tensors by Hugging Face's names, each taken once and checked against the shape that it must have."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._left = source.names()

    def take(self, name: str, *shape: int) -> Weight:
        if name not in self._left:
            raise ValueError(f"[load] {self._source.path}: the tensor {name} is missing.")
        self._left.remove(name)
        weight = self._source.read(name)
        if weight.shape != shape:
            raise ValueError(
                f"[load] {self._source.path}: the tensor {name} has shape {weight.shape}, but the configuration "
                f"wants {shape}."
            )
        return weight

    def vector(self, name: str, size: int, dtype: mx.Dtype) -> mx.array:
        return self.take(name, size).weight.astype(dtype)

    def rope_divisors(self, size: int) -> np.ndarray | None:
        """Divisors of the rotary frequencies, where the file brings them."""
        name = "rope_freqs.weight"
        return np.array(self.take(name, size).weight) if name in self._left else None

    def tied(self, config: ModelConfig) -> bool:
        if config.tie_word_embeddings is None:
            return "lm_head.weight" not in self._left
        return config.tie_word_embeddings

    def refuse_rest(self, config: ModelConfig) -> None:
        ignored = {name for name in self._left if name.endswith("rotary_emb.inv_freq")}
        if config.tie_word_embeddings:
            ignored.add("lm_head.weight")
        rest = sorted(self._left - ignored)
        if rest:
            raise ValueError(
                f"[load] {self._source.path}: {len(rest)} tensors do not belong to a {config.model_type} model as it "
                f"is configured: {', '.join(rest[:4])}{', ...' if len(rest) > 4 else ''}."
            )

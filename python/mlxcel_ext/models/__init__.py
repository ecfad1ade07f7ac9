"""Models: configuration, weights, tokenizers, chat templates, and the forward pass."""

from .batch import AttentionBatch
from .chat_template import ChatTemplate
from .config import ModelConfig
from .llama import Model
from .loader import LoadedModel, load
from .tokenizer import DecodeStream, Tokenizer

__all__ = [
    "AttentionBatch",
    "ChatTemplate",
    "DecodeStream",
    "LoadedModel",
    "Model",
    "ModelConfig",
    "Tokenizer",
    "load",
]

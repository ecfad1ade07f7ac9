"""Models: configuration, weights, tokenizers, chat templates, and the forward pass."""

from .batch import AttentionBatch
from .chat_template import ChatTemplate
from .config import ModelConfig
from .tokenizer import DecodeStream, Tokenizer

__all__ = ["AttentionBatch", "ChatTemplate", "DecodeStream", "ModelConfig", "Tokenizer"]

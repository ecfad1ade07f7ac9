"""The binary's side of models/decoder_stack.py: all layers of a llama-like decoder as one primitive."""

from __future__ import annotations

from .. import _ext

DecoderLayer = _ext.DecoderLayer
DecoderShape = _ext.DecoderShape
LayerStack = _ext.DecoderStack
PackedLinear = _ext.PackedLinear
StackLinear = _ext.StackLinear

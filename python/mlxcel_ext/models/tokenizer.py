"""Text to ids and back, from tokenizer.json or from GGUF metadata."""

from __future__ import annotations

import codecs
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers
import tokenizers.decoders

from . import gguf_tokenizer
from .config import read_json

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_UTF8 = codecs.getincrementaldecoder("utf-8")


#: Texts and ids beyond this length go through the library's batch calls, which let other threads run meanwhile.
LONG = 4096


class Tokenizer:
    """A tokenizer of the `tokenizers` package, with what serving needs around it.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
        The tokenizer itself.
    special_tokens : mapping
        "bos_token", "eos_token", ... to their texts, as chat templates use them.
    eos_token_ids : sequence of int
        Ids that end a generation.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        #: One more than the largest id.
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        #: Most characters that one token can stand for: a text of n times as many has more than n tokens.
        self.max_token_chars = max(map(len, vocabulary), default=1)
        self._to_bytes = _speller(tokenizer)
        self._bytes: dict[int, bytes] = {}  # of the tokens that were asked for: few of a vocabulary ever are
        self._strips_first_space = self._to_bytes is not None and _strips_first_space(tokenizer)

    @classmethod
    def from_folder(cls, folder: pathlib.Path) -> Tokenizer:
        """From tokenizer.json, with tokenizer_config.json for the names of the special tokens."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"[load] {folder} has no tokenizer.json.")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises Exception itself
            raise ValueError(f"[load] {path} cannot be read: {error}") from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        special: dict[str, str] = {}
        config = folder / "tokenizer_config.json"
        if config.is_file():
            values = read_json(config)
            for name in _SPECIAL_NAMES:
                value = values.get(name)
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    special[name] = text
        eos = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
        return cls(tokenizer, special, () if eos is None else (eos,))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str) -> Tokenizer:
        """From the tokenizer.ggml keys of a GGUF file."""
        return cls(*gguf_tokenizer.build(metadata, source))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Special tokens that are spelled out in it become their ids.

        add_special_tokens is whether the model's own beginning (and end) of a text are added; rendered
        chat templates bring them along and want False.
        """
        if not isinstance(text, str):
            raise ValueError(f"[encode] text must be a string, got {type(text).__name__}.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"[encode] text is not valid Unicode: {error}.") from None
        if len(text) > LONG:
            encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encodings[0].ids)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        if min(ids, default=0) < 0:
            raise ValueError(f"[decode] ids must not be negative, got {min(ids)}.")
        if len(ids) > LONG:
            return str(self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0])
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def decode_stream(self, skip_special_tokens: bool = True) -> DecodeStream:
        """An incremental decoder for one sequence."""
        return DecodeStream(self, skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None outside of it."""
        return self._tokenizer.id_to_token(token_id) if token_id >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; they need not be whole characters. Empty outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> bytes:
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if self._to_bytes is None:
            return self.decode([token_id], skip_special_tokens=False).encode("utf-8")
        return self._to_bytes(token)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a control token, which `skip_special_tokens` leaves out."""
        return token_id in self._special_ids

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers.Tokenizer`, for libraries that compile grammars for it."""
        return self._tokenizer


class DecodeStream:
    """Text of a growing sequence, piece by piece: characters come out when they are complete."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = _UTF8("replace")
        self._at_start = tokenizer._strips_first_space
        # Where the bytes of tokens are not known.
        self._by_text = tokenizers.decoders.DecodeStream(skip_special_tokens=skip_special_tokens)

    def step(self, token_id: int) -> str | None:
        """Text that this token completes, or None where there is none yet."""
        tokenizer = self._tokenizer
        if self._skip_special and token_id in tokenizer._special_ids:
            return None
        if tokenizer._to_bytes is None:
            return self._by_text.step(tokenizer.backend, token_id)
        text = self._utf8.decode(tokenizer.token_bytes(token_id))
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        return text or None

    def flush(self) -> str:
        """What is left when the sequence ends: U+FFFD for an incomplete character, or nothing."""
        return self._utf8.decode(b"", final=True)


def _speller(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes] | None:
    """From a token's spelling to its bytes, for the two kinds of decoders that work byte by byte; None for others."""
    kinds = {part["type"] for part in _decoder_parts(tokenizer)}
    if kinds == {"ByteLevel"}:
        return _byte_level
    if "ByteFallback" in kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return _byte_fallback
    return None


def _byte_level(token: str) -> bytes:
    byte_of = gguf_tokenizer.byte_of_char()
    try:
        return bytes([byte_of[c] for c in token])
    except KeyError:  # an added token that is spelled as plain text
        return token.encode("utf-8")


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(gguf_tokenizer.SPM_SPACE, " ").encode("utf-8")


def _decoder_parts(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    value = json.loads(decoder.__getstate__())
    return list(value["decoders"]) if value["type"] == "Sequence" else [value]


def _strips_first_space(tokenizer: tokenizers.Tokenizer) -> bool:
    return any(part["type"] == "Strip" and part.get("start") for part in _decoder_parts(tokenizer))

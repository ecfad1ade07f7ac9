"""Tokenizers from GGUF metadata: byte-level BPE (gpt2) and SentencePiece BPE (llama)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPM_SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut before the merges: by a pattern, or by gpt2's own with digits apart."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        if self.pattern is not None:
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(self.pattern), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return (
            pre_tokenizers.Sequence([pre_tokenizers.Digits(True), bytes_]) if self.single_digits else bytes_
        )


_QWEN2 = f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_LLAMA3 = f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_TEKKEN = f"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\\p{{N}}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n/]*|{_SPACES}"
_LLAMA_BPE = _PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True)

#: By tokenizer.ggml.pre.
PRE_TOKENIZERS: dict[str, _PreTokenizer] = {
    "gpt-2": _PreTokenizer(),
    "smollm": _PreTokenizer(single_digits=True),
    "qwen2": _PreTokenizer(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _PreTokenizer(_QWEN2),
    "llama-bpe": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "tekken": _PreTokenizer(_TEKKEN, ignore_merges=True, add_bos=True),
}

#: Control tokens that end a turn, whatever the file names as its end of sequence.
_ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")


def build(metadata: Mapping[str, Any], source: str) -> tuple[Tokenizer, dict[str, str], list[int]]:
    """`(tokenizer, special tokens by name, ids that end a generation)`.

    Raises
    ------
    ValueError
        Where a key is missing, or names a tokenizer that is not known.
    """
    tokens = _list(metadata, "tokens", str, source)
    types = [_NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = _list(metadata, "token_type", int, source)
    if len(types) != len(tokens):
        raise ValueError(
            f"[load] {source}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens."
        )
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, tokens, source)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(metadata, tokens, types, source)
    else:
        raise ValueError(
            f"[load] {source}: tokenizer.ggml.model {kind!r} is not supported. Known: gpt2, llama."
        )
    tokenizer.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, k in zip(tokens, types, strict=True)
            if k == _CONTROL
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    )
    special = {
        f"{name}_token": tokens[i]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (i := _id(metadata, key, tokens, source)) is not None
    }
    _frame(tokenizer, metadata, special, add_bos)
    ends = [_id(metadata, key, tokens, source) for key in ("eos", "eot", "eom")]
    ends += [i for i in map(tokenizer.token_to_id, _ENDS_OF_TURN) if i is not None and types[i] == _CONTROL]
    return tokenizer, special, [i for i in ends if i is not None]


@functools.cache
def byte_of_char() -> dict[str, int]:
    """Byte of each character of byte-level vocabularies: printable bytes stand for themselves, the others
    for the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], source: str) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"[load] {source}: tokenizer.ggml.pre {name!r} is not supported. Known: {', '.join(sorted(PRE_TOKENIZERS))}."
        )
    pre = PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "merges", str, source)]
    try:
        model = models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the package raises Exception itself
        raise ValueError(f"[load] {source}: tokenizer.ggml.merges do not fit the tokens: {error}") from None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, pre.add_bos


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], source: str
) -> tuple[Tokenizer, bool]:
    scores = _list(metadata, "scores", float, source)
    if len(scores) != len(tokens):
        raise ValueError(
            f"[load] {source}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens."
        )
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = _merges([(t, s) for t, s, k in zip(tokens, scores, types, strict=True) if k == _NORMAL])
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPM_SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPM_SPACE), spaces]) if prefix else spaces
    )
    parts: list[decoders.Decoder] = [
        decoders.Replace(SPM_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    tokenizer.decoder = decoders.Sequence(parts + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer, True


def _merges(scored: Sequence[tuple[str, float]]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best: every way to cut a token, best token first."""
    known = {token for token, _ in scored}
    ordered = sorted(scored, key=lambda item: -item[1])
    return [
        (token[:cut], token[cut:])
        for token, _ in ordered
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


def _frame(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], special: Mapping[str, str], add_bos: bool
) -> None:
    """Beginning and end of sequence, where the file wants them."""
    bos, eos = special.get("bos_token"), special.get("eos_token")
    first = [bos] if bos and metadata.get("tokenizer.ggml.add_bos_token", add_bos) else []
    last = [eos] if eos and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if first or last:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, "$B"],
            special_tokens=[(t, tokenizer.token_to_id(t)) for t in {*first, *last}],
        )


def _list(metadata: Mapping[str, Any], key: str, kind: type, source: str) -> list[Any]:
    """An array, whose elements have one type in these files."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list):
        raise ValueError(f"[load] {source}: tokenizer.ggml.{key} is missing.")
    if value and not isinstance(value[0], kind):
        raise ValueError(
            f"[load] {source}: tokenizer.ggml.{key} must be an array of {kind.__name__}, got {value[0]!r}."
        )
    return value


def _id(metadata: Mapping[str, Any], key: str, tokens: Sequence[str], source: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise ValueError(
            f"[load] {source}: tokenizer.ggml.{key}_token_id is {value!r}, but there are {len(tokens)} tokens."
        )
    return int(value)

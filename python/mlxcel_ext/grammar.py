"""Constrained output: which tokens a grammar allows next, by llguidance."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from .sampling_params import GrammarSpec

if TYPE_CHECKING:
    import llguidance


class GrammarError(ValueError):
    """A grammar cannot go on where the output has come to: its author's to know, not the engine's."""


class GrammarTokenizer(Protocol):
    """What grammars need of a tokenizer (models.Tokenizer has it)."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe; the vocabulary is prepared at the first use."""

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._prepared: llguidance.LLTokenizer | None = None

    def compile(self, spec: GrammarSpec) -> Grammar:
        """A fresh state at the start of the grammar; ValueError for a grammar that does not compile."""
        import llguidance

        spec.validate()
        text = _grammar_text(spec)
        with self._lock:
            if self._prepared is None:
                self._prepared = self._prepare()
        try:
            with _panics_as_errors():
                error = llguidance.LLMatcher.validate_grammar(text, self._prepared)
                if error and not error.startswith("WARNING"):
                    raise ValueError(f"[grammar] {spec.kind} does not compile: {_summary(error)}")
                matcher = llguidance.LLMatcher(self._prepared, text, log_level=0)
        except GrammarError as failure:
            raise ValueError(f"[grammar] {spec.kind} does not compile: {failure}") from None
        if matcher.is_error():
            raise ValueError(f"[grammar] {spec.kind} does not compile: {_summary(matcher.get_error())}")
        try:
            # Some grammars compile and fail at their first token: that is the client's to know, not the engine's.
            Grammar(matcher.deep_copy(), self._vocab_size).mask()
        except GrammarError as failure:
            raise ValueError(f"[grammar] {spec.kind} does not compile: {failure}") from None
        return Grammar(matcher, self._vocab_size)

    def _prepare(self) -> llguidance.LLTokenizer:
        import llguidance

        if not self._eos_token_ids:
            raise ValueError("[grammar] the model has no EOS token, so a grammar could never end.")
        vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids[0])
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
        )


class Grammar:
    """The state of one request's grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = (vocab_size + 31) // 32

    def mask(self) -> npt.NDArray[np.uint32]:
        """Bit i % 32 of word i // 32 says whether token i may come next; GrammarError where none may."""
        mask = np.zeros(self._words, np.uint32)
        with _panics_as_errors():
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        if not mask.any():
            raise GrammarError("[grammar] no token is allowed here.")
        return mask

    def accept(self, token_id: int) -> None:
        """Advance by a token that a mask allowed; GrammarError where the grammar fails on it."""
        with _panics_as_errors():
            accepted = self._matcher.consume_token(token_id)
        if not accepted:
            self._check()
            raise RuntimeError(f"[grammar] token {token_id} is not allowed here.")

    @property
    def finished(self) -> bool:
        """Nothing but the end may follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"[grammar] {_summary(self._matcher.get_error())}")


def allows_others(mask: npt.NDArray[np.uint32], token_ids: Sequence[int]) -> bool:
    """Whether a mask allows a token that is none of these."""
    others = mask.copy()
    for token_id in token_ids:
        others[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return bool(others.any())


@contextlib.contextmanager
def _panics_as_errors() -> Iterator[None]:
    """A panic in llguidance is a BaseException, which would end the engine's thread: make it a GrammarError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise GrammarError(f"[grammar] llguidance failed: {_summary(str(error))}") from None


class _Vocabulary:
    """The form in which llguidance takes a vocabulary."""

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._encode = tokenizer.encode
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.special_token_ids = [i for i in range(vocab_size) if tokenizer.is_special(i)]
        special = set(self.special_token_ids)
        # A special token is no text: an empty one is never allowed inside a grammar.
        self.tokens = [b"" if i in special else tokenizer.token_bytes(i) for i in range(vocab_size)]

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)


def _grammar_text(spec: GrammarSpec) -> str:
    import llguidance

    matcher = llguidance.LLMatcher
    if spec.kind == "json_object":
        return matcher.grammar_from_json_schema({"type": "object"})
    if spec.kind == "json_schema":
        schema = _parse_schema(spec.value)
        return matcher.grammar_from_json_schema(schema)
    if spec.kind == "regex":
        return matcher.grammar_from_regex(str(spec.value))
    if spec.kind == "choice":
        # One terminal, which the lexer matches: as rules, a few thousand exceed the parser's limits.
        words = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in spec.value if choice)
        start = "start: CHOICE" + (' | ""' if "" in spec.value else "") if words else 'start: ""'
        return matcher.grammar_from_lark(start + (f"\nCHOICE: {words}" if words else ""))
    return matcher.grammar_from_lark(str(spec.value))


def _parse_schema(value: str | tuple[str, ...]) -> dict[str, Any]:
    try:
        schema = json.loads(str(value))
    except json.JSONDecodeError as error:
        raise ValueError(f"[grammar] json_schema is not JSON: {error}.") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError(f"[grammar] json_schema must be an object; got {type(schema).__name__}.")
    return schema


def _summary(error: str) -> str:
    """The message without the parser's state, which follows it; what is wrong with a regex has a line of its own."""
    lines = error.strip().split("\n")
    reasons = [line.removeprefix("error:") for line in lines[1:] if line.startswith("error: ")]
    return lines[0][:300] + "".join(reasons[:1])

"""Texts of single tokens, for logprobs: exact bytes even where a token is half of a character."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from ..outputs import TokenLogprob
from .settings import TokenizerLike

#: JSON knows no infinity; OpenAI's and vLLM's servers write this for a token that cannot be drawn.
MIN_LOGPROB = -9999.0


class TokenText:
    """Looks tokens up by id and remembers them."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self.bytes_of = lru_cache(maxsize=1 << 16)(tokenizer.token_bytes)

    def text_of(self, token_id: int) -> str:
        """The token's text; one that is no whole UTF-8 reads bytes:\\xe6\\x97, as OpenAI writes it."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat_logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The `logprobs` of a chat choice."""
        return {
            "content": [
                {
                    **self._named(entry.token_id, entry.logprob),
                    "top_logprobs": [self._named(token_id, logprob) for token_id, logprob in entry.top],
                }
                for entry in entries
            ],
            "refusal": None,
        }

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.text_of(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(self.bytes_of(token_id)),
        }

    def completion_logprobs(
        self, token_ids: list[int], entries: list[TokenLogprob | None], offset: int
    ) -> tuple[dict[str, Any], int]:
        """The `logprobs` of a completion choice whose text begins at offset, and the offset after it.

        top_logprobs holds the alternatives asked for and the token itself. None: the first token of a
        prompt, which nothing predicts.
        """
        texts = [self.text_of(token_id) for token_id in token_ids]
        # A character belongs to the token that holds its first byte: continuation bytes count nothing.
        lengths = (sum(byte & 0xC0 != 0x80 for byte in self.bytes_of(token_id)) for token_id in token_ids)
        offsets = list(accumulate(lengths, initial=offset))
        return {
            "tokens": texts,
            "token_logprobs": [None if e is None else max(e.logprob, MIN_LOGPROB) for e in entries],
            "top_logprobs": [None if e is None else self._top(e) for e in entries],
            "text_offset": offsets[:-1],
        }, offsets[-1]

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        top = {self.text_of(token_id): max(logprob, MIN_LOGPROB) for token_id, logprob in entry.top}
        top.setdefault(self.text_of(entry.token_id), max(entry.logprob, MIN_LOGPROB))
        return top

    def prompt_logprobs(self, token_ids: list[int], entries: tuple[TokenLogprob | None, ...]) -> list[Any]:
        """vLLM's `prompt_logprobs`: for each prompt token, the candidates by id."""
        out: list[Any] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            if entry is None:
                out.append(None)
                continue
            ranked = {
                candidate: {
                    "logprob": max(logprob, MIN_LOGPROB),
                    "rank": rank,
                    "decoded_token": self.text_of(candidate),
                }
                for rank, (candidate, logprob) in enumerate(entry.top, 1)
            }
            ranked[token_id] = {
                "logprob": max(entry.logprob, MIN_LOGPROB),
                "rank": entry.rank,
                "decoded_token": self.text_of(token_id),
            }
            out.append({str(candidate): value for candidate, value in ranked.items()})
        return out

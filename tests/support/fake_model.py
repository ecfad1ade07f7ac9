"""A model of real arrays whose next token depends on every token that it finds in its pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import mlx.core as mx
import numpy as np

from mlxcel_ext.models.batch import AttentionBatch
from mlxcel_ext.ops import rope_append

VOCAB = 97
EOS = 0
_HEAD_DIM = 8
_PRIME = 1_000_003
_WEIGHTS = np.random.default_rng(7).integers(1, _PRIME, 8192)


class FakeModel:
    """Writes its tokens into the pages, reads the history back from them, and hashes it.

    A wrong page, a missing copy, a stale slot or a wrong position changes the answer. ``on_call`` sees the
    host's view of each call and may raise.
    """

    dtype = mx.float32
    attention_path = "fused_v2"
    kv_layout = "NHD"

    def __init__(
        self, max_len: int = 1024, on_call: Callable[[mx.array, AttentionBatch], None] | None = None
    ) -> None:
        self.config = SimpleNamespace(
            num_layers=1,
            num_qo_heads=1,
            num_kv_heads=1,
            head_dim=_HEAD_DIM,
            vocab_size=VOCAB,
            max_position_embeddings=max_len,
            eos_token_ids=(EOS,),
            windows=(),
        )
        self.on_call = on_call
        self._no_rotation = mx.zeros((0,))
        self._weights = mx.array(_WEIGHTS)
        self._ids = mx.arange(VOCAB)
        mx.eval(self._no_rotation, self._weights, self._ids)

    def __call__(self, tokens: mx.array, batch: AttentionBatch, kv: object) -> mx.array:
        if self.on_call is not None:
            self.on_call(tokens, batch)
        table, nnz = batch.table, tokens.shape[0]
        written = mx.broadcast_to(tokens.astype(mx.float32)[:, None, None], (nnz, 1, _HEAD_DIM))
        _, kv.k_pages[0], kv.v_pages[0] = rope_append(  # type: ignore[attr-defined]
            mx.zeros((nnz, 1, _HEAD_DIM)),
            written,
            written,
            kv.k_pages[0],  # type: ignore[attr-defined]
            kv.v_pages[0],  # type: ignore[attr-defined]
            table,
            batch.positions,
            inv_freq=self._no_rotation,
            qo_indptr=batch.qo_indptr,
        )
        counts = np.ones(table.batch, int) if batch.qo_indptr is None else np.diff(batch.qo_indptr)
        request = mx.array(np.repeat(np.arange(table.batch), counts))
        dense = np.zeros((table.batch, max(1, int(table.num_pages.max()))), np.int32)
        for i in range(table.batch):
            row = table.kv_indices[table.kv_indptr[i] : table.kv_indptr[i + 1]]
            dense[i, : row.size] = row
        positions = batch.positions
        if batch.logit_rows is not None:
            request, positions = request[batch.logit_rows], positions[batch.logit_rows]
        # Both pools hold the tokens: half of each is read.
        pages = mx.array(dense)[request]
        k, v = kv.k_pages[0], kv.v_pages[0]  # type: ignore[attr-defined]
        seen = (k[pages][..., 0, 0] + v[pages][..., 0, _HEAD_DIM - 1]) / 2
        seen = seen.reshape(request.shape[0], dense.shape[1] * table.page_size).astype(mx.int64)
        visible = mx.arange(seen.shape[1])[None] <= positions[:, None]
        mixed = mx.where(visible, (seen + 1) * self._weights[: seen.shape[1]][None], 0).sum(axis=-1) % _PRIME
        return _logits(mixed[:, None], self._ids[None], mx.float32)


def _logits(mixed: mx.array, ids: mx.array, dtype: mx.Dtype) -> mx.array:
    return ((ids * (1 + mixed % 100) + mixed // 100) % 101).astype(dtype) * 0.1


def next_token(history: Sequence[int]) -> int:
    """What the model answers greedily to these tokens."""
    mixed = int(((np.asarray(history) + 1) * _WEIGHTS[: len(history)]).sum() % _PRIME)
    return int(np.argmax((np.arange(VOCAB) * (1 + mixed % 100) + mixed // 100) % 101))


def generate(prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = True) -> list[int]:
    """The greedy answer to a prompt, alone and without any cache."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if not ignore_eos and tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


class FakeTokenizer:
    """Token i is the character chr(32 + i); EOS is special."""

    eos_token_ids = (EOS,)
    vocab_size = VOCAB

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) - 32 for c in text if 0 < ord(c) - 32 < VOCAB]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(32 + i) for i in ids if not (skip_special_tokens and i == EOS))

    def token_bytes(self, token_id: int) -> bytes:
        return chr(32 + token_id).encode()

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    def decode_stream(self, skip_special_tokens: bool = True) -> FakeStream:
        return FakeStream(self, skip_special_tokens)


class FakeStream:
    """Decodes token by token."""

    def __init__(self, tokenizer: FakeTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens

    def step(self, token_id: int) -> str | None:
        return self._tokenizer.decode([token_id], self._skip) or None

    def flush(self) -> str:
        return ""


def fake_loaded(
    max_len: int = 1024, on_call: Callable[[mx.array, AttentionBatch], None] | None = None
) -> SimpleNamespace:
    """What Engine takes, around a FakeModel."""
    model = FakeModel(max_len, on_call)
    return SimpleNamespace(
        model=model, tokenizer=FakeTokenizer(), config=model.config, name="fake", chat_template=None
    )

"""Prompts before they reach the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlxcel_ext.server.errors import ApiError
from mlxcel_ext.server.generation import tokenize


def state(encode: Any) -> Any:
    tokenizer = SimpleNamespace(encode=encode, max_token_chars=4)
    return SimpleNamespace(
        model=SimpleNamespace(tokenizer=tokenizer), engine=SimpleNamespace(max_model_len=10)
    )


async def test_a_text_that_cannot_fit_is_refused_unread() -> None:
    def encode(text: str, add_special_tokens: bool) -> list[int]:
        raise AssertionError("tokenized")

    with pytest.raises(ApiError, match="a prompt of 41 characters has more") as caught:
        await tokenize(state(encode), "x" * 41, True)
    assert caught.value.status == 400


async def test_a_text_that_may_fit_or_is_truncated_is_read() -> None:
    served = state(lambda text, add_special_tokens: [len(text)])
    assert await tokenize(served, "x" * 40, True) == [40]
    assert await tokenize(served, "x" * 640, True, truncated=True) == [640]
    with pytest.raises(ApiError, match="641 characters"):
        await tokenize(served, "x" * 641, True, truncated=True)

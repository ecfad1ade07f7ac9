"""Text comes out whole: complete characters, and never a part of a stop string."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mlxcel_ext.text import Detokenizer


class Bytes:
    """A stream whose tokens are bytes."""

    def __init__(self) -> None:
        import codecs

        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str | None:
        return self._decoder.decode(bytes([token_id])) or None

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def run(text: str, stop: tuple[str, ...], *, include: bool = False) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(Bytes(), stop, include_stop=include)
    pieces = []
    for byte in text.encode():
        pieces.append(detokenizer.push(byte))
        if detokenizer.stopped is not None:
            break
    pieces.append(detokenizer.finish())
    return pieces, detokenizer.stopped


@given(
    st.text(alphabet="abé日🙂", max_size=20),
    st.lists(st.text(alphabet="abé日🙂", min_size=1, max_size=4), max_size=3),
)
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    pieces, stopped = run(text, tuple(stops))
    sent = "".join(pieces)
    # The first stop string to be complete ends the text; of several complete at once, the one that began first.
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stops)]
    if not ends:
        assert (sent, stopped) == (text, None)
        return
    seen = text[: ends[0]]
    at = min(len(seen) - len(s) for s in stops if seen.endswith(s))
    assert sent == text[:at]
    assert stopped in stops
    with_stop, _ = run(text, tuple(stops), include=True)
    assert "".join(with_stop) == seen


@given(st.text(alphabet="xyz", max_size=30))
def test_nothing_of_a_stop_string_is_ever_sent(text: str) -> None:
    sent = ""
    detokenizer = Detokenizer(Bytes(), ("xyzzy",))
    for byte in text.encode():
        sent += detokenizer.push(byte)
        assert (
            not any(sent.endswith("xyzzy"[:n]) for n in range(1, 5))
            or detokenizer.stopped is not None
            or (not text.startswith(sent + "xyzzy"[1:]))
        )
        if detokenizer.stopped is not None:
            break
    assert "xyzzy" not in sent


def test_characters_come_out_whole() -> None:
    pieces, _ = run("日🙂", ())
    assert pieces == ["", "", "日", "", "", "", "🙂", ""]


def test_an_incomplete_character_is_replaced_at_the_end() -> None:
    detokenizer = Detokenizer(Bytes())
    assert detokenizer.push("é".encode()[0]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_held_text_is_sent_when_the_answer_ends() -> None:
    detokenizer = Detokenizer(Bytes(), ("abc",))
    assert [detokenizer.push(b) for b in b"xab"] == ["x", "", ""]
    assert detokenizer.finish() == "ab"


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_do_not_count_before_they_may(include: bool) -> None:
    detokenizer = Detokenizer(Bytes(), ("b",), include_stop=include)
    assert [detokenizer.push(b, may_stop=False) for b in b"abab"] == ["a", "b", "a", "b"]
    assert detokenizer.push(ord("b")) == ("b" if include else "")
    assert detokenizer.stopped == "b"

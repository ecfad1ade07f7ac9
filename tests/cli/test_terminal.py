"""`generate` and `chat` over the fake engine."""

from __future__ import annotations

import argparse
import io
import json
import pathlib
from collections.abc import Iterator

import pytest
from rich.console import Console

from mlxcel_ext import cli, flags
from mlxcel_ext.options import resolve
from mlxcel_ext.terminal import ChatSession

from ..server.fake_engine import FakeEngine, FakeModel, FakeTokenizer


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    fake = FakeEngine()
    fake.start()
    monkeypatch.setattr(cli, "load_engine", lambda options: (fake, FakeModel()))
    yield fake
    fake.shutdown()


def seen(engine: FakeEngine) -> list[str]:
    return [FakeTokenizer().decode(ids, skip_special_tokens=False) for ids, _ in engine.seen]


def test_generate_answers_through_the_template(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.replies["France"] = "Paris, né?"
    assert cli.main(["generate", "--stats", "--system-prompt", "Be brief.", "Capital of France?"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Paris, né?\n"
    assert "answer 12 tokens" in printed.err
    assert seen(engine) == ["<user>Be brief.<user>Capital of France?<assistant>"]
    assert engine.seen[0][1].temperature == 0


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_bad_value_is_refused_before_the_model_is_read(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(options: argparse.Namespace) -> None:
        raise AssertionError("the model was read")

    monkeypatch.setattr(cli, "load_engine", load)
    monkeypatch.setattr("sys.stdin", io.StringIO("a question"))
    assert cli.main([command, "--temperature", "-1"]) == 2
    assert f"mlxcel-ext {command}: [sampling] temperature" in capsys.readouterr().err


def test_generate_takes_several_raw_prompts(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--raw", "--max-tokens", "2", "ab", "cd"]) == 0
    assert capsys.readouterr().out == "==> ab\nab\n==> cd\ncd\n"


def test_generate_reads_stdin(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("xy\n"))
    assert cli.main(["generate", "--raw", "-n", "4"]) == 0
    assert capsys.readouterr().out == "xyxy\n"


@pytest.mark.parametrize("arguments", [[], ["-"], [""], ["a", "-"]])
@pytest.mark.parametrize("piped", ["", "\n"])
def test_an_empty_prompt_is_refused(
    engine: FakeEngine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    piped: str,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(piped))
    assert cli.main(["generate", *arguments]) == 2
    assert "the prompt is empty" in capsys.readouterr().err
    assert not engine.seen


@pytest.mark.parametrize("arguments", [["a" * 3000], ["ROWFAULT"], ["--temperature", "-1", "a"]])
def test_a_failure_is_one_line(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert cli.main(["generate", "--raw", *arguments]) == 2
    assert capsys.readouterr().err.startswith("mlxcel-ext generate: ")


def converse(engine: FakeEngine, *lines: str | type[BaseException]) -> tuple[str, ChatSession]:
    """What a chat prints when these lines are typed."""
    options = resolve(argparse.Namespace(max_tokens="20"), flags.CHAT, "chat")
    typed = iter(lines)

    def read(prompt: str) -> str:
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    out = io.StringIO()
    session = ChatSession(engine, FakeModel(), options, Console(file=out, width=200), read)
    assert session.run() == 0
    return out.getvalue(), session


def test_a_chat_remembers(engine: FakeEngine) -> None:
    engine.replies.update({"two": "second [b]answer[/b]", "one": "first"})
    printed, _session = converse(engine, "one", "two", "/stats")
    assert "first\nsecond [b]answer[/b]\n" in printed
    assert seen(engine)[1] == "<user>one<assistant>first<user>two<assistant>"
    assert "tokens generated" in printed


def test_commands(engine: FakeEngine, tmp_path: pathlib.Path) -> None:
    engine.replies["q"] = "a"
    path = tmp_path / "chat.json"
    printed, session = converse(
        engine,
        "/help",
        "q",
        "q2",
        "/undo",
        f"/save {path}",
        "/set temperature 0.7",
        "/set max_tokens 3",
        "/set colour red",
        "/set temperature hot",
        "/set top_p 9",
        "/nothing",
        KeyboardInterrupt,
        "/system Be kind.",
        "q3",
        "/reset",
        "/quit",
        "never",
    )
    assert json.loads(path.read_text()) == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    assert (session.params.temperature, session.params.max_tokens, session.params.top_p) == (0.7, 3, 1.0)
    assert printed.count("/set knows") == 1
    assert "/nothing is no command" in printed
    assert seen(engine)[-1] == "<user>Be kind.<user>q3<assistant>"
    assert session.messages == []


def test_a_failed_question_is_taken_back(engine: FakeEngine) -> None:
    printed, session = converse(engine, "ROWFAULT")
    assert "injected fault" in printed
    assert session.messages == []

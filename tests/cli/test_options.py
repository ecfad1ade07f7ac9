"""Flags, environment variables and files: one table, one order of precedence."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from typing import Any

import pytest

from mlxcel_ext import cli, flags
from mlxcel_ext.engine_config import EngineConfig
from mlxcel_ext.options import Option, add_options, resolve, size
from mlxcel_ext.server.settings import ServerSettings

TABLES = flags.COMMANDS


def parse(table: tuple[Option, ...], *arguments: str, command: str = "serve") -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser, table)
    return resolve(parser.parse_args(arguments), table, command, TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_names_and_aliases_do_not_clash_and_all_have_help(name: str) -> None:
    table = TABLES[name]
    spelled = [flag for option in table for flag in (option.flag, *option.aliases)]
    assert len(set(spelled)) == len(spelled)
    assert all(option.variable.startswith("MLXCEL_") and option.help for option in table)


def test_every_setting_of_engine_and_server_has_a_flag() -> None:
    names = {option.name for option in flags.SERVE}
    renamed = {
        "max_request_seconds": "request_timeout",
        "chat_template_kwargs": "default_chat_template_kwargs",
    }
    # Sending progress costs nothing and is not for operators to decide; max_choices follows the body limit.
    internal = {"prefill_progress", "max_choices"}
    settings = {field.name for kind in (EngineConfig, ServerSettings) for field in dataclasses.fields(kind)}
    assert {renamed.get(name, name) for name in settings - internal} <= names


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        "max-num-seqs = 1\nport = 1\npage_size = 8\nnum-prompts = 3\n[serve]\nhost = 'h'\nport = 2\n"
    )
    monkeypatch.setenv("MLXCEL_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("MLXCEL_PAGE_SIZE", "32")
    monkeypatch.setenv("MLXCEL_CONFIG", str(path))
    options = parse(flags.SERVE, "--parallel", "3")
    assert (options.max_num_seqs, options.page_size, options.port, options.host) == (3, 32, 2, "h")
    assert options.max_queue_depth == 256


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["some/folder"], "model", "some/folder"),
        (["--model", "m"], "model", "m"),
        (["-c", "100"], "max_model_len", 100),
        (["--prefill-step-size", "64"], "prefill_chunk_size", 64),
        (["--block-size", "32"], "page_size", 32),
        (["--kv-cache-dtype", "float32"], "kv_cache_dtype", "float32"),
        ([], "kv_cache_dtype", "auto"),
        (["--kv-cache-bytes", "1.5GiB"], "kv_cache_bytes", 3 * 2**29),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--no-cache-prompt"], "enable_prefix_caching", False),
        (["--api-key", "a, b"], "api_key", ("a", "b")),
        (["--api-key", "a", "--api-key", "b, c"], "api_key", ("a", "b", "c")),
        (["--default-chat-template-kwargs", '{"a": 1}'], "default_chat_template_kwargs", {"a": 1}),
        ([], "model", "smollm2"),
    ],
)
def test_spellings_of_the_peers(arguments: list[str], name: str, value: Any) -> None:
    assert getattr(parse(flags.SERVE, *arguments), name) == value


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MLXCEL_PORT", "http", "MLXCEL_PORT"),
        ("MLXCEL_PIPELINE", "perhaps", "MLXCEL_PIPELINE.*1, true, on, yes"),
        ("MLXCEL_LOG_FORMAT", "xml", "MLXCEL_LOG_FORMAT.*text, json"),
        ("MLXCEL_KV_CACHE_BYTES", "much", "MLXCEL_KV_CACHE_BYTES.*512M"),
        ("MLXCEL_DEFAULT_CHAT_TEMPLATE_KWARGS", "[]", "JSON object"),
        ("MLXCEL_REQUEST_TIMEOUT", "-1", "MLXCEL_REQUEST_TIMEOUT"),
        ("MLXCEL_REQUEST_TIMEOUT", "0", "above 0"),
        ("MLXCEL_KEEPALIVE_INTERVAL", "0", "above 0"),
        ("MLXCEL_MAX_NUM_SEQS", "2147483648", r"MLXCEL_MAX_NUM_SEQS.*\[1, 2147483647\]"),
        ("MLXCEL_SEED", "-1", "MLXCEL_SEED"),
        ("MLXCEL_WATERMARK", "nan", "MLXCEL_WATERMARK"),
        ("MLXCEL_API_KEY", " , ", "at least one key"),
        ("MLXCEL_API_KEY", "", "at least one key"),
        ("MLXCEL_HOST", " ", "0.0.0.0 is every network"),
        ("MLXCEL_CONFIG", "/nowhere.toml", "/nowhere.toml"),
    ],
)
def test_a_bad_value_names_its_source(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        parse(flags.SERVE)


@pytest.mark.parametrize(("flag", "value"), [("--api-key", ""), ("--host", ""), ("--max-num-seqs", "0")])
def test_an_empty_or_zero_flag_is_refused(flag: str, value: str) -> None:
    with pytest.raises(ValueError, match=flag):
        parse(flags.SERVE, flag, value)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("parallel = 3", "max_num_seqs", 3),
        ("ctx-size = 9\n[generate]\ntop-k = 3", "max_model_len", 9),
        ("api-key = ['a,b', 'c']", "api_key", ("a,b", "c")),
        ("[serve]\ndefault-chat-template-kwargs = {a = 1}", "default_chat_template_kwargs", {"a": 1}),
        ("[default-chat-template-kwargs]\na = 1", "default_chat_template_kwargs", {"a": 1}),
        ("pipeline = false\nmax-tokens = 4", "pipeline", False),
        ("pipeline = 0", "pipeline", False),
        ("kv-cache-bytes = 5\n[serve]\nkv-cache-bytes = '1k'", "kv_cache_bytes", 1000),
    ],
)
def test_a_file_has_the_types_of_toml(tmp_path: pathlib.Path, text: str, name: str, value: Any) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    assert getattr(parse(flags.SERVE, "--config", str(path)), name) == value


@pytest.mark.parametrize(
    "text",
    [
        *(
            "port = [",
            "[serve]\nprot = 1\n",
            "serve = 1",
            "port = 'x'",
            "port = [1]",
            "port = 1.5",
            "prot = 1",
        ),
        *("host = true", "port = {a = 1}", "api-key = []", "[server]\nport = 1", "port = 2024-01-01"),
    ],
)
def test_a_bad_file_is_named(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"c\.toml"):
        parse(flags.SERVE, "--config", str(path))


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0), ("1k", 1000), ("1KiB", 1024), ("2GB", 2 * 10**9), ("1.5M", 1_500_000)]
)
def test_sizes(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize("command", [["serve"], ["generate"], ["chat"], ["bench", "serve"], ["info"], []])
def test_help_names_the_variables(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with pytest.raises(SystemExit) as info:
        cli.main([*command, "--help"])
    assert info.value.code == 0
    text = capsys.readouterr().out
    if command and command != ["info"]:
        assert "[MLXCEL_MODEL]" in text


def test_info_prints_backends_and_switches(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert "cpu    available" in text
    assert "MLXCEL_FUSED_ADD_RMSNORM = on" in text
    assert cli.main(["info", "--json"]) == 0
    assert '"backends"' in capsys.readouterr().out


def test_a_bad_page_size_is_known_before_the_model_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--page-size", "3", "--model", "/nowhere"]) == 2
    assert "page_size must be a power of two" in capsys.readouterr().err


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert cli.main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_a_port_that_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--port", "99999"]) == 2
    assert "cannot listen on 127.0.0.1:99999" in capsys.readouterr().err

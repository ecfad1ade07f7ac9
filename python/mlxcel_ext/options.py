"""Command-line options as data: each is a flag, an MLXCEL_ environment variable and a key of --config.

A flag wins over the environment, the environment over the file, the file over the default.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from . import env

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def boolean(raw: str) -> bool:
    """A truth value as the kill switches spell it."""
    return env.parse_flag("value", raw)


def size(raw: str) -> int:
    """A number of bytes: 1048576, 512M (powers of ten), 2GiB (powers of two)."""
    match = _SIZE.fullmatch(raw.strip())
    if not match:
        raise ValueError(f"wants a number of bytes such as 1048576, 512M or 2GiB, got {raw!r}")
    power = "kmgt".index(match[2].lower()) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def count(raw: str) -> int:
    """An integer from 0 on."""
    value = int(raw)
    if value < 0:
        raise ValueError(f"wants an integer from 0 on, got {value}")
    return value


def positive(raw: str) -> int:
    """An integer from 1 on."""
    value = int(raw)
    if value < 1:
        raise ValueError(f"wants an integer from 1 on, got {value}")
    return value


def seconds(raw: str) -> float:
    """A duration that is finite and not negative."""
    value = float(raw)
    if not 0 <= value < float("inf"):
        raise ValueError(f"wants a number of seconds from 0 on, got {raw}")
    return value


def words(raw: str) -> tuple[str, ...]:
    """A list separated by commas."""
    return tuple(part.strip() for part in raw.split(",") if part.strip())


@dataclass(frozen=True)
class Option:
    """One setting of a command."""

    flag: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    positional: bool = False

    @property
    def name(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")

    @property
    def variable(self) -> str:
        return f"MLXCEL_{self.name.upper()}"

    def value(self, raw: str, source: str) -> Any:
        """The parsed value; a ValueError names where the text came from."""
        try:
            value = self.parse(raw)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
        if self.choices and value not in self.choices:
            raise ValueError(f"{source}: wants one of {', '.join(self.choices)}, got {raw!r}")
        return value

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        default = "" if self.default in (None, "", ()) else f" Default: {self.default}."
        text = f"{self.help}{default} [{self.variable}]".replace("%", "%%")
        common: dict[str, Any] = {"dest": self.name, "default": argparse.SUPPRESS, "help": text}
        if self.parse is boolean:
            parser.add_argument(self.flag, *self.aliases, action=argparse.BooleanOptionalAction, **common)
        else:
            parser.add_argument(self.flag, *self.aliases, metavar=self._metavar(), **common)
            if self.positional:
                parser.add_argument(
                    self.name,
                    nargs="?",
                    default=argparse.SUPPRESS,
                    metavar=self.name.upper(),
                    help=f"Same as {self.flag}.",
                )

    def _metavar(self) -> str:
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        return {"str": "TEXT"}.get(self.parse.__name__, self.parse.__name__.upper())


CONFIG = Option("--config", str, None, "TOML file with values for any of these options.")


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    for option in (*options, CONFIG):
        option.add_to(parser)


def resolve(args: argparse.Namespace, options: Iterable[Option], command: str) -> argparse.Namespace:
    """The value of every option, by flag, environment, file and default, in this order."""
    options = (*options, CONFIG)
    given = vars(args)
    config_path = given.get(CONFIG.name) or env.text(CONFIG.variable)
    from_file = _read_config(config_path, options, command) if config_path else {}
    values = {}
    for option in options:
        raw = given.get(option.name)
        if raw is not None:
            values[option.name] = raw if isinstance(raw, bool) else option.value(raw, option.flag)
        elif (variable := env.text(option.variable)) is not None:
            values[option.name] = option.value(variable, option.variable)
        else:
            values[option.name] = from_file.get(option.name, option.default)
    return argparse.Namespace(**values)


def _read_config(path: str, options: Iterable[Option], command: str) -> dict[str, Any]:
    """Values of a TOML file: top-level keys hold for every command, a table [serve] for that one."""
    try:
        document = tomllib.loads(pathlib.Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: {error}") from None
    table: Mapping[str, Any] = document.get(command, {})
    if not isinstance(table, dict):
        raise ValueError(f"--config {path}: {command} must be a table")
    shared = {key: value for key, value in document.items() if not isinstance(value, dict)}
    by_name = {option.name: option for option in options}
    values = {}
    for key, value in {**shared, **table}.items():
        option = by_name.get(key.replace("-", "_"))
        if option is None:
            if key in table:
                raise ValueError(f"--config {path}: {command} has no option {key!r}")
            continue  # a top-level key may belong to another command
        values[option.name] = option.value(_as_text(value), f"--config {path}: {key}")
    return values


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)

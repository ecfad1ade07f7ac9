"""Command-line options as data: each is a flag, an MLXCEL_ environment variable and a key of --config.

A flag wins over the environment, the environment over the file, the file over the default.
"""

from __future__ import annotations

import argparse
import json
import math
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


def _integer(raw: str, low: int, high: int) -> int:
    try:
        value = int(raw)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ValueError(f"wants an integer in [{low}, {high}], got {raw!r}")
    return value


def count(raw: str) -> int:
    """An integer from 0 on."""
    return _integer(raw, 0, 2**31 - 1)


def positive(raw: str) -> int:
    """An integer from 1 on."""
    return _integer(raw, 1, 2**31 - 1)


def seed(raw: str) -> int:
    """64 bits."""
    return _integer(raw, 0, 2**64 - 1)


def number(raw: str) -> float:
    """A finite number, or inf."""
    value = float(raw)
    if math.isnan(value):
        raise ValueError(f"wants a number, got {raw!r}")
    return value


def seconds(raw: str) -> float:
    """A duration that is finite and not negative."""
    value = float(raw)
    if not 0 <= value < math.inf:
        raise ValueError(f"wants a number of seconds from 0 on, got {raw!r}")
    return value


def interval(raw: str) -> float:
    """A duration that is finite and not zero."""
    value = seconds(raw)
    if not value:
        raise ValueError("wants a number of seconds above 0, got 0")
    return value


def words(raw: str) -> tuple[str, ...]:
    """A list separated by commas."""
    return tuple(part.strip() for part in raw.split(",") if part.strip())


def secrets(raw: str) -> tuple[str, ...]:
    """A list separated by commas that must not be empty: an unset variable must not open a server to all."""
    if not words(raw):
        raise ValueError("wants at least one key, got an empty text; leave it out for a server without keys")
    return words(raw)


LISTS = (words, secrets)


def address(raw: str) -> str:
    """A host, named: the empty text would be every network."""
    if not raw.strip():
        raise ValueError("wants an address, got an empty text; 0.0.0.0 is every network")
    return raw.strip()


def mapping(raw: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(raw)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"wants a JSON object, got {raw!r}")
    return value


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
        elif self.parse in LISTS:
            parser.add_argument(self.flag, *self.aliases, action="append", metavar=self._metavar(), **common)
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

    def toml_value(self, value: Any, source: str) -> Any:
        """The value of a TOML file: its own types, or the text that the flag takes."""
        if isinstance(value, bool) and self.parse is boolean:
            return value
        if isinstance(value, list) and self.parse in LISTS:
            self.value(",".join(map(str, value)), source)  # refused where the text would be
            return tuple(map(str, value))
        if isinstance(value, dict) and self.parse is mapping:
            return value
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"{source}: wants {self._metavar()}, got {value!r}")
        return self.value(str(value), source)


CONFIG = Option("--config", str, None, "TOML file with values for any of these options.")


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    for option in (*options, CONFIG):
        option.add_to(parser)


def resolve(
    args: argparse.Namespace,
    options: Iterable[Option],
    command: str,
    tables: Mapping[str, Iterable[Option]] | None = None,
) -> argparse.Namespace:
    """The value of every option, by flag, environment, file and default, in this order.

    tables are the options of all commands: a file may hold those of others too.
    """
    options = (*options, CONFIG)
    given = vars(args)
    config_path = given.get(CONFIG.name) or env.text(CONFIG.variable)
    from_file = _read_config(config_path, options, command, tables or {}) if config_path else {}
    values: dict[str, Any] = {}
    for option in options:
        raw = given.get(option.name)
        if isinstance(raw, list):  # the flag may be repeated
            values[option.name] = tuple(word for part in raw for word in option.value(part, option.flag))
        elif raw is not None:
            values[option.name] = raw if isinstance(raw, bool) else option.value(raw, option.flag)
        elif (variable := (env.given if option.parse is secrets else env.text)(option.variable)) is not None:
            values[option.name] = option.value(variable, option.variable)
        else:
            values[option.name] = from_file.get(option.name, option.default)
    return argparse.Namespace(**values)


def _read_config(
    path: str, options: Iterable[Option], command: str, tables: Mapping[str, Iterable[Option]]
) -> dict[str, Any]:
    """Values of a TOML file: top-level keys hold for every command, a table [serve] for that one.

    A key is a flag's name or alias; one that no command knows is an error.
    """
    try:
        document = tomllib.loads(pathlib.Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: {error}") from None
    table = document.pop(command, {})
    if not isinstance(table, dict):
        raise ValueError(f"--config {path}: {command} must be a table")
    by_key = _by_key(options)
    elsewhere = {key for table in tables.values() for key in _by_key(table)}
    values = {}
    for keys in (document, table):
        for key, value in keys.items():
            option = by_key.get(_key(key))
            if option is not None:
                values[option.name] = option.toml_value(value, f"--config {path}: {key}")
            elif keys is table or not (_key(key) in elsewhere or (isinstance(value, dict) and key in tables)):
                raise ValueError(f"--config {path}: {command} has no option {key!r}")
    return values


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _by_key(options: Iterable[Option]) -> dict[str, Option]:
    return {_key(name): option for option in options for name in (option.flag, *option.aliases)}

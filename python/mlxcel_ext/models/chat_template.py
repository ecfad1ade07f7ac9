"""Chat templates: Jinja in a sandbox, with the helpers that Hugging Face's templates expect."""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from .config import read_json


class ChatTemplate:
    """A compiled template.

    Parameters
    ----------
    source : str
        The template's text.
    special_tokens : mapping
        Variables such as bos_token that the template may use.
    tool_source : str, optional
        Another template for requests with tools.

    Raises
    ------
    ValueError
        On a syntax error.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, tool_source: str | None = None
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._template = _compile(source)
        self._tool_template = _compile(tool_source) if tool_source is not None else self._template

    @classmethod
    def from_folder(cls, folder: pathlib.Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """From chat_template.jinja or tokenizer_config.json; None where the model has none."""
        file = folder / "chat_template.jinja"
        if file.is_file():
            return cls(file.read_text(encoding="utf-8"), special_tokens)
        config = folder / "tokenizer_config.json"
        value = read_json(config).get("chat_template") if config.is_file() else None
        if value is None or isinstance(value, str):
            return cls(value, special_tokens) if value else None
        try:
            named = {entry["name"]: entry["template"] for entry in value}
            return cls(named["default"], special_tokens, tool_source=named.get("tool_use"))
        except (TypeError, KeyError):
            raise ValueError(
                f"[load] {config}: chat_template must be a string, or a list of names and templates with a default."
            ) from None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """From tokenizer.chat_template; None where the file has none."""
        source = metadata.get("tokenizer.chat_template")
        tools = metadata.get("tokenizer.chat_template.tool_use")
        if not isinstance(source, str | None) or not isinstance(tools, str | None):
            raise ValueError(
                f"[load] tokenizer.chat_template must be a string, got {source!r} and {tools!r}."
            )
        return cls(source, special_tokens, tool_source=tools) if source else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt for a conversation.

        Parameters
        ----------
        messages : sequence
            OpenAI's messages.
        tools : sequence, optional
            OpenAI's tools.
        add_generation_prompt : bool
            End with the beginning of the assistant's reply.
        **kwargs
            More variables for the template.

        Raises
        ------
        ValueError
            When the template fails, or refuses the messages.
        """
        template = self._tool_template if tools else self._template
        variables = {**self._special_tokens, **kwargs}
        variables |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return template.render(variables)
        except _Refused as error:
            raise ValueError(f"[chat_template] the template refuses the messages: {error}") from None
        except Exception as error:  # a template may raise whatever Python raises
            raise ValueError(
                f"[chat_template] the template failed: {type(error).__name__}: {error}"
            ) from error


class _Refused(Exception):
    """Raised by templates through raise_exception()."""


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's tokens for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    try:
        return _ENVIRONMENT.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"[chat_template] line {error.lineno}: {error.message}") from None


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()

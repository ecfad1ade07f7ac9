"""Errors that name the argument, for what never gets as far as an op's own checks."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


def argument_errors(op: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates an op: a value of a wrong type is a ValueError like any other bad value.

    The binding would raise a TypeError about all arguments at once. Nothing is looked at before something is
    wrong, so that a good call costs no more than one frame.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except (TypeError, AttributeError) as error:
                complaint = _complaint(function, args, kwargs)
                if complaint is None:
                    raise
                raise ValueError(f"[{op}] {complaint}") from error

        return call

    return decorate


def _complaint(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What is wrong with the first argument that does not fit its annotation."""
    try:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return None  # one is missing, or unknown: Python's own message names it
    hints = typing.get_type_hints(function)
    for name, value in arguments.items():
        if name in hints and not _fits(value, hints[name]):
            got = repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
            wanted = function.__annotations__[name]
            if isinstance(value, int) and hints[name] is int:
                wanted = "an int of 32 bits"
            return f"{name} must be {wanted}, got {got}."
    return None


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(_fits(value, option) for option in typing.get_args(hint))
    if hint is float:
        return isinstance(value, float | int | np.number) and not isinstance(value, np.complexfloating)
    if hint is int:
        return isinstance(value, int | np.integer) and -(2**31) <= int(value) < 2**31
    kind = typing.get_origin(hint) or hint
    if not isinstance(kind, type) or kind is bool or getattr(kind, "_is_protocol", False):
        return True  # any object has a truth value; array_like and the like are checked where they are read
    return isinstance(value, kind)

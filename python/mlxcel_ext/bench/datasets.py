"""Prompts of the benchmarks: random, with shared prefixes, or from a file."""

from __future__ import annotations

import argparse
import json
import pathlib
import random
from dataclasses import dataclass

from .client import Target

# Common words, of one token each in most vocabularies.
_TEXT = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city community
name president team minute idea body information back parent face others level office door health
person art war history party result change morning reason research girl guy moment air teacher force
education foot boy age policy music market sense nation plan college interest death experience
effect use class control field development role effort rate heart drug show leader light voice wife
police mind price report decision son view relationship town road arm difference value building
action season society tax director position player record paper space ground form event official
matter center
"""
WORDS = _TEXT.split()


@dataclass(frozen=True)
class Prompt:
    """One request: text or token ids, and how many tokens to generate."""

    content: str | list[int]
    output_tokens: int


class Source:
    """Makes prompts of a wanted length. With ids the length is exact; words are about a token each."""

    def __init__(self, ids: list[int] | None) -> None:
        self._ids = ids

    @classmethod
    async def detect(cls, target: Target, model: str, form: str, chat: bool) -> Source:
        """Token ids where the server tokenizes (`auto`), words otherwise; chats always take text."""
        if form == "text" or chat:
            return cls(None)
        status, body = await target.fetch(
            "POST",
            "/tokenize",
            {"model": model, "prompt": " " + " ".join(WORDS), "add_special_tokens": False},
        )
        if status == 200:
            return cls(sorted(set(json.loads(body)["tokens"])))
        if form == "ids":
            raise ValueError(f"--prompt-form ids wants a server with /tokenize; it answered {status}")
        return cls(None)

    def make(self, rng: random.Random, length: int) -> str | list[int]:
        if self._ids is None:
            return " ".join(rng.choices(WORDS, k=length))
        return rng.choices(self._ids, k=length)


def join(first: str | list[int], second: str | list[int]) -> str | list[int]:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first} {second}" if first and second else first or second
    assert isinstance(first, list)
    assert isinstance(second, list)
    return first + second


def _varied(rng: random.Random, length: int, ratio: float) -> int:
    return max(1, round(rng.uniform(length * (1 - ratio), length * (1 + ratio))))


def prompts(options: argparse.Namespace, source: Source, seed: int) -> list[Prompt]:
    """The prompts of one level. Other seeds give other prompts, so that no level finds its own in a cache."""
    rng = random.Random(seed)
    number, output = options.num_prompts, options.random_output_len
    ratio = options.random_range_ratio
    if not 0 <= ratio < 1:
        raise ValueError(f"--random-range-ratio wants a number in [0, 1), got {ratio}")
    if options.dataset_name == "custom":
        return _custom(options, rng)
    if options.dataset_name == "shared-prefix":
        prefixes = [
            source.make(rng, options.prefix_repetition_prefix_len)
            for _ in range(options.prefix_repetition_num_prefixes)
        ]
        length = options.prefix_repetition_suffix_len
    else:
        prefixes = [source.make(rng, options.random_prefix_len)]
        length = options.random_input_len
    out = []
    for index in range(number):
        own = source.make(rng, _varied(rng, length, ratio))
        out.append(Prompt(join(prefixes[index % len(prefixes)], own), _varied(rng, output, ratio)))
    return out


def _custom(options: argparse.Namespace, rng: random.Random) -> list[Prompt]:
    if not options.dataset_path:
        raise ValueError("--dataset-name custom wants --dataset-path FILE.jsonl")
    out = []
    try:
        lines = pathlib.Path(options.dataset_path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"--dataset-path {options.dataset_path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            out.append(Prompt(row["prompt"], int(row.get("output_tokens") or options.random_output_len)))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{options.dataset_path}:{number} must be an object with a prompt") from None
    if not out:
        raise ValueError(f"{options.dataset_path} holds no prompt")
    rng.shuffle(out)
    return [out[index % len(out)] for index in range(options.num_prompts)]

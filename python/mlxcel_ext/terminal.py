"""Answers in the terminal: one-off (`generate`) and as a conversation (`chat`)."""

from __future__ import annotations

import argparse
import itertools
import pathlib
import queue
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.markup import escape

from .outputs import RequestOutput
from .sampling_params import SamplingParams

_IDS = itertools.count()


def sampling(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        max_tokens=options.max_tokens,
        stop=options.stop,
    )


def stream(engine: Any, prompt_ids: list[int], params: SamplingParams) -> Iterator[RequestOutput]:
    """Outputs of one request as they come; leaving early cancels it. A failed one is a ValueError."""
    request_id = f"terminal-{next(_IDS)}"
    outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
    room = engine.max_model_len - len(prompt_ids)
    if params.max_tokens is not None and params.max_tokens > room > 0:
        params = replace(params, max_tokens=room)
    engine.submit(request_id, prompt_ids, params, outputs.put)
    try:
        while True:
            output = outputs.get()
            if output.finish_reason in ("error", "abort"):
                raise ValueError(output.error or "the request was aborted")
            yield output
            if output.finished:
                return
    finally:
        engine.cancel(request_id)


def _prompt_ids(loaded: Any, text: str, options: argparse.Namespace) -> list[int]:
    if options.raw or loaded.chat_template is None:
        return loaded.tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    if options.system_prompt:
        messages.insert(0, {"role": "system", "content": options.system_prompt})
    return loaded.tokenizer.encode(loaded.chat_template.render(messages), False)


def generate(engine: Any, loaded: Any, prompts: list[str], options: argparse.Namespace) -> int:
    """Print the answer to each prompt; several are headed by their prompts."""
    params = sampling(options)
    for prompt in prompts:
        if len(prompts) > 1:
            print(f"==> {prompt}")
        ids = _prompt_ids(loaded, prompt, options)
        started, first, last = time.monotonic(), None, None
        for output in stream(engine, ids, params):
            if output.token_ids and first is None:
                first = time.monotonic()
            sys.stdout.write(output.text)
            sys.stdout.flush()
            last = output
        print()
        if options.stats and first is not None and last is not None:
            decode = max(time.monotonic() - first, 1e-9)
            tokens = last.num_completion_tokens
            print(
                f"prompt {len(ids)} tokens in {first - started:.2f} s ({len(ids) / max(first - started, 1e-9):.1f}/s), "
                f"answer {tokens} tokens, {(tokens - 1) / decode:.1f}/s, {last.finish_reason}",
                file=sys.stderr,
            )
    return 0


@dataclass
class ChatSession:
    """A conversation: lines are messages, lines with a slash are commands."""

    engine: Any
    loaded: Any
    options: argparse.Namespace
    console: Console = field(default_factory=Console)
    read: Callable[[str], str] = input
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.loaded.chat_template is None:
            raise ValueError(
                f"{self.options.model} has no chat template: use generate --raw, or --chat-template FILE."
            )
        self.params = sampling(self.options)
        self.system = self.options.system_prompt
        self.tokens = 0
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/help": (self._help, "this list"),
            "/reset": (self._reset, "forget the conversation"),
            "/undo": (self._undo, "forget the last question and answer"),
            "/system": (self._system, "TEXT: set the system message and start anew"),
            "/set": (self._set, "NAME VALUE: temperature, top_p, top_k, min_p, max_tokens, seed"),
            "/save": (self._save, "FILE: write the conversation as JSON"),
            "/stats": (self._stats, "tokens so far and what the prefix cache saved"),
            "/quit": (self._quit, "leave (or Ctrl-D)"),
        }
        self._over = False

    def run(self) -> int:
        self.console.print(
            f"[bold]{escape(self.options.model)}[/bold] · /help for commands, Ctrl-C stops an answer"
        )
        while not self._over:
            try:
                line = self.read("> ").strip()
            except EOFError:
                break
            except KeyboardInterrupt:
                self.console.print()
                continue
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)
        return 0

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        entry = self._commands.get(name)
        if entry is None:
            self.console.print(f"[red]{escape(name)} is no command; /help lists them[/red]")
            return
        try:
            entry[0](rest.strip())
        except (ValueError, OSError) as error:
            self.console.print(f"[red]{escape(str(error))}[/red]")

    def _answer(self, text: str) -> None:
        """Stream an answer. A failure takes the question back out of the conversation."""
        self.messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self.system}] if self.system else []
        answer = ""
        try:
            ids = self.loaded.tokenizer.encode(
                self.loaded.chat_template.render([*system, *self.messages]), False
            )
            for output in stream(self.engine, ids, self.params):
                answer += output.text
                self.console.out(output.text, end="", highlight=False)
                self.tokens += len(output.token_ids)
        except KeyboardInterrupt:
            answer += " …"
        except (ValueError, RuntimeError) as error:
            self.messages.pop()
            self.console.print(f"[red]{escape(str(error))}[/red]")
            return
        self.console.print()
        self.messages.append({"role": "assistant", "content": answer})

    def _help(self, _: str) -> None:
        for name, (_command, text) in self._commands.items():
            self.console.print(f"  [bold]{name}[/bold] {escape(text)}")

    def _reset(self, _: str) -> None:
        self.messages.clear()

    def _undo(self, _: str) -> None:
        del self.messages[-2:]

    def _system(self, text: str) -> None:
        self.system = text or None
        self.messages.clear()

    def _set(self, text: str) -> None:
        name, _, raw = text.partition(" ")
        kinds: dict[str, Callable[[str], Any]] = {
            "temperature": float,
            "top_p": float,
            "top_k": int,
            "min_p": float,
            "max_tokens": int,
            "seed": int,
        }
        if name not in kinds:
            raise ValueError(f"/set knows {', '.join(kinds)}")
        params = replace(self.params, **{name: kinds[name](raw)})
        params.validate(self.loaded.tokenizer.vocab_size)
        self.params = params

    def _save(self, path: str) -> None:
        import json

        if not path:
            raise ValueError("/save wants a file name")
        pathlib.Path(path).expanduser().write_text(
            json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n"
        )

    def _stats(self, _: str) -> None:
        stats = self.engine.stats()
        self.console.print(
            f"{self.tokens} tokens generated; {stats.prefix_hit_tokens} of {stats.prefix_query_tokens} "
            f"prompt tokens came from the prefix cache"
        )

    def _quit(self, _: str) -> None:
        self._over = True

"""The mlxcel-ext command: serve, generate, chat, bench serve, tune cascade, info."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from . import flags
from .engine_config import EngineConfig
from .options import add_options, resolve
from .sampling_params import MAX_COUNT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlxcel-ext",
        description="LLM serving kernels as MLX primitives, under a small scheduler and an OpenAI-compatible server.",
        epilog="Every option is an environment variable too, named in brackets, and a key of --config FILE.toml.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, options: Sequence[flags.Option]) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        add_options(sub, options)
        return sub

    command("serve", "Serve a model over HTTP as OpenAI's API.", flags.SERVE)
    generate = command("generate", "Answer prompts and print the answers as they come.", flags.GENERATE)
    generate.add_argument("prompt", nargs="*", help="Prompts; - or none reads one from stdin.")
    command("chat", "Talk to a model in the terminal.", flags.CHAT)
    bench = commands.add_parser("bench", help="Measure a running server.")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND")
    bench_serve = kinds.add_parser("serve", help="Latency and throughput under load.", allow_abbrev=False)
    add_options(bench_serve, flags.BENCH)
    tune = commands.add_parser("tune", help="Measure what this machine's kernels cost, for their planners.")
    subjects = tune.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    cascade = subjects.add_parser("cascade", help="What decides when shared prefixes are attended together.")
    cascade.add_argument("--device", choices=["cpu", "gpu"], help="Default: the one that models run on.")
    info = commands.add_parser("info", help="Print versions, backends and CPU features.")
    info.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status. Errors of the user are one line on stderr."""
    args = _parser().parse_args(argv)
    run = {
        "serve": _serve,
        "generate": _generate,
        "chat": _chat,
        "bench": _bench,
        "tune": _tune,
        "info": _info,
    }[args.command]
    try:
        return run(args)
    except (ValueError, ConnectionError) as error:
        print(f"mlxcel-ext {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone: nothing is left to say, nor anywhere to say it
        return 141


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The engine's settings among the options: the names are the same."""
    given = vars(options)
    return EngineConfig(
        **{field.name: given[field.name] for field in fields(EngineConfig) if field.name in given}
    )


def load_engine(options: argparse.Namespace) -> tuple[Any, Any]:
    """Engine and model, started. Slow: reads the weights."""
    from . import models
    from .engine import Engine

    config = engine_config(options)
    loaded = models.load(options.model, dtype=options.dtype)
    if options.chat_template:
        loaded = replace(
            loaded, chat_template=_template(options.chat_template, loaded.tokenizer.special_tokens)
        )
    engine = Engine(loaded, config)
    engine.start()
    return engine, loaded


def _template(path: str, special_tokens: dict[str, str]) -> Any:
    from .models.chat_template import ChatTemplate

    try:
        with open(path, encoding="utf-8") as file:
            return ChatTemplate(file.read(), special_tokens)
    except OSError as error:
        raise ValueError(f"--chat-template {path}: {error.strerror}") from None


def _serve(args: argparse.Namespace) -> int:
    from .server.logs import set_up
    from .server.run import serve
    from .server.settings import ServerSettings

    options = resolve(args, flags.SERVE, "serve", flags.COMMANDS)
    engine_config(options)  # a bad value is known before the weights are read
    set_up(options.log_level, options.log_format)
    settings = ServerSettings(
        served_model_name=options.served_model_name or (options.model,),
        api_key=options.api_key,
        allowed_origins=options.allowed_origins,
        max_body_bytes=options.max_body_bytes,
        request_timeout=options.request_timeout,
        keepalive_interval=options.keepalive_interval,
        shutdown_timeout=options.shutdown_timeout,
        metrics_compat=options.metrics_compat,
        tool_call_parser=options.tool_call_parser if options.enable_auto_tool_choice else "none",
        scheduling_policy=options.scheduling_policy,
        chat_template_kwargs=options.default_chat_template_kwargs,
    )
    return serve(settings, lambda: load_engine(options), options.host, options.port)


def _generate(args: argparse.Namespace) -> int:
    from .terminal import generate, sampling

    options = resolve(args, flags.GENERATE, "generate", flags.COMMANDS)
    sampling(options).validate(MAX_COUNT)  # a bad value is known before the weights are read
    prompts = [_stdin() if prompt == "-" else prompt for prompt in args.prompt or ["-"]]
    if not all(prompts):
        raise ValueError("the prompt is empty: give one as an argument, or on stdin")
    engine, loaded = load_engine(options)
    try:
        return generate(engine, loaded, prompts, options)
    finally:
        engine.shutdown(drain=False)


def _stdin() -> str:
    """What is piped in, without the line feed that echo and editors end it with."""
    return sys.stdin.read().removesuffix("\n")


def _chat(args: argparse.Namespace) -> int:
    from .terminal import ChatSession, sampling

    options = resolve(args, flags.CHAT, "chat", flags.COMMANDS)
    sampling(options).validate(MAX_COUNT)
    engine, loaded = load_engine(options)
    try:
        return ChatSession(engine, loaded, options).run()
    finally:
        engine.shutdown(drain=False)


def _bench(args: argparse.Namespace) -> int:
    from .bench.serve import run

    return run(resolve(args, flags.BENCH, "bench", flags.COMMANDS))


def _tune(args: argparse.Namespace) -> int:
    import mlx.core as mx

    from .tune import tune_cascade

    device = mx.default_device() if args.device is None else mx.Device(getattr(mx.DeviceType, args.device))
    print(tune_cascade(device))
    return 0


def _info(args: argparse.Namespace) -> int:
    from .info import collect, render

    print(render(collect(), args.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The options of each command. Names are vLLM's where it has one; aliases are mlx-lm's, llama.cpp's and SGLang's."""

from __future__ import annotations

from dataclasses import replace

from .engine_config import KV_CACHE_DTYPES, EngineConfig
from .options import (
    Option,
    address,
    boolean,
    count,
    interval,
    mapping,
    number,
    positive,
    seconds,
    secrets,
    seed,
    size,
    words,
)

_ENGINE = EngineConfig()


MODEL = Option(
    "--model",
    str,
    "smollm2",
    "Name of a known model, folder, or .gguf file.",
    ("-m", "--model-path"),
    positional=True,
)
DTYPE = Option(
    "--dtype",
    str,
    "auto",
    "Type of activations.",
    choices=("auto", "float32", "float16", "bfloat16"),
)
CHAT_TEMPLATE = Option(
    "--chat-template",
    str,
    None,
    "File with a Jinja template that replaces the model's.",
    ("--chat-template-file",),
)

ENGINE = (
    Option(
        "--max-model-len",
        positive,
        None,
        "Most tokens of prompt plus output.",
        ("-c", "--ctx-size", "--context-length", "--max-kv-size"),
    ),
    Option(
        "--max-num-seqs",
        positive,
        _ENGINE.max_num_seqs,
        "Most requests in one step.",
        ("-np", "--parallel", "--decode-concurrency", "--max-running-requests"),
    ),
    Option(
        "--max-num-batched-tokens",
        positive,
        None,
        "Most tokens in one step.",
        ("-b", "--batch-size", "--max-prefill-tokens"),
    ),
    Option(
        "--prefill-chunk-size",
        positive,
        _ENGINE.prefill_chunk_size,
        "Most prompt tokens in one step; decode never waits for more.",
        ("-ub", "--ubatch-size", "--prefill-step-size", "--chunked-prefill-size"),
    ),
    Option(
        "--prefill-grant-interval",
        count,
        _ENGINE.prefill_grant_interval,
        "A parked prefill gets a chunk after at most that many decode steps; 0 turns this off.",
    ),
    Option("--mixed-steps", boolean, _ENGINE.mixed_steps, "Decode rows and prefill chunks share a launch."),
    Option(
        "--max-queue-depth",
        count,
        _ENGINE.max_queue_depth,
        "Most waiting requests; more get a 429.",
        ("--max-queued-requests",),
    ),
    Option(
        "--page-size", positive, _ENGINE.page_size, "Tokens of a KV page, a power of two.", ("--block-size",)
    ),
    Option(
        "--kv-cache-bytes",
        size,
        None,
        "Size of the KV pool, such as 2GiB; by default by the model and the memory.",
        ("--kv-cache-memory-bytes",),
    ),
    Option("--num-pages", positive, None, "Size of the KV pool in pages.", ("--num-gpu-blocks-override",)),
    Option(
        "--kv-cache-dtype",
        str,
        _ENGINE.kv_cache_dtype,
        "Type of keys and values in the pages; auto is float16 under float32 activations on CPU, else the activations'.",
        choices=KV_CACHE_DTYPES,
    ),
    Option(
        "--prompt-cache-bytes",
        size,
        None,
        "Most bytes that the prefix cache holds; by default the whole pool.",
    ),
    Option(
        "--enable-prefix-caching",
        boolean,
        _ENGINE.enable_prefix_caching,
        "Share the pages of equal prefixes.",
        ("--cache-prompt",),
    ),
    Option("--watermark", number, _ENGINE.watermark, "Share of the pages that admission leaves free."),
    Option("--pipeline", boolean, _ENGINE.pipeline, "Submit a step before the last one is read."),
    Option(
        "--max-step-failures",
        positive,
        _ENGINE.max_step_failures,
        "Failed steps in a row after which the engine gives up.",
    ),
    Option(
        "--stall-seconds",
        interval,
        _ENGINE.stall_seconds,
        "/health says dead while one step takes longer than that.",
    ),
    Option(
        "--batch-invariant",
        boolean,
        None,
        "Attention reduces in an order that depends on the request alone; by default on CPU.",
    ),
    Option("--seed", seed, _ENGINE.seed, "Seeds the requests that bring none."),
    Option("--threads", positive, None, "CPU threads; by default all.", ("-t",)),
)

SERVER = (
    Option("--host", address, "127.0.0.1", "Address to listen on; 0.0.0.0 is every network."),
    Option("--port", count, 8000, "Port to listen on; 0 takes a free one."),
    Option(
        "--served-model-name",
        words,
        (),
        "Names that requests may use, by commas; by default the model's.",
        ("-a", "--alias"),
    ),
    Option("--api-key", secrets, (), "Keys of which a request must bring one, by commas."),
    Option(
        "--allowed-origins",
        words,
        (),
        "CORS origins by commas, * for any; by default pages of this machine.",
        ("--cors-origins",),
    ),
    Option("--max-body-bytes", size, 4 * 2**20, "Larger request bodies are refused."),
    Option("--request-timeout", interval, None, "Seconds after which a request is ended."),
    Option("--keepalive-interval", interval, 5.0, "Seconds of silence after which a stream gets a comment."),
    Option("--shutdown-timeout", seconds, 30.0, "Seconds that requests have to finish after SIGTERM."),
    Option(
        "--metrics-compat",
        str,
        "vllm",
        "Repeat the metrics under another server's names.",
        choices=("vllm", "none"),
    ),
    Option(
        "--tool-call-parser",
        str,
        "auto",
        "Reader of tool calls.",
        choices=("auto", "hermes", "llama3_json", "mistral", "none"),
    ),
    Option(
        "--scheduling-policy",
        str,
        "fcfs",
        "Whether requests may say how urgent they are.",
        ("--schedule-policy",),
        choices=("fcfs", "priority"),
    ),
    Option("--enable-auto-tool-choice", boolean, True, "Read tool calls that the model chose to make."),
    Option(
        "--default-chat-template-kwargs",
        mapping,
        {},
        "JSON object of variables for the template.",
        ("--chat-template-kwargs", "--chat-template-args"),
    ),
    Option(
        "--log-level",
        str,
        "info",
        "Least level that is logged.",
        choices=("debug", "info", "warning", "error"),
    ),
    Option("--log-format", str, "text", "Form of the log's lines.", choices=("text", "json")),
)

SERVE = (MODEL, DTYPE, CHAT_TEMPLATE, *ENGINE, *SERVER)

#: On a terminal the answer is greedy unless asked otherwise, as with mlx-lm.
SAMPLING = (
    Option("--max-tokens", positive, 512, "Most tokens of an answer.", ("-n", "--n-predict")),
    Option("--temperature", number, 0.0, "0 is greedy.", ("--temp",)),
    Option("--top-p", number, 1.0, "Nucleus of this probability."),
    Option("--top-k", int, 0, "Likeliest tokens to draw from; 0 is all."),
    Option("--min-p", number, 0.0, "Least probability relative to the likeliest."),
    Option("--repetition-penalty", number, 1.0, "Above 1 discourages repetition."),
    Option("--stop", words, (), "Strings that end an answer, by commas."),
    Option("--system-prompt", str, None, "Text of the system message.", ("-sys",)),
)

_TERMINAL = (replace(MODEL, positional=False), DTYPE, CHAT_TEMPLATE, *ENGINE, *SAMPLING)
GENERATE = (
    *_TERMINAL,
    Option(
        "--raw",
        boolean,
        False,
        "Continue the prompt as it is, without the chat template.",
        ("--ignore-chat-template",),
    ),
    Option("--stats", boolean, False, "Print token counts and speed to stderr."),
)
CHAT = _TERMINAL

BENCH = (
    Option("--base-url", str, None, "Server to measure; wins over host and port.", ("--url",)),
    Option("--host", str, "127.0.0.1", "Address of the server."),
    Option("--port", positive, 8000, "Port of the server."),
    Option(
        "--endpoint",
        str,
        "/v1/completions",
        "Path to send to.",
        choices=("/v1/completions", "/v1/chat/completions"),
    ),
    Option("--model", str, None, "Model name to send; by default the server's first.", ("-m",)),
    Option("--api-key", str, None, "Key to send."),
    Option(
        "--dataset-name",
        str,
        "random",
        "Where prompts come from.",
        choices=("random", "shared-prefix", "custom"),
    ),
    Option(
        "--dataset-path", str, None, "JSONL file of the custom dataset: prompt, and output_tokens if wanted."
    ),
    Option("--num-prompts", positive, 100, "Requests at each level.", ("--num-prompt",)),
    Option("--random-input-len", positive, 128, "Prompt tokens of the random dataset.", ("--input-len",)),
    Option(
        "--random-output-len",
        positive,
        64,
        "Tokens to generate for each prompt.",
        ("--output-len", "--custom-output-len"),
    ),
    Option("--random-range-ratio", number, 0.0, "Lengths vary by this share up and down."),
    Option("--random-prefix-len", count, 0, "Tokens that all random prompts begin with."),
    Option(
        "--prefix-repetition-prefix-len",
        positive,
        512,
        "Tokens of a shared prefix.",
        ("--shared-prefix-len",),
    ),
    Option(
        "--prefix-repetition-suffix-len",
        positive,
        64,
        "Tokens after a shared prefix.",
        ("--shared-suffix-len",),
    ),
    Option(
        "--prefix-repetition-num-prefixes",
        positive,
        4,
        "Different shared prefixes.",
        ("--shared-num-prefixes",),
    ),
    Option("--request-rate", number, float("inf"), "Requests a second; inf sends all at once."),
    Option(
        "--burstiness", number, 1.0, "Shape of the gamma distribution of the gaps; 1 is a Poisson process."
    ),
    Option("--max-concurrency", words, (), "Requests in flight; several levels by commas, such as 1,2,4,8."),
    Option("--num-warmups", count, 1, "Requests before the measurement."),
    Option("--ignore-eos", boolean, True, "Generate the full length whatever the model says."),
    Option("--temperature", number, 0.0, "Temperature to send."),
    Option("--seed", seed, 0, "Seed of prompts and arrival times."),
    Option(
        "--prompt-form",
        str,
        "auto",
        "Send prompts as token ids or as text; auto asks the server.",
        choices=("auto", "ids", "text"),
    ),
    Option(
        "--metrics",
        words,
        (),
        "Counters of /metrics that must move, by commas; `all` scrapes without demands.",
    ),
    Option(
        "--percentile-metrics", words, ("ttft", "tpot", "itl", "e2el"), "Latencies to report percentiles of."
    ),
    Option("--metric-percentiles", words, ("99",), "Percentiles to report."),
    Option("--save-result", boolean, False, "Write a JSON file for each level."),
    Option("--save-detailed", boolean, False, "Put every request's numbers into the file."),
    Option("--result-dir", str, ".", "Folder of the files."),
    Option("--result-filename", str, None, "Name of the file."),
    Option("--metadata", words, (), "KEY=VALUE pairs for the file."),
    Option("--timeout", seconds, 600.0, "Seconds after which a request counts as failed."),
)

COMMANDS = {"serve": SERVE, "generate": GENERATE, "chat": CHAT, "bench": BENCH}

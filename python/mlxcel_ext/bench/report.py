"""Numbers of a level: vLLM's names in print and in JSON."""

from __future__ import annotations

import argparse
import datetime
import statistics
from typing import Any

from .client import Sample

_LABELS = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


def percentile(values: list[float], p: float) -> float:
    """Linear interpolation between the two nearest ranks."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * p / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(samples: list[Sample], duration: float, percentiles: list[float]) -> dict[str, Any]:
    """The result of one level; times in milliseconds, throughputs a second."""
    good = [sample for sample in samples if not sample.error]
    inputs = sum(sample.prompt_tokens for sample in good)
    outputs = sum(sample.output_tokens for sample in good)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(samples) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": sum(sample.cached_tokens for sample in good),
        "request_throughput": len(good) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
    }
    values = {
        "ttft": [sample.ttft for sample in good],
        "tpot": [tpot for sample in good if (tpot := sample.tpot) is not None],
        "itl": [gap for sample in good for gap in sample.itl],
        "e2el": [sample.latency for sample in good],
    }
    for name, seconds in values.items():
        ms = [value * 1e3 for value in seconds] or [0.0]
        result[f"mean_{name}_ms"] = statistics.fmean(ms)
        result[f"median_{name}_ms"] = statistics.median(ms)
        result[f"std_{name}_ms"] = statistics.pstdev(ms)
        for p in percentiles:
            result[f"p{p:g}_{name}_ms"] = percentile(ms, p)
    return result


def render(result: dict[str, Any], names: tuple[str, ...], percentiles: list[float]) -> str:
    """The result as the table that users of vLLM know."""

    def row(label: str, value: float) -> str:
        return (
            f"{label + ':':<42}{value:<12.2f}"
            if isinstance(value, float)
            else f"{label + ':':<42}{value:<12}"
        )

    lines = [f"{' Serving Benchmark Result ':=^54}", row("Successful requests", result["completed"])]
    if result["failed"]:
        lines.append(row("Failed requests", result["failed"]))
    if result.get("max_concurrency"):
        lines.append(row("Maximum request concurrency", result["max_concurrency"]))
    lines += [
        row("Benchmark duration (s)", result["duration"]),
        row("Total input tokens", result["total_input_tokens"]),
        row("Total cached input tokens", result["total_cached_tokens"]),
        row("Total generated tokens", result["total_output_tokens"]),
        row("Request throughput (req/s)", result["request_throughput"]),
        row("Output token throughput (tok/s)", result["output_throughput"]),
        row("Total token throughput (tok/s)", result["total_token_throughput"]),
    ]
    for name in names:
        title, short = _LABELS[name]
        lines.append(f"{' ' + title + ' ':-^54}")
        lines.append(row(f"Mean {short} (ms)", result[f"mean_{name}_ms"]))
        lines.append(row(f"Median {short} (ms)", result[f"median_{name}_ms"]))
        lines += [row(f"P{p:g} {short} (ms)", result[f"p{p:g}_{name}_ms"]) for p in percentiles]
    return "\n".join([*lines, "=" * 54])


def document(
    options: argparse.Namespace, result: dict[str, Any], samples: list[Sample], model: str, detailed: bool
) -> dict[str, Any]:
    """What --save-result writes."""
    out: dict[str, Any] = {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if options.endpoint.endswith("chat/completions") else "openai",
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": options.num_prompts,
        "dataset_name": options.dataset_name,
        "request_rate": "inf" if options.request_rate == float("inf") else options.request_rate,
        "burstiness": options.burstiness,
        **dict(pair.split("=", 1) for pair in options.metadata),
        **result,
    }
    if detailed:
        out |= {
            "input_lens": [sample.prompt_tokens for sample in samples],
            "output_lens": [sample.output_tokens for sample in samples],
            "ttfts": [sample.ttft for sample in samples],
            "itls": [sample.itl for sample in samples],
            "generated_texts": [sample.text for sample in samples],
            "errors": [sample.error for sample in samples],
        }
    return out

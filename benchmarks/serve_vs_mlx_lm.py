"""Our server against mlx_lm.server: same weights, same machine, one run, levels interleaved.

    python benchmarks/serve_vs_mlx_lm.py --folder /tmp/smollm2-mlx --out serve.jsonl
    python benchmarks/serve_vs_mlx_lm.py --model /models/llama-3.2-1b --levels 1,8,32 --out serve.jsonl

Without --model both serve SmolLM2, which is written to --folder in a form that mlx-lm reads; with it both read that
folder, on the device that MLX takes by default.

At each number of clients every server gets the same texts, one server after the other with the other one idle;
--rounds repeats the pair. Prints the ratio of output tokens a second, of medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import mlx_lm_folder
from servers import Server, ours, running


def measure(
    server: Server, model: str, level: int, seed: int, options: argparse.Namespace
) -> dict[str, float]:
    """One level of `bench serve` on one server."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(
                sys.executable,
                "-m",
                "mlxcel_ext",
                "bench",
                "serve",
                "--base-url",
                server.url,
                "--model",
                model,
            ),
            *(
                "--num-prompts",
                str(options.requests * level),
                "--max-concurrency",
                str(level),
                "--seed",
                str(seed),
            ),
            *("--random-input-len", str(options.input_len), "--random-output-len", str(options.output_len)),
            *("--prompt-form", "text", "--num-warmups", "1", "--timeout", "1200"),
            *("--save-result", "--result-dir", folder, "--result-filename", "r.json"),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result: dict[str, float] = json.loads(pathlib.Path(folder, "r.json").read_text())
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir(), "smollm2-mlx")
    )
    parser.add_argument("--model", help="Folder with safetensors that both servers read")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="Of our server")
    parser.add_argument("--levels", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=2, help="Requests for each client of a level")
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    model, folder = options.model or "smollm2", options.model or str(options.folder)
    if not options.model:
        mlx_lm_folder.write(options.folder)
    serve = ("--model", model, "--max-model-len", "2048", "--max-num-seqs", str(options.max_num_seqs))
    records = []
    with contextlib.ExitStack() as stack:
        servers = {
            "mlxcel-ext": (stack.enter_context(ours(*serve, "--served-model-name", "model")), "model"),
            "mlx_lm.server": (
                stack.enter_context(running("-m", "mlx_lm", "server", "--model", folder)),
                folder,
            ),
        }
        for level in map(int, options.levels.split(",")):
            speeds: dict[str, list[float]] = {name: [] for name in servers}
            ttfts: dict[str, list[float]] = {name: [] for name in servers}
            for round_number in range(options.rounds):
                for name, (server, name_there) in servers.items():
                    result = measure(server, name_there, level, 10_000 * level + round_number, options)
                    speeds[name].append(result["output_throughput"])
                    ttfts[name].append(result["median_ttft_ms"])
                    load = os.getloadavg()[0]
                    records.append(
                        {"server": name, "clients": level, "round": round_number, "load": load, **result}
                    )
            ours_speed, theirs = (statistics.median(speeds[name]) for name in servers)
            ours_ttft, their_ttft = (statistics.median(ttfts[name]) for name in servers)
            print(
                f"{level} clients: {ours_speed:8.2f} and {theirs:8.2f} output tokens/s, ratio {ours_speed / theirs:.2f}; "
                f"median TTFT {ours_ttft:.0f} and {their_ttft:.0f} ms",
                flush=True,
            )
    if options.out:
        options.out.write_text("".join(json.dumps(record) + "\n" for record in records))
    return 0


if __name__ == "__main__":
    sys.exit(main())

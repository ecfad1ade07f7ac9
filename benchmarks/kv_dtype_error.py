"""What 16-bit pages do to a model's predictions: SmolLM2 over windows of this project's documents, teacher-forced.

    PYTHONPATH=python:. python benchmarks/kv_dtype_error.py [--windows 8] [--tokens 512]

Each window is prefilled at once, with pages of each dtype under float32 activations. Prints, against float32 pages: the
root mean square and the largest difference of a logit, the mean Kullback-Leibler divergence (nats) of the next token's
distribution, at how many places the likeliest token is another, and the perplexities.
"""

from __future__ import annotations

import argparse
import pathlib
from types import SimpleNamespace

import mlx.core as mx
import numpy as np

from mlxcel_ext import PageTable, plan_attention
from mlxcel_ext.models import AttentionBatch, Model, load

PAGE = 16


def logits(model: Model, tokens: list[int], kv_dtype: mx.Dtype) -> np.ndarray:
    """[len(tokens), vocab] in float64."""
    config, pages = model.config, -(-len(tokens) // PAGE)
    shape = (pages, PAGE, config.num_kv_heads, config.head_dim)
    pools = [[mx.zeros(shape, kv_dtype) for _ in range(config.num_layers)] for _ in "kv"]
    indptr = np.array([0, len(tokens)], np.int32)
    table = PageTable.from_pages([list(range(pages))], [len(tokens)], PAGE)
    plan = plan_attention(table, indptr, num_qo_heads=config.num_qo_heads, num_kv_heads=config.num_kv_heads)
    positions = mx.arange(len(tokens), dtype=mx.int32)
    batch = AttentionBatch(positions, table, indptr, plan, None)
    out = model(mx.array(tokens, mx.int32), batch, SimpleNamespace(k_pages=pools[0], v_pages=pools[1]))
    return np.asarray(out, np.float64)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    loaded = load("smollm2", dtype="float32", progress=False)
    root = pathlib.Path(__file__).parents[1]
    text = "".join(path.read_text() for path in sorted(root.glob("docs/**/*.md")))
    ids = loaded.tokenizer.encode(text[: 8 * args.windows * args.tokens])
    sums: dict[str, list[np.ndarray]] = {}
    for begin in range(0, args.windows * args.tokens, args.tokens):
        window = ids[begin : begin + args.tokens]
        want = logits(loaded.model, window, mx.float32)
        exact = log_softmax(want)
        targets = np.arange(len(window) - 1), window[1:]
        for name in ("float32", "float16", "bfloat16"):
            got = logits(loaded.model, window, getattr(mx, name))
            own = log_softmax(got)
            found = [
                ((got - want) ** 2).mean(),
                np.abs(got - want).max(),
                (np.exp(exact) * (exact - own)).sum(axis=-1).mean(),
                (got.argmax(axis=-1) != want.argmax(axis=-1)).sum(),
                -own[targets].mean(),
            ]
            sums.setdefault(name, []).append(np.array(found))
    print("pages    | rms      | largest  | KL       | other argmax | perplexity")
    for name, rows in sums.items():
        square, largest, divergence, other, loss = np.array(rows).T
        print(
            f"{name:8} | {square.mean() ** 0.5:.2e} | {largest.max():.2e} | {divergence.mean():.2e} | "
            f"{int(other.sum())} of {args.windows * args.tokens} | {np.exp(loss.mean()):.4f}"
        )


if __name__ == "__main__":
    main()

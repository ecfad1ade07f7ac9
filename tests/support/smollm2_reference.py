"""What mlx-lm answers on SmolLM2's weights.

    python -m tests.support.smollm2_reference

records tests/models/data/smollm2_golden.json; that takes minutes, since MLX's CPU matmuls are slow.
"""

from __future__ import annotations

import json
import pathlib

import mlx.core as mx
import mlx.nn as nn
from benchmarks.mlx_lm_folder import CONFIG, name_of
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from mlxcel_ext.models import ChatTemplate, Tokenizer, hub
from mlxcel_ext.models.gguf import GGUFFile

GOLDEN = pathlib.Path(__file__).parents[1] / "models" / "data" / "smollm2_golden.json"
PROMPTS = {
    "What is the capital of France? Answer in one sentence.": 8,
    "Write a haiku about the sea.": 24,
    "List three prime numbers, then say why 9 is not one.": 24,
}


def reference(path: pathlib.Path) -> nn.Module:
    """mlx-lm's model on the file, by roads of its own: mx.load reads it, and interleaved rotation takes q and k
    in the order that they have there. Scales are widened to f32: MLX emulates half precision on CPUs."""
    loaded = mx.load(str(path))
    assert isinstance(loaded, dict)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    nn.quantize(
        model,
        class_predicate=lambda name, module: (
            hasattr(module, "to_quantized") and {"group_size": 32, "bits": 8 if "embed" in name else 4}
        ),
    )
    weights = [
        (name_of(name), value if value.dtype == mx.uint32 else value.astype(mx.float32))
        for name, value in loaded.items()
    ]
    model.load_weights(weights)
    return model


def greedy(model: nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    cache = make_prompt_cache(model)
    tokens, out = prompt, []
    while len(out) < num_tokens:
        out.append(int(mx.argmax(model(mx.array([tokens]), cache=cache)[0, -1]).item()))
        tokens = out[-1:]
    return out


def prompt_ids(path: pathlib.Path, question: str) -> list[int]:
    metadata = GGUFFile(path).metadata
    tokenizer = Tokenizer.from_gguf(metadata, path.name)
    template = ChatTemplate.from_gguf(metadata, tokenizer.special_tokens)
    assert template is not None
    return tokenizer.encode(
        template.render([{"role": "user", "content": question}]), add_special_tokens=False
    )


def main() -> None:
    path = hub.resolve("smollm2")
    model = reference(path)
    golden = []
    for question, num_tokens in PROMPTS.items():
        prompt = prompt_ids(path, question)
        golden.append({"question": question, "prompt": prompt, "reply": greedy(model, prompt, num_tokens)})
        print(golden[-1])
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in golden) + "\n]\n")


if __name__ == "__main__":
    main()

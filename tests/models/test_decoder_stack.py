"""All layers as one primitive against the same model op by op, on every device."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext.models.config import ModelConfig
from mlxcel_ext.models.llama import Model
from mlxcel_ext.models.weights import Weight
from tests.support.compare import to_numpy
from tests.support.generate import PagedRunner

VOCAB = 320


@pytest.fixture(autouse=True)
def default_device(stream) -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(stream)
    yield
    mx.set_default_device(before)


class RandomWeights:
    """Stands in for a checkpoint."""

    def __init__(self, rng: np.random.Generator, dtype: mx.Dtype, bits: int) -> None:
        self._rng, self._dtype, self._bits = rng, dtype, bits

    def take(self, name: str, *shape: int) -> Weight:
        dense = mx.array(self._rng.standard_normal(shape) * 0.1, mx.float32).astype(self._dtype)
        if self._bits and name != "model.embed_tokens.weight":
            return Weight(*mx.quantize(dense, 64, self._bits), 64, self._bits)
        return Weight(dense)

    def vector(self, name: str, size: int, dtype: mx.Dtype) -> mx.array:
        return mx.array(1.0 + 0.2 * self._rng.standard_normal(size), mx.float32).astype(dtype)

    def rope_divisors(self, size: int) -> None:
        return None


def config_of(**options: object) -> ModelConfig:
    return ModelConfig(
        **{
            "model_type": "llama",
            "num_layers": 3,
            "hidden_size": 192,
            "intermediate_size": 320,
            "num_qo_heads": 6,
            "num_kv_heads": 2,
            "head_dim": 64,
            "vocab_size": VOCAB,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rotary_dim": 64,
            "tie_word_embeddings": False,
            "windows": (-1, -1, -1),
        }
        | options
    )


def logits(model: Model, tokens: list[int], num_requests: int) -> np.ndarray:
    """Of a prefill of several lengths and of decode steps behind it."""
    runner = PagedRunner(model, num_pages=12 * num_requests)
    parts = [runner.step({str(i): tokens[: 3 + 7 * i % 120] for i in range(num_requests)})]
    parts += [runner.step({str(i): [token] for i in range(num_requests)}) for token in tokens[:3]]
    return to_numpy(mx.concatenate(parts))


@pytest.mark.parametrize("num_requests", [1, 8, 9, 32, 50, 65])
@pytest.mark.parametrize("bits", [0, 4])
def test_a_stack_is_its_layers(dtype, rng, bits, num_requests, monkeypatch):
    config = config_of(windows=(-1, 20, -1), qkv_bias=num_requests == 9, mlp_bias=num_requests == 9)
    tokens = rng.integers(0, VOCAB, 150).tolist()
    answers = []
    for switch in ("on", "off"):
        monkeypatch.setenv("MLXCEL_FUSED_LAYERS", switch)
        weights = RandomWeights(np.random.default_rng(5), dtype, bits)
        model = Model(config, weights, dtype, lambda done, total: None)
        answers.append(logits(model, tokens, num_requests))
    error = np.linalg.norm(answers[0] - answers[1]) / np.linalg.norm(answers[1])
    assert error < {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}[dtype]

"""The kill switches of a layer's kernels: each falls back to MLX's ops, with the same answers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext.models import load
from tests.support import tiny_model
from tests.support.generate import PagedRunner

TOKENS = np.random.default_rng(3).integers(0, tiny_model.VOCAB, 40).tolist()
SWITCHES = ["MLXCEL_PAGED_ATTENTION_V2", "MLXCEL_FUSED_ADD_RMSNORM", "MLXCEL_FUSED_ROPE_APPEND"]


@pytest.fixture(scope="module", params=["mistral-window", "qwen3", "qwen2-yarn"])
def folder(request, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    config = tiny_model.CONFIGS[request.param]
    tiny_model.save(path, config, tiny_model.reference(config))
    return str(path)


def logits(folder: str, kv_dtype: mx.Dtype) -> tuple[np.ndarray, str]:
    """A mixed step, a ragged one and decode steps of two requests."""
    model = load(folder, dtype="float32", progress=False).model
    runner = PagedRunner(model, kv_dtype=kv_dtype)
    parts = [
        runner.step({"a": TOKENS[:21], "b": TOKENS[5:9]}),
        runner.step({"a": TOKENS[21:24], "b": TOKENS[9:10]}),
    ]
    parts += [runner.step({"a": [token], "b": [token]}) for token in TOKENS[24:]]
    return np.array(mx.concatenate(parts)), model.attention_path


@pytest.mark.parametrize("kv_dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("off", [[name] for name in SWITCHES] + [SWITCHES])
def test_a_switch_changes_the_path_and_not_the_answer(folder, off, kv_dtype, monkeypatch):
    want, path = logits(folder, kv_dtype)
    assert path == "fused_v2"
    for name in off:
        monkeypatch.setenv(name, "off")
    got, path = logits(folder, kv_dtype)
    assert path == ("gather" if "MLXCEL_PAGED_ATTENTION_V2" in off else "fused_v2")
    assert not np.array_equal(got, want)  # other kernels ran
    # Where keys differ by an ulp of f32, some round to the next f16.
    tolerance = 2e-4 if kv_dtype == mx.float32 else 2e-3
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()

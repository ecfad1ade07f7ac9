"""The kill switches of a layer's kernels: each falls back to MLX's ops, with the same answers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import ops
from mlxcel_ext.models import load, unfused
from tests.conftest import DTYPES, devices
from tests.support import tiny_model
from tests.support.device import default_device
from tests.support.generate import PagedRunner

TOKENS = np.random.default_rng(3).integers(0, tiny_model.VOCAB, 40).tolist()
#: What each turns off, and what runs instead.
SWITCHES = {
    "MLXCEL_PAGED_ATTENTION_V2": ("ops.paged_attention", "unfused.gather_attention"),
    "MLXCEL_FUSED_ADD_RMSNORM": ("ops.add_rms_norm", "unfused.add_rms_norm"),
    "MLXCEL_FUSED_ROPE_APPEND": ("ops.rope_append", "unfused.rope_append"),
}


@pytest.fixture(scope="module", params=["mistral-window", "qwen3", "qwen2-yarn"])
def folder(request, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    config = tiny_model.CONFIGS[request.param]
    tiny_model.save(path, config, tiny_model.reference(config))
    return str(path)


@pytest.fixture
def called(monkeypatch) -> set[str]:
    """Which of the above have been called."""
    seen: set[str] = set()

    def watch(module: ModuleType, label: str) -> None:
        name = label.split(".")[1]
        original = getattr(module, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.add(label)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)

    for ours, instead in SWITCHES.values():
        watch(ops, ours)
        watch(unfused, instead)
    return seen


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


# 16-bit pages under float32 activations are the CPU's alone.
@pytest.mark.parametrize(
    ("stream", "kv_dtype"),
    [
        pytest.param(mx.gpu if device == "gpu" else mx.cpu, DTYPES[kv], id=f"{device}-{kv}")
        for device in devices()
        for kv in ("f32", "f16")
        if kv == "f32" or device == "cpu"
    ],
)
@pytest.mark.parametrize("off", [[name] for name in SWITCHES] + [list(SWITCHES)])
def test_a_switch_changes_the_path_and_not_the_answer(folder, off, stream, kv_dtype, called, monkeypatch):
    with default_device(stream):
        want, path = logits(folder, kv_dtype)
        assert path == "fused_v2"
        assert called <= {ours for ours, _ in SWITCHES.values()}  # none where all layers are one primitive
        called.clear()
        for name in off:
            monkeypatch.setenv(name, "off")
        got, path = logits(folder, kv_dtype)
    assert path == ("gather" if "MLXCEL_PAGED_ATTENTION_V2" in off else "fused_v2")
    assert called == {instead if name in off else ours for name, (ours, instead) in SWITCHES.items()}
    if stream == mx.cpu:  # a GPU's kernels may round and sum as MLX's do
        assert not np.array_equal(got, want)
    # Where keys differ by an ulp of f32, some round to the next f16.
    tolerance = 2e-4 if kv_dtype == mx.float32 else 2e-3
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()

"""The forward pass against mlx-lm on the same weights, over pages in shuffled order."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext.models import Model, load
from tests.support import tiny_model
from tests.support.generate import PagedRunner

NUM_PROMPT, NUM_DECODE = 45, 32
TOKENS = np.random.default_rng(7).integers(0, tiny_model.VOCAB, NUM_PROMPT + NUM_DECODE).tolist()
# Sums of f32 in another order, through three layers: 1e-6 of the largest logit was seen.
TOLERANCE = 5e-6


# Every configuration plain, and every family quantized.
CASES = [(name, 0) for name in tiny_model.CONFIGS] + [
    ("llama-biases", 4),
    ("smollm", 8),
    ("qwen2", 4),
    ("qwen3", 4),
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(request, tmp_path_factory) -> tuple[Model, np.ndarray]:
    """A model of ours, and mlx-lm's logits for TOKENS."""
    name, bits = request.param
    folder = tmp_path_factory.mktemp("model")
    config = tiny_model.CONFIGS[name]
    reference = tiny_model.reference(config, bits=bits)
    tiny_model.save(folder, config, reference, bits=bits)
    model = load(str(folder), dtype="float32", progress=False).model
    return model, tiny_model.reference_logits(reference, TOKENS, NUM_PROMPT)


def assert_logits_close(got: mx.array, want: np.ndarray, tolerance: float = TOLERANCE) -> None:
    got = np.array(got.astype(mx.float32))
    assert got.shape == want.shape
    worst = np.abs(got - want).max()
    assert worst <= tolerance * np.abs(want).max(), f"logits differ by {worst}, of {np.abs(want).max()}"


def test_prefill_and_decode_equal_mlx_lm(pair):
    model, want = pair
    runner = PagedRunner(model)
    parts = [runner.step({"a": TOKENS[:NUM_PROMPT]})]
    parts += [runner.step({"a": [token]}) for token in TOKENS[NUM_PROMPT:]]
    assert_logits_close(mx.concatenate(parts), want)


def test_chunks_and_batches_change_nothing(pair):
    """One request in chunks of 1, 16, 5, ... tokens, others beside it in every step."""
    model, want = pair
    runner = PagedRunner(model, page_size=8)
    parts, start = [], 0
    for step, size in enumerate([1, 16, 5, 2, 21]):
        others = {"b": TOKENS[step * 3 : step * 3 + 3], "c": [TOKENS[step]]}
        chunk = TOKENS[start : start + size]
        logits = runner.step({"b": others["b"], "a": chunk, "c": others["c"]})
        parts.append(logits[3 : 3 + size])
        start += size
    assert start == NUM_PROMPT
    parts += [runner.step({"c": [5], "a": [token]})[1:] for token in TOKENS[start : start + 4]]
    assert_logits_close(mx.concatenate(parts), want[: NUM_PROMPT + 4])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    config = tiny_model.CONFIGS["llama"]
    tiny_model.save(folder, config, tiny_model.reference(config))
    return folder


def test_logit_rows_are_rows_of_all(llama):
    model = load(str(llama), progress=False).model
    every = PagedRunner(model).step({"a": TOKENS[:9], "b": TOKENS[:4]})
    some = PagedRunner(model).step({"a": TOKENS[:9], "b": TOKENS[:4]}, rows=[8, 12, 0])
    assert mx.array_equal(some, every[mx.array([8, 12, 0])])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.01), ("bfloat16", 0.06)])
def test_half_precision_activations(llama, dtype, tolerance):
    exact, model = (load(str(llama), dtype=name, progress=False).model for name in ("float32", dtype))
    want = np.array(PagedRunner(exact).step({"a": TOKENS}))
    got = PagedRunner(model).step({"a": TOKENS})
    assert got.dtype == getattr(mx, dtype)
    assert_logits_close(got, want, tolerance)


def test_weights_stay_as_they_are_stored(tmp_path):
    """Loading needs the file's bytes, and those of one layer again where its parts are joined."""
    config = tiny_model.CONFIGS["qwen2"] | {"num_hidden_layers": 12}
    tiny_model.save(tmp_path, config, tiny_model.as_float16(tiny_model.reference(config)))
    stored = (tmp_path / "model.safetensors").stat().st_size
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    loaded = load(str(tmp_path), dtype="float32", progress=False)
    assert loaded.model.dtype == mx.float32
    assert mx.get_active_memory() - before < 1.05 * stored
    assert mx.get_peak_memory() - before < 1.2 * stored


def test_pools_are_written_in_place(llama):
    runner = PagedRunner(load(str(llama), progress=False).model)
    mx.eval(runner.step({"a": TOKENS[:20]}))
    mx.clear_cache()
    before = mx.get_active_memory()
    for token in TOKENS[20:60]:
        mx.eval(runner.step({"a": [token]}))
    assert mx.get_active_memory() - before < runner.kv.k_pages[0].nbytes // 4

"""All layers as one primitive: the bits of the single ops, in place, whatever the family."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext.models import Model, load
from mlxcel_ext.models.decoder_stack import DecoderStack
from tests.support import tiny_model
from tests.support.device import default_device
from tests.support.generate import PagedRunner

TOKENS = np.random.default_rng(5).integers(0, tiny_model.VOCAB, 60).tolist()
CASES = [(name, 0) for name in tiny_model.CONFIGS] + [("llama-biases", 4), ("smollm", 8), ("qwen3", 4)]


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    """Here any step runs as one primitive; a GPU takes decode steps of large layers alone."""
    with default_device(mx.cpu):
        yield


@pytest.fixture(scope="module", params=CASES, ids=str)
def folder(request, tmp_path_factory) -> str:
    name, bits = request.param
    path = tmp_path_factory.mktemp("model")
    config = tiny_model.CONFIGS[name]
    tiny_model.save(path, config, tiny_model.reference(config, bits=bits), bits=bits)
    return str(path)


def run(model: Model, kv_dtype: mx.Dtype | None = None) -> mx.array:
    """Prefill, a mixed step of which two rows have logits, and decode steps of two requests."""
    runner = PagedRunner(model, page_size=8, kv_dtype=kv_dtype)
    parts = [
        runner.step({"a": TOKENS[:21], "b": TOKENS[5:9]}),
        runner.step({"a": TOKENS[21:28], "b": TOKENS[9:10]}, rows=[6, 7]),
    ]
    parts += [runner.step({"a": [token], "b": [token]}) for token in TOKENS[28:40]]
    return mx.concatenate(parts)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("float32", None),
        ("float16", None),
        ("bfloat16", None),
        ("float32", mx.float16),
        ("float32", mx.bfloat16),
    ],
)
def test_the_stack_has_the_bits_of_the_single_ops(folder, dtype, kv_dtype, monkeypatch):
    stacked = load(folder, dtype=dtype, progress=False).model
    monkeypatch.setenv("MLXCEL_FUSED_LAYERS", "off")
    single = load(folder, dtype=dtype, progress=False).model
    calls = []
    original = DecoderStack.__call__
    monkeypatch.setattr(DecoderStack, "__call__", lambda *a: calls.append(1) or original(*a))
    want = run(single, kv_dtype)
    assert not calls
    got = run(stacked, kv_dtype)
    assert len(calls) == 14
    assert mx.array_equal(got, want)


def test_a_prompt_of_several_parts_has_the_bits_of_the_single_ops(folder, monkeypatch):
    """Behind attention at most 384 rows go through a layer at a time."""
    tokens = (TOKENS * 14)[:801]

    def run(model: Model) -> mx.array:
        runner = PagedRunner(model, num_pages=100)
        step = {"a": tokens[:700], "b": tokens[100:]}  # 1401 rows: parts of 351
        rows = list(range(3, 1401, 2))  # 699: parts of 350
        return mx.concatenate([runner.step(step, rows=rows), runner.step({"a": tokens[700:], "b": [1]})])

    stacked = load(folder, progress=False).model
    monkeypatch.setenv("MLXCEL_FUSED_LAYERS", "off")
    assert mx.array_equal(run(stacked), run(load(folder, progress=False).model))


@pytest.mark.parametrize("fused", ["on", "off"])
def test_the_layout_of_pages_changes_no_bit(folder, fused, monkeypatch):
    monkeypatch.setenv("MLXCEL_FUSED_LAYERS", fused)
    model = load(folder, progress=False).model
    assert model.kv_layout == "HND"
    got = run(model)
    model.kv_layout = "NHD"
    assert mx.array_equal(got, run(model))


@pytest.fixture(scope="module")
def stacked(tmp_path_factory) -> Model:
    path = tmp_path_factory.mktemp("llama")
    config = tiny_model.CONFIGS["llama"]
    tiny_model.save(path, config, tiny_model.reference(config))
    return load(str(path), dtype="float32", progress=False).model


def test_pools_share_their_buffers_over_steps(stacked):
    runner = PagedRunner(stacked)
    mx.eval(runner.step({"a": TOKENS[:20]}))
    addresses = [np.array(pool, copy=False).ctypes.data for pool in (*runner.kv.k_pages, *runner.kv.v_pages)]
    for token in TOKENS[20:40]:
        mx.eval(runner.step({"a": [token]}))
    after = [np.array(pool, copy=False).ctypes.data for pool in (*runner.kv.k_pages, *runner.kv.v_pages)]
    assert after == addresses


def test_a_prefill_chunk_without_logits_fills_the_pages(stacked):
    """An empty array of rows has no data pointer; it once meant all rows."""
    want, got = PagedRunner(stacked), PagedRunner(stacked)
    mx.eval(want.step({"a": TOKENS[:40]}))
    assert got.step({"a": TOKENS[:40]}, rows=[]).shape == (0, tiny_model.VOCAB)
    assert mx.array_equal(got.step({"a": TOKENS[40:41]}), want.step({"a": TOKENS[40:41]}))


def test_wrong_pools_are_refused(stacked):
    runner = PagedRunner(stacked)
    runner.kv.v_pages = runner.kv.v_pages[:-1]
    with pytest.raises(
        ValueError, match=r"\[decoder_stack\] k_pages and v_pages must have one pool for each of 3"
    ):
        runner.step({"a": TOKENS[:3]})
    runner = PagedRunner(stacked)
    runner.kv.k_pages[1] = runner.kv.k_pages[1].astype(mx.float16)
    with pytest.raises(ValueError, match=r"\[decoder_stack\] v_pages must be float16, got float32"):
        runner.step({"a": TOKENS[:3]})
    runner.kv.v_pages[1] = runner.kv.v_pages[1].astype(mx.float16)
    with pytest.raises(ValueError, match=r"\[decoder_stack\] k_pages must be float32, got float16"):
        runner.step({"a": TOKENS[:3]})


def test_more_logit_rows_than_tokens_are_refused(stacked):
    with pytest.raises(ValueError, match=r"\[decoder_stack\] logit_rows must have at most 3 rows, .* got 4"):
        PagedRunner(stacked).step({"a": TOKENS[:3]}, rows=[0, 1, 2, 2])


def test_weights_that_are_not_contiguous_are_refused(tmp_path):
    config = tiny_model.CONFIGS["llama"]
    tiny_model.save(tmp_path, config, tiny_model.reference(config))
    model = load(str(tmp_path), progress=False).model
    layer = model._layers[1]
    layer.input_norm = mx.repeat(layer.input_norm, 2)[::2]
    hidden = layer.input_norm.size
    with pytest.raises(
        ValueError,
        match=rf"\[decoder_stack\] input_norm must be row-contiguous .*, got shape \({hidden}\) with strides \(2\)",
    ):
        model._make_stack(layer._rope)


def test_the_first_prompt_of_a_process_is_right(tmp_path):
    """Threads tell the packed rows of one product from those of another by a number that all kinds of products share."""
    config = tiny_model.CONFIGS["llama"]
    tiny_model.save(tmp_path, config, tiny_model.reference(config, bits=4), bits=4)
    program = """if True:
        import sys, mlx.core as mx, numpy as np
        mx.set_default_device(mx.cpu)
        from mlxcel_ext.models import load
        from tests.support.generate import PagedRunner
        model = load(sys.argv[1], dtype="float32", progress=False).model
        first, second = (np.array(PagedRunner(model).step({"a": list(range(30))}, rows=[29])) for _ in "12")
        assert np.array_equal(first, second), np.abs(first - second).max()
    """
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)

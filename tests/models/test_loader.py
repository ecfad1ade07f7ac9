"""Loading: folders in all their forms, GGUF files, and what is said when they are wrong."""

from __future__ import annotations

import contextlib
import json
import pathlib

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxcel_ext.models import Model, load, loader
from tests.models.test_llama import TOKENS, assert_logits_close
from tests.support import gguf_files, tiny_model
from tests.support.device import default_device
from tests.support.generate import PagedRunner

Q = gguf.GGMLQuantizationType


def logits(model: Model) -> mx.array:
    return PagedRunner(model).step({"a": TOKENS[:30]})


def exact(path: str | pathlib.Path) -> Model:
    """With activations in f32, as mlx-lm's are here."""
    return load(str(path), dtype="float32").model


@pytest.fixture(scope="module")
def reference():
    return tiny_model.reference(tiny_model.CONFIGS["llama"])


@pytest.fixture
def folder(tmp_path, reference) -> pathlib.Path:
    tiny_model.save(tmp_path / "model", tiny_model.CONFIGS["llama"], reference)
    return tmp_path / "model"


def change_config(folder: pathlib.Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_all_parts_of_a_loaded_model(folder):
    seen: list[tuple[int, int]] = []
    loaded = load(str(folder), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert loaded.name == str(folder)
    assert loaded.config.eos_token_ids == (2,)
    assert loaded.config.vocab_size == tiny_model.VOCAB
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hé")) == "hé"
    assert loaded.chat_template.render([{"role": "user", "content": "x"}]) == "user: x\nassistant:"


def test_activations_are_f32_on_the_cpu_and_bf16_on_a_gpu(folder, stream):
    with default_device(stream):
        assert load(str(folder)).model.dtype == (mx.float32 if stream == mx.cpu else mx.bfloat16)


def test_a_bar_is_shown_on_stderr(folder, capfd):
    load(str(folder))
    shown = capfd.readouterr()
    assert "loading" in shown.err
    assert "3/3" in shown.err
    assert shown.out == ""


def test_shards_are_one_model(tmp_path, folder, reference):
    tiny_model.save(tmp_path / "sharded", tiny_model.CONFIGS["llama"], reference, shards=3)
    assert mx.array_equal(logits(load(str(tmp_path / "sharded")).model), logits(load(str(folder)).model))


def test_generation_config_adds_ends(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load(str(folder)).config.eos_token_ids == (2, 7)


def test_tied_head_may_be_left_to_the_weights(tmp_path):
    config = tiny_model.CONFIGS["smollm"]
    tiny_model.save(tmp_path, config, tiny_model.reference(config))
    change_config(tmp_path, tie_word_embeddings=None)
    assert load(str(tmp_path)).config.tie_word_embeddings is True


def test_parts_may_be_quantized_differently(tmp_path):
    """As mlx-lm's mixed recipes do: v_proj has 8 bits, the embedding none, so q, k and v cannot be joined."""
    config = tiny_model.CONFIGS["llama"]
    model = tiny_model.reference(config)

    def rule(path: str, module: nn.Module) -> bool | dict[str, int]:
        if not hasattr(module, "to_quantized") or "embed" in path:
            return False
        return {"group_size": 64, "bits": 8} if "v_proj" in path else {"group_size": 32, "bits": 4}

    nn.quantize(model, 32, 4, class_predicate=rule)
    tiny_model.save(tmp_path, config, model)
    rules: dict[str, object] = {"group_size": 32, "bits": 4, "model.embed_tokens": False}
    rules |= {f"model.layers.{i}.self_attn.v_proj": {"group_size": 64, "bits": 8} for i in range(3)}
    change_config(tmp_path, quantization=rules)
    want = tiny_model.reference_logits(model, TOKENS[:30], 30)
    assert_logits_close(logits(exact(tmp_path)), want)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_modes_without_offsets(tmp_path, mode):
    config = tiny_model.CONFIGS["llama"]
    model = tiny_model.reference(config)
    bits = {"mxfp4": 4, "mxfp8": 8}[mode]
    nn.quantize(model, 32, bits, mode=mode)
    tiny_model.save(tmp_path, config, model)
    change_config(tmp_path, quantization={"group_size": 32, "bits": bits, "mode": mode})
    want = tiny_model.reference_logits(model, TOKENS[:30], 30)
    assert_logits_close(logits(exact(tmp_path)), want)


@pytest.fixture
def as_gguf(tmp_path):
    """Writes a tiny model of a name in CONFIGS as GGUF; gives the path and mlx-lm's model."""

    def write(name: str, kind: Q = Q.F32, **metadata: object) -> tuple[str, object]:
        config = tiny_model.CONFIGS[name]
        model = tiny_model.reference(config)
        weights = {key: np.array(value) for key, value in tree_flatten(model.parameters())}
        path = gguf_files.write_model(tmp_path / f"{name}.gguf", config, weights, kind, metadata)
        return str(path), model

    return write


@pytest.mark.parametrize("name", ["llama", "llama-biases", "smollm", "qwen2", "qwen3"])
def test_gguf_equals_mlx_lm(as_gguf, name):
    path, reference = as_gguf(name)
    loaded = load(path, dtype="float32")
    assert loaded.config.tie_word_embeddings is tiny_model.CONFIGS[name]["tie_word_embeddings"]
    assert_logits_close(logits(loaded.model), tiny_model.reference_logits(reference, TOKENS[:30], 30))


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q5_0, Q.Q4_0, Q.F16], ids=lambda kind: kind.name)
def test_quantized_gguf_is_near(as_gguf, kind):
    path, reference = as_gguf("llama", kind)
    tolerance = {Q.Q8_0: 0.05, Q.Q5_0: 0.4, Q.Q4_0: 0.8, Q.F16: 0.005}[kind]
    assert_logits_close(
        logits(exact(path)), tiny_model.reference_logits(reference, TOKENS[:30], 30), tolerance
    )


def test_gguf_rope_scaling(as_gguf):
    path, _ = as_gguf("llama", **{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    reference = tiny_model.reference(tiny_model.CONFIGS["linear-rope"])
    assert_logits_close(logits(exact(path)), tiny_model.reference_logits(reference, TOKENS[:30], 30))


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        (
            {"general.architecture": "mamba"},
            r"general\.architecture 'mamba' is not supported. Known: llama, qwen2, qwen3",
        ),
        ({"tokenizer.chat_template": 7}, r"tokenizer\.chat_template must be a string"),
        ({"llama.expert_count": 8}, r"llama\.expert_count: mixtures of experts are not supported"),
        ({"llama.block_count": 4}, r"the tensor model\.layers\.3\.\S+ is missing"),
        ({"llama.block_count": 2}, r"9 tensors do not belong to a llama model .*model\.layers\.2\."),
        ({"llama.attention.head_count": 3}, r"head_count \(3\) must be a multiple of 2"),
        (
            {"llama.feed_forward_length": 64},
            r"mlp\.gate_proj\.weight has shape \(192, 128\), but .* wants \(64, 128\)",
        ),
        ({"llama.rope.dimension_count": 32}, r"rope\.dimension_count is 32, but heads have 64"),
        (
            {"llama.attention.key_length": 32, "llama.rope.dimension_count": 32},
            r"heads of size 32 are not supported",
        ),
        ({"llama.rope.scaling.type": "longrope"}, r"type 'longrope' is not supported"),
    ],
)
def test_wrong_gguf_is_a_value_error(as_gguf, metadata, text):
    with pytest.raises(ValueError, match=rf"\[load\] (?s:.*){text}"):
        load(as_gguf("llama", **metadata)[0], progress=False)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"model_type": "mamba"},
            r"config\.json: model_type 'mamba' is not supported. Known: llama, mistral",
        ),
        ({"model_type": None}, r"config\.json: model_type is missing"),
        ({"hidden_size": None}, r"config\.json: hidden_size is missing"),
        ({"hidden_size": "128"}, r"config\.json: hidden_size must be an integer of at least 1, got '128'"),
        (
            {"num_key_value_heads": 3},
            r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)",
        ),
        ({"num_hidden_layers": 4}, r"the tensor model\.layers\.3\.\S+ is missing"),
        ({"num_hidden_layers": 2}, r"9 tensors do not belong to a llama model"),
        (
            {"intermediate_size": 100},
            r"mlp\.gate_proj\.weight has shape \(192, 128\), but .* wants \(100, 128\)",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, r"type 'dynamic' is not supported"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            r"quantization_config of method 'gptq' is not supported",
        ),
        ({"layer_types": ["full_attention"], "sliding_window": 9}, r"layer_types must list 3 layers"),
        ({"head_dim": 48}, r"heads of size 48 are not supported \(known: 64, "),
        (
            {"num_attention_heads": 66, "num_key_value_heads": 2},
            r"33 query heads share a KV head, at most 32 can",
        ),
        ({"rope_scaling": "yarn"}, r"config\.json: rope_scaling must be an object, got 'yarn'"),
        ({"rope_parameters": [1]}, r"rope_parameters must be an object"),
        ({"rope_theta": "big"}, r"rope_theta must be a number above 0, got 'big'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, r"rope_scaling .* cannot be used"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, r"rope_scaling .* cannot be used"),
        ({"quantization": 4}, r"quantization must be an object"),
        ({"quantization": {"bits": 4}}, r"quantization: group_size is missing"),
        ({"eos_token_id": "</s>"}, r"eos_token_id must be token ids, got '</s>'"),
        ({"tie_word_embeddings": "no"}, r"tie_word_embeddings must be true or false"),
    ],
)
def test_wrong_configuration_is_a_value_error(folder, changes, text):
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=rf"\[load\] (?s:.*){text}"):
        load(str(folder), progress=False)


def test_missing_and_damaged_files_are_value_errors(folder, tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load(str(tmp_path), progress=False)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    for kept, text in (
        (4, "not a safetensors file"),
        (100, "not a safetensors file"),
        (len(data) - 1, "truncated"),
    ):
        weights.write_bytes(data[:kept])
        with pytest.raises(ValueError, match=rf"\[load\] .*model\.safetensors: .*{text}"):
            load(str(folder), progress=False)
    weights.unlink()
    with pytest.raises(ValueError, match=r"holds no \.safetensors files"):
        load(str(folder), progress=False)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(ValueError, match=r"names shards that are not there: one\.safetensors"):
        load(str(folder), progress=False)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read as JSON"):
        load(str(folder), progress=False)


def test_unknown_dtype_is_a_value_error(folder):
    with pytest.raises(
        ValueError, match=r"\[load\] dtype must be auto, float32, float16, bfloat16, got 'int8'"
    ):
        load(str(folder), dtype="int8")


def test_loads_at_the_same_time_put_the_cache_limit_back():
    before = mx.set_cache_limit(1 << 20)
    try:
        with loader._no_cache:
            first = contextlib.ExitStack()
            first.enter_context(loader._no_cache)
        first.close()  # the one that began last ends last
        assert mx.set_cache_limit(1 << 20) == 1 << 20
    finally:
        mx.set_cache_limit(before)

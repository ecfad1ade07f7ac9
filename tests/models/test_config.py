"""Configurations: sliding windows and what families leave unsaid."""

from __future__ import annotations

import json

import pytest

from mlxcel_ext.models.config import from_folder
from mlxcel_ext.models.registry import FAMILIES
from tests.support.tiny_model import CONFIGS

BASE = CONFIGS["llama"]


def read(tmp_path, **changes):
    config = {key: value for key, value in (BASE | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return from_folder(tmp_path, FAMILIES)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"model_type": "llama", "sliding_window": 9}, (-1, -1, -1)),
        ({"model_type": "mistral", "sliding_window": None}, (-1, -1, -1)),
        ({"model_type": "mistral", "sliding_window": 9}, (8, 8, 8)),
        ({"model_type": "qwen2", "sliding_window": 9}, (-1, -1, -1)),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": False}, (-1, -1, -1)),
        (
            {"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2},
            (-1, -1, 8),
        ),
        (
            {
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, -1, 8),
        ),
    ],
)
def test_windows(tmp_path, changes, want):
    assert read(tmp_path, **changes).windows == want


def test_defaults(tmp_path):
    config = read(
        tmp_path, head_dim=None, num_key_value_heads=None, rope_theta=None, tie_word_embeddings=None
    )
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (32, 4, 10000.0)
    assert config.tie_word_embeddings is None


def test_biases_by_family(tmp_path):
    assert read(tmp_path, model_type="qwen2").qkv_bias
    assert not read(tmp_path, model_type="qwen2").output_bias
    both = read(tmp_path, attention_bias=True)
    assert both.qkv_bias
    assert both.output_bias
    assert read(tmp_path, model_type="qwen3").qk_norm


def test_rope_parameters_of_newer_files(tmp_path):
    rope = {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    config = read(tmp_path, rope_theta=None, rope_parameters=rope)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert config.rotary_dim == 32


@pytest.mark.parametrize(("value", "want"), [(3, (3,)), ([3, 4, 3], (3, 4)), (None, ())])
def test_ends_of_sequence(tmp_path, value, want):
    assert read(tmp_path, eos_token_id=value).eos_token_ids == want

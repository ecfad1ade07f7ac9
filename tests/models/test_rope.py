"""Frequencies against the modules of mlx-lm, which turn the unit vector of each pair."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from mlxcel_ext.models.config import ModelConfig
from mlxcel_ext.models.rope import inverse_frequencies

CONFIG = ModelConfig(
    model_type="llama", num_layers=1, hidden_size=64, intermediate_size=64, num_qo_heads=1, num_kv_heads=1, head_dim=64,
    vocab_size=8, max_position_embeddings=4096, rms_norm_eps=1e-5, rope_theta=5e5, rotary_dim=64,
)  # fmt: skip
SCALINGS = [
    {},
    {"rope_type": "default"},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"rope_type": "llama3", "factor": 32.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("position", [1, 100])
def test_angles_are_mlx_lm_s(scaling, position):
    got, scale = inverse_frequencies(dataclasses.replace(CONFIG, rope_scaling=scaling))
    rope = initialize_rope(64, CONFIG.rope_theta, False, scaling or None, CONFIG.max_position_embeddings)
    x = mx.concatenate([mx.ones((1, 1, 1, 32)), mx.zeros((1, 1, 1, 32))], axis=-1)
    want = np.array(rope(x, offset=position)).reshape(2, 32)
    turned = scale * np.stack([np.cos(position * got), np.sin(position * got)])
    np.testing.assert_allclose(turned, want, atol=2e-5)


def test_divisors_of_a_file_replace_the_rule():
    plain, _ = inverse_frequencies(CONFIG)
    got, scale = inverse_frequencies(CONFIG, np.full(32, 2.0))
    np.testing.assert_allclose(got, plain / 2)
    assert scale == 1.0


@pytest.mark.parametrize(
    ("scaling", "text"),
    [
        (
            {"rope_type": "longrope"},
            r"type 'longrope' is not supported. Known: default, linear, llama3, yarn",
        ),
        ({"rope_type": "yarn"}, r"type 'yarn' has no field 'factor'"),
    ],
)
def test_unknown_rules_are_named(scaling, text):
    with pytest.raises(ValueError, match=rf"\[load\] rope_scaling.*{text}"):
        inverse_frequencies(dataclasses.replace(CONFIG, rope_scaling=scaling))

"""Rotary frequencies: every scaling rule becomes one vector of inverse frequencies and one factor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .config import ModelConfig

Frequencies = npt.NDArray[np.float64]


def inverse_frequencies(
    config: ModelConfig, divisors: npt.ArrayLike | None = None
) -> tuple[Frequencies, float]:
    """Angle per position of each rotary pair, and the factor on cos and sin (1 but for yarn).

    Parameters
    ----------
    config : ModelConfig
        rope_theta, rotary_dim and rope_scaling decide.
    divisors : array, optional
        ``[rotary_dim / 2]`` divisors that a GGUF file brings (`rope_freqs.weight`), in place of a rule.
    """
    dim = config.rotary_dim
    base = config.rope_theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if divisors is not None:
        return base / np.asarray(divisors, np.float64), 1.0
    scaling = config.rope_scaling
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return base, 1.0
    if kind not in _RULES:
        raise ValueError(
            f"[load] rope_scaling: type {kind!r} is not supported. Known: default, {', '.join(sorted(_RULES))}."
        )
    try:
        with np.errstate(all="ignore"):
            frequencies, scale = _RULES[kind](base, config, scaling)
    except KeyError as error:
        raise ValueError(f"[load] rope_scaling of type {kind!r} has no field {error.args[0]!r}.") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"[load] rope_scaling {dict(scaling)} cannot be used: {error}.") from None
    if not np.isfinite(frequencies).all():
        raise ValueError(
            f"[load] rope_scaling {dict(scaling)} cannot be used: it gives infinite frequencies."
        )
    return frequencies, scale


def _linear(base: Frequencies, config: ModelConfig, scaling: Mapping[str, Any]) -> tuple[Frequencies, float]:
    return base / float(scaling["factor"]), 1.0


def _llama3(base: Frequencies, config: ModelConfig, scaling: Mapping[str, Any]) -> tuple[Frequencies, float]:
    """Long waves are slowed down by the factor, short ones stay, those between are blended."""
    factor, low = float(scaling["factor"]), float(scaling.get("low_freq_factor", 1.0))
    high = float(scaling.get("high_freq_factor", 4.0))
    context = float(scaling.get("original_max_position_embeddings", 8192))
    waves = context * base / (2.0 * math.pi)  # turns within the original context
    blend = np.clip((waves - low) / (high - low), 0.0, 1.0)
    return base * ((1.0 - blend) / factor + blend), 1.0


def _yarn(base: Frequencies, config: ModelConfig, scaling: Mapping[str, Any]) -> tuple[Frequencies, float]:
    """[Peng 2023, arXiv:2309.00071]: as llama3, with a ramp over the pair's index."""
    factor = float(scaling["factor"])
    context = float(scaling.get("original_max_position_embeddings") or config.max_position_embeddings)
    pairs = len(base)

    def index_of(turns: float) -> float:
        return (
            config.rotary_dim
            * math.log(context / (turns * 2.0 * math.pi))
            / (2.0 * math.log(config.rope_theta))
        )

    low = max(math.floor(index_of(float(scaling.get("beta_fast", 32)))), 0)
    high = min(math.ceil(index_of(float(scaling.get("beta_slow", 1)))), config.rotary_dim - 1)
    ramp = np.clip((np.arange(pairs) - low) / max(high - low, 1e-3), 0.0, 1.0)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = _yarn_scale(factor, float(scaling.get("mscale", 1.0))) / _yarn_scale(
            factor, float(scaling.get("mscale_all_dim", 0.0))
        )
    return base * (1.0 - ramp) + base / factor * ramp, float(attention_factor)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


_RULES = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}

"""Values of a wrong type are named, in every op."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import (
    PackedWeight,
    PageTable,
    SamplingBatch,
    add_rms_norm,
    chain_speculative_sample,
    count_tokens,
    edit_logits,
    linear,
    merge_states,
    plan_attention,
    quantized_linear,
    sample,
    swiglu,
    token_logprobs,
    top_k_renorm,
    top_p_renorm,
)

X = mx.zeros((4, 64))
IDS = mx.zeros((4,), mx.int32)
TABLE = PageTable([0, 1], [0], [3], 16)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: plan_attention(TABLE, num_qo_heads=2**33, num_kv_heads=1),
            "num_qo_heads must be an int of 32",
        ),
        (
            lambda: plan_attention(TABLE, num_qo_heads=4.0, num_kv_heads=1),
            r"num_qo_heads must be int, got 4\.0",
        ),
        (lambda: plan_attention([0], num_qo_heads=4, num_kv_heads=1), "table must be PageTable, got list"),
        (lambda: merge_states([X], X, [0, 1]), r"v_in must be mx\.array, got list"),
        (lambda: add_rms_norm(X, X, X[0], "a"), "eps must be float, got 'a'"),
        (lambda: add_rms_norm(X, None, X[0], 1e-5), r"residual must be mx\.array, got None"),
        (lambda: linear(X, np.zeros((4, 64))), r"weight must be mx\.array, got ndarray"),
        (lambda: quantized_linear(X, X, X, X, group_size=2**40), "group_size must be an int of 32 bits"),
        (lambda: swiglu([1]), r"gate must be mx\.array, got list"),
        (lambda: PackedWeight("a"), r"\[pack_linear\] weight must be mx\.array, got 'a'"),
        (lambda: PackedWeight(X)(3), r"\[packed_linear\] x must be mx\.array, got 3"),
        (lambda: PackedWeight(X).rows([3], mx.float32), r"\[packed_rows\] ids must be mx\.array, got list"),
        (lambda: sample(X, 3, (1, 2)), "params must be SamplingBatch, got 3"),
        (lambda: sample(X, SamplingBatch(), 3), "rng must be .*, got 3"),
        (lambda: SamplingBatch(temperature="a"), "temperature must be numbers, got 'a'"),
        (lambda: SamplingBatch(min_p=[0.1, None]), "min_p must be numbers"),
        (lambda: top_k_renorm(X, "a"), "top_k must be integers"),
        (lambda: top_p_renorm(X, "a"), "top_p must be numbers, got a"),
        (lambda: edit_logits([1], X), r"logits must be mx\.array, got list"),
        (lambda: count_tokens(X, [1], IDS), r"rows must be mx\.array, got list"),
        (lambda: token_logprobs(X, [1, 2, 3, 4]), r"ids must be mx\.array, got list"),
        (lambda: token_logprobs(X, IDS, 2**40), "num_top must be an int of 32 bits, got 1099511627776"),
        (lambda: chain_speculative_sample([1], X, X, (1, 2)), r"draft_ids must be mx\.array, got list"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named(call, text):
    with pytest.raises(ValueError, match=r"^\[\w+\] ") as caught:
        call()
    assert re.search(text, str(caught.value))


def test_python_s_own_message_names_what_is_missing_or_unknown():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'weight'"):
        linear(X)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bogus'"):
        linear(X, X, bogus=1)

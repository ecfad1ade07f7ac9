"""GGUF: header, block formats, row order; mx.load and the `gguf` package are the references."""

from __future__ import annotations

import struct

import gguf
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxcel_ext.models.gguf import GGUFFile
from mlxcel_ext.models.gguf_blocks import AFFINE
from mlxcel_ext.models.weights import Weight
from tests.support import gguf_files

Q = gguf.GGMLQuantizationType
METADATA = {
    "general.architecture": "llama",
    "an.integer": 7,
    "a.float": 0.5,
    "a.text": "Grüße",
    "a.flag": True,
    "some.texts": ["a", "", "ünï"],
    "some.numbers": [1, 2, 3],
}


def dense(weight: Weight) -> np.ndarray:
    if weight.scales is None:
        return np.array(weight.weight.astype(mx.float32))
    scales, biases = (a.astype(mx.float32) for a in (weight.scales, weight.biases))
    return np.array(mx.dequantize(weight.weight, scales, biases, weight.group_size, weight.bits))


@pytest.fixture
def file(tmp_path, rng):
    tensors = {
        "matrix": (rng.standard_normal((8, 64)), Q.Q4_0),
        "vector": (rng.standard_normal(64), Q.F32),
    }
    return gguf_files.write(tmp_path / "small.gguf", METADATA, tensors)


def test_metadata_comes_back_with_its_types(file):
    metadata = GGUFFile(file).metadata
    assert {key: metadata[key] for key in METADATA} == METADATA
    assert {key: type(metadata[key]) for key in METADATA} == {key: type(v) for key, v in METADATA.items()}


def test_tensors_have_rows_first(file):
    tensors = GGUFFile(file).tensors
    assert {name: info.shape for name, info in tensors.items()} == {"matrix": (8, 64), "vector": (64,)}


@pytest.mark.parametrize(
    "kind", [Q.F32, Q.F16, Q.BF16, *AFFINE, Q.Q2_K, Q.Q3_K, Q.Q6_K], ids=lambda kind: kind.name
)
def test_values_are_those_of_the_gguf_package(tmp_path, rng, kind):
    values = rng.standard_normal((6, 512)).astype(np.float32)
    raw = gguf_files.quantize(values, kind) if kind not in (Q.F32, Q.F16) else None
    path = gguf_files.write(tmp_path / "x.gguf", METADATA, {"x": (values, kind)})
    want = (
        values if kind == Q.F32 else values.astype(np.float16) if raw is None else gguf.dequantize(raw, kind)
    )
    got = dense(GGUFFile(path).read("x"))
    # Products of two scales are rounded to f16 where a K-quant becomes a triple or an f16 matrix.
    exact = kind not in (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K)
    np.testing.assert_allclose(got, want, rtol=0, atol=0 if exact else 2.0**-11 * np.abs(want).max())


@pytest.mark.parametrize("kind", AFFINE, ids=lambda kind: kind.name)
def test_affine_blocks_stay_quantized(tmp_path, rng, kind):
    path = gguf_files.write(tmp_path / "x.gguf", METADATA, {"x": (rng.standard_normal((4, 256)), kind)})
    weight = GGUFFile(path).read("x")
    assert weight.weight.dtype == mx.uint32
    assert weight.scales.dtype == weight.biases.dtype == mx.float16
    assert weight.shape == (4, 256)


def test_smollm2_equals_mx_load(smollm2_path):
    want = mx.load(str(smollm2_path))
    file = GGUFFile(smollm2_path)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.29.ffn_down.weight", "output_norm.weight"):
        weight = file.read(name)
        assert mx.array_equal(weight.weight, want[name])
        if weight.scales is not None:
            module = name.removesuffix(".weight")
            assert mx.array_equal(weight.scales, want[f"{module}.scales"])
            assert mx.array_equal(weight.biases, want[f"{module}.biases"])


@pytest.mark.parametrize("kind", [Q.F32, Q.Q4_1, Q.Q8_0], ids=lambda kind: kind.name)
def test_unpermuting_restores_halves(tmp_path, rng, kind):
    heads, head_dim, cols = 3, 8, 64
    values = rng.standard_normal((heads * head_dim, cols))
    # What converters do: within each head, rows (0, half), (1, half + 1), ... become neighbours.
    interleaved = values.reshape(heads, 2, head_dim // 2, cols).swapaxes(1, 2).reshape(values.shape)
    tensors = {"plain": (values, kind), "mixed": (interleaved, kind), "bias": (interleaved[:, 0], Q.F32)}
    file = GGUFFile(gguf_files.write(tmp_path / "x.gguf", METADATA, tensors))
    np.testing.assert_array_equal(dense(file.read("mixed", unpermute_heads=heads)), dense(file.read("plain")))
    bias = dense(file.read("bias", unpermute_heads=heads))
    np.testing.assert_array_equal(bias, values[:, 0].astype(np.float32))


@pytest.mark.parametrize("kept", [0, 10, 23, 30, 100, 0.5, 0.99])
def test_truncated_file_is_a_value_error(file, kept):
    data = file.read_bytes()
    file.write_bytes(data[: kept if isinstance(kept, int) else int(len(data) * kept)])
    with pytest.raises(ValueError, match=r"\[gguf\] .*small\.gguf: .*(truncated|too few)"):
        GGUFFile(file)


def test_truncated_smollm2_names_the_tensor(smollm2_path, tmp_path):
    path = tmp_path / "half.gguf"
    with smollm2_path.open("rb") as file:
        path.write_bytes(file.read(50_000_000))
    with pytest.raises(
        ValueError, match=r"half\.gguf: the file is truncated: tensor blk\.\d+\.\w+\.weight ends"
    ):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "version 1 is not supported"),
        (8, struct.pack("<Q", 2**60), "truncated"),
        (16, struct.pack("<Q", 2**60), "truncated"),
    ],
)
def test_damaged_header_is_a_value_error(file, at, value, text):
    data = bytearray(file.read_bytes())
    data[at : at + len(value)] = value
    file.write_bytes(data)
    with pytest.raises(ValueError, match=text):
        GGUFFile(file)


def test_parts_of_a_split_model_are_refused(tmp_path):
    path = gguf_files.write(
        tmp_path / "x.gguf", METADATA | {"split.count": 3}, {"x": (np.zeros((1, 32)), Q.F32)}
    )
    with pytest.raises(ValueError, match=r"x\.gguf: one of 3 parts of a model: join them first"):
        GGUFFile(path)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # weights may become infinite
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_a_value_error_or_harmless(file, data):
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + 4] = data.draw(st.binary(min_size=1, max_size=4))
    damaged = file.with_name("damaged.gguf")
    damaged.write_bytes(content)
    message = str(damaged)
    try:
        opened = GGUFFile(damaged)
        for name in opened.tensors:
            opened.read(name)
    except ValueError as error:
        message = str(error)
    assert str(damaged) in message


def test_unknown_types_are_named(tmp_path):
    path = gguf_files.write(tmp_path / "x.gguf", METADATA, {"odd.weight": (np.zeros((1, 32)), Q.Q8_0)})
    data = bytearray(path.read_bytes())
    at = data.index(b"odd.weight") + len(b"odd.weight") + 4 + 16
    data[at : at + 4] = struct.pack("<I", 99)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"tensor odd\.weight has the unknown quantization type 99"):
        GGUFFile(path)

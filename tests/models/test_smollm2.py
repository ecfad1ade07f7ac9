"""SmolLM2 from its package: the same greedy text as mlx-lm's on the same weights."""

from __future__ import annotations

import json
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext.models import LoadedModel, load
from tests.support import smollm2_reference
from tests.support.generate import PagedRunner, greedy

GOLDEN = json.loads(smollm2_reference.GOLDEN.read_text())


@pytest.fixture(scope="module")
def smollm2(smollm2_path) -> LoadedModel:
    return load(str(smollm2_path), dtype="float32", progress=False)


def test_configuration(smollm2):
    config = smollm2.config
    shape = (config.num_layers, config.hidden_size, config.num_qo_heads, config.num_kv_heads, config.head_dim)
    assert shape == (30, 576, 9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.rope_theta) == (49152, 8192, 100000.0)
    assert config.tie_word_embeddings
    assert config.eos_token_ids[0] == 2


@pytest.mark.parametrize("entry", GOLDEN, ids=[entry["question"][:20] for entry in GOLDEN])
def test_greedy_ids_are_mlx_lm_s(smollm2, entry):
    messages = [{"role": "user", "content": entry["question"]}]
    prompt = smollm2.tokenizer.encode(smollm2.chat_template.render(messages), add_special_tokens=False)
    assert prompt == entry["prompt"]
    assert greedy(smollm2.model, prompt, len(entry["reply"]), chunk=17) == entry["reply"]


def test_the_capital_of_france(smollm2):
    reply = GOLDEN[0]["reply"]
    assert reply == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert smollm2.tokenizer.decode(reply) == "The capital of France is Paris."


@pytest.mark.slow
def test_logits_equal_mlx_lm(smollm2, smollm2_path):
    prompt = GOLDEN[0]["prompt"][-12:]
    want = np.array(smollm2_reference.reference(smollm2_path)(mx.array([prompt]))[0])
    got = np.array(PagedRunner(smollm2.model).step({"a": prompt}))
    assert np.abs(got - want).max() <= 1e-3 * np.abs(want).max()
    assert (got.argmax(-1) == want.argmax(-1)).all()


MEMORY = """
import pathlib, sys
from mlxcel_ext.llm import LLM, SamplingParams
import mlx.core as mx

def resident(what):
    return int(pathlib.Path("/proc/self/status").read_text().split(what + ":")[1].split()[0]) * 1024

mx.set_default_device(mx.cpu)
before = resident("VmRSS")
llm = LLM(sys.argv[1], num_pages=64, threads=2)
llm.generate(list(range(512)), SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
print(resident("VmHWM") - before, mx.get_active_memory())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_beside_weights_and_pages(smollm2_path):
    """Tokenizer, copies while weights are loaded and a prompt's activations: 31 MiB when this was written."""
    command = [sys.executable, "-c", MEMORY, str(smollm2_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    peak, active = map(int, found.split())
    assert peak - active < 40 * 2**20

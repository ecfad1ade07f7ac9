"""The engine over real forward passes: tiny random models of several families, and SmolLM2."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest

from mlxcel_ext.engine import Engine, EngineConfig
from mlxcel_ext.llm import LLM
from mlxcel_ext.models import LoadedModel, load
from mlxcel_ext.sampling_params import GrammarSpec, SamplingParams
from tests.engine.client import Answer, Client, serving
from tests.support import tiny_model

FAMILIES = ["llama", "mistral-window", "qwen3"]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp(request.param)
    config = tiny_model.CONFIGS[request.param]
    tiny_model.save(folder, config, tiny_model.reference(config))
    return load(str(folder), dtype="float32", progress=False)


def talk(
    client: Client, rounds: list[list[tuple[int, list[int], int]]], talks: int, *, together: bool
) -> list[list[int]]:
    """Conversations turn by turn; those of a round are asked together or one after the other."""
    histories: list[list[int]] = [[] for _ in range(talks)]
    for turn in rounds:
        sent: list[tuple[int, Answer]] = []
        for i, words, count in turn:
            histories[i] += words
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            sent.append((i, client.send(histories[i], params)))
            if not together:
                sent[-1][1].wait()
        for i, answer in sent:
            assert answer.wait().finish_reason == "length", answer.wait().error
            histories[i] += answer.token_ids
    return histories


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "auto"])
def test_cache_on_equals_cache_off_equals_alone(
    tiny: LoadedModel, rng: np.random.Generator, kv_cache_dtype: str
) -> None:
    talks = 6
    system = rng.integers(3, tiny_model.VOCAB, 37).tolist()
    rounds = []
    for turn in range(3):
        members = [i for i in range(talks) if turn == 0 or rng.random() < 0.8]
        rounds.append(
            [
                (
                    i,
                    (system if turn == 0 and i % 3 else [])
                    + rng.integers(3, tiny_model.VOCAB, 1 + i * 4).tolist(),
                    int(rng.integers(1, 14)),
                )
                for i in members
            ]
        )
    size = {"page_size": 16, "prefill_chunk_size": 24, "num_pages": 80, "kv_cache_dtype": kv_cache_dtype}
    with serving(tiny, **size, enable_prefix_caching=False, max_num_seqs=1) as client:
        alone = talk(client, rounds, talks, together=False)
    with serving(tiny, **size, enable_prefix_caching=False) as client:
        assert talk(client, rounds, talks, together=True) == alone
    with serving(tiny, **size) as client:
        assert talk(client, rounds, talks, together=True) == alone
        assert client.engine.stats().prefix_hit_tokens > 100


@pytest.mark.parametrize("cache", [True, False])
def test_a_window_of_all_layers_frees_pages_and_changes_no_token(cache: bool, tmp_path: pathlib.Path) -> None:
    config = {k: v for k, v in tiny_model.CONFIGS["mistral-window"].items() if k != "layer_types"}
    tiny_model.save(tmp_path, config, tiny_model.reference(config))
    loaded = load(str(tmp_path), dtype="float32", progress=False)
    assert set(loaded.config.windows) == {19}
    prompts = [list(range(1, 4)), list(range(5, 45)), list(range(2, 30))]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    answers = []
    for dropping in (False, True):
        with serving(loaded, num_pages=40, page_size=4, watermark=0.0, enable_prefix_caching=cache) as client:
            scheduler = client.engine._loop.scheduler
            assert scheduler.window_left == 19
            if not dropping:
                scheduler.window_left = None
            sent = [client.send(p, params) for p in prompts]
            sent += [
                client.ask(prompts[1], params)
            ]  # adopts what the window has left, where there is a cache
            for answer in sent:
                assert answer.wait().finish_reason == "length", answer.wait().error
            answers.append([a.token_ids for a in sent])
            if not cache:
                assert (client.engine.stats().preemptions == 0) == dropping
    assert answers[0] == answers[1]
    assert answers[0][1] == answers[0][3]


def test_preempted_requests_lose_nothing(tiny: LoadedModel) -> None:
    prompts = [[5 + n] * (3 + 4 * n) for n in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with serving(tiny, page_size=4, num_pages=100) as client:
        plenty = [client.ask(prompt, params).token_ids for prompt in prompts]
    with serving(tiny, page_size=4, num_pages=30, watermark=0.0) as client:
        sent = [client.send(prompt, params) for prompt in prompts]
        assert [a.token_ids for a in sent if a.wait()] == plenty
        assert client.engine.stats().preemptions > 0


def test_sampling_with_a_seed_does_not_see_the_batch(tiny: LoadedModel) -> None:
    def params(n: int) -> SamplingParams:
        return SamplingParams(temperature=1.0, seed=n, max_tokens=10, ignore_eos=True, top_p=0.95)

    with serving(tiny, page_size=16) as client:
        alone = [client.ask([5, 6, n], params(n)).token_ids for n in range(3, 7)]
        sent = [client.send([5, 6, n], params(n)) for n in range(3, 7)]
        assert [a.token_ids for a in sent if a.wait()] == alone


@pytest.fixture(scope="module")
def smollm2(smollm2_path: pathlib.Path) -> LoadedModel:
    return load(str(smollm2_path), dtype="float32", progress=False)  # the ids below are those of f32


def test_smollm2_answers_as_it_should(smollm2: LoadedModel) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    france = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM(smollm2, kv_cache_bytes=64 << 20, max_num_seqs=4) as llm:
        chats = [france, [{"role": "user", "content": "What is 2+2?"}], france]
        first, other, again = llm.chat(chats, greedy)
        assert first.token_ids == [504, 3575, 282, 4649, 314, 7042, 30, 2]
        assert first.text == "The capital of France is Paris."
        assert (first.finish_reason, first.stop_reason) == ("stop", None)
        assert again.token_ids == first.token_ids
        assert llm.chat(chats[1], greedy)[0].token_ids == other.token_ids
        spec = GrammarSpec("regex", r"(Paris|Lyon), in [A-Z][a-z]+\.")
        bound = llm.chat(france, SamplingParams(temperature=0.0, max_tokens=20, grammar=spec))[0]
        assert re.fullmatch(spec.value, bound.text)


def test_llm_takes_texts_ids_and_lists(tiny: LoadedModel) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(tiny, num_pages=64) as llm:
        ids = tiny.tokenizer.encode("hello")
        text = llm.generate("hello", params)
        assert [c.prompt for c in text] == ["hello"]
        assert llm.generate(ids, params)[0].token_ids == text[0].token_ids
        both = llm.generate(
            ["hello", [5, 6]], [params, SamplingParams(temperature=0.0, max_tokens=2, logprobs=1)]
        )
        assert both[0].token_ids == text[0].token_ids
        assert both[1].logprobs is not None
        assert len(both[1].logprobs) == len(both[1].token_ids)
        assert llm.generate([]) == []
        assert llm.chat([{"role": "user", "content": "hi"}], params)[0].prompt == "user: hi\nassistant:"
        with pytest.raises(ValueError, match="one for each of 1 prompts"):
            llm.generate("a", [params, params])
        with pytest.raises(ValueError, match="prompt is empty"):
            llm.generate([[5], []], params)
        assert llm.generate(ids, params)[0].token_ids == text[0].token_ids


def test_the_pool_is_sized_by_bytes_pages_or_the_context(tiny: LoadedModel) -> None:
    page_bytes = 2 * 3 * 16 * tiny.config.num_kv_heads * 64 * 4
    for config, pages in (
        (EngineConfig(kv_cache_bytes=page_bytes * 7 + 5, kv_cache_dtype="float32"), 7),
        (EngineConfig(num_pages=9), 9),
        (EngineConfig(max_model_len=64, max_num_seqs=5), 20),
    ):
        engine = Engine(tiny, config)
        assert engine.stats().pages_total == pages
        assert engine.max_model_len == min(pages * 16, config.max_model_len or 512)
    with pytest.raises(ValueError, match="kv_cache_bytes must hold at least one page"):
        Engine(tiny, EngineConfig(kv_cache_bytes=10))
    with pytest.raises(ValueError, match="page_size must be a power of two"):
        EngineConfig(page_size=12)


# 16-bit pages under float32 activations are the CPU's alone.
@pytest.mark.parametrize(("name", "item"), [("auto", 2), ("float16", 2), ("bfloat16", 2), ("float32", 4)])
def test_pages_have_the_dtype_that_was_asked_for(
    tiny: LoadedModel, on_cpu: None, name: str, item: int
) -> None:
    with serving(tiny, kv_cache_dtype=name, page_size=16) as client:
        assert client.engine.stats().page_bytes == 2 * 3 * 16 * tiny.config.num_kv_heads * 64 * item
        pool = client.engine._loop._kv
        client.ask(list(range(3, 40)))
        assert {a.dtype for a in pool.arrays} == {pool.dtype}
        assert str(pool.dtype) == f"mlx.core.{'float16' if name == 'auto' else name}"


def test_kv_cache_dtypes_that_no_kernel_reads_are_refused(tmp_path: pathlib.Path, on_cpu: None) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of auto, float32, .*; got 'fp8'"):
        EngineConfig(kv_cache_dtype="fp8")
    config = tiny_model.CONFIGS["llama"]
    tiny_model.save(tmp_path, config, tiny_model.reference(config))
    half = load(str(tmp_path), dtype="bfloat16", progress=False)
    with pytest.raises(
        ValueError, match=r"must be auto or bfloat16 where activations are bfloat16 on the CPU; got float16"
    ):
        Engine(half, EngineConfig(kv_cache_dtype="float16"))
    with serving(half, kv_cache_dtype="auto") as client:
        assert str(client.engine._loop._kv.dtype) == "mlx.core.bfloat16"


def test_smollm2_with_16_bit_pages_predicts_what_exact_ones_do(smollm2: LoadedModel, on_cpu: None) -> None:
    # Greedy answers are the same here; they need not be where two tokens are as likely as each other.
    prompt = "The three states of matter are"
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=1)
    answers = {}
    for dtype in ("float32", "float16", "bfloat16"):
        with LLM(smollm2, num_pages=16, kv_cache_dtype=dtype) as llm:
            answers[dtype] = llm.generate(prompt, params)[0]
    exact = answers["float32"]
    assert answers["float16"].token_ids == answers["bfloat16"].token_ids == exact.token_ids

    def likelihoods(dtype: str) -> np.ndarray:
        logprobs = answers[dtype].logprobs
        assert logprobs is not None
        return np.array([entry.logprob for entry in logprobs])

    error = {d: np.abs(likelihoods(d) - likelihoods("float32")).max() for d in ("float16", "bfloat16")}
    assert 0 < error["float16"] < 0.01
    assert error["float16"] < error["bfloat16"] < 0.1

"""Shared prefixes in the engine: the same answers, fewer pages read, and counters that say so."""

from __future__ import annotations

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings

from mlxcel_ext import attention_planner, num_threads, set_num_threads
from mlxcel_ext.attention_planner import AttentionPlanner
from mlxcel_ext.models import LoadedModel, load
from mlxcel_ext.models.batch import AttentionBatch
from mlxcel_ext.outcomes import Outcomes
from mlxcel_ext.sampling_params import SamplingParams
from tests.engine.client import serving
from tests.ops.test_attention_plan import PAGE_BEGIN, PAGE_END, Q_BEGIN, Q_LEN, SHARED, check_cover, table_of
from tests.support import tiny_model
from tests.support.fake_model import fake_loaded, generate

SYSTEM = np.random.default_rng(1).integers(3, tiny_model.VOCAB, 700).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("llama")
    config = tiny_model.CONFIGS["llama"] | {"max_position_embeddings": 2048}
    tiny_model.save(folder, config, tiny_model.reference(config))
    return load(str(folder), dtype="float32", progress=False)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def share_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXCEL_CASCADE_MIN_SHARED_PAGES", "1")
    monkeypatch.setenv("MLXCEL_CASCADE_MIN_MEMBERS", "2")


def conversations(loaded: LoadedModel, **config: object) -> tuple[list[list[int]], dict[str, dict[str, int]]]:
    """Three tenants of one service, two users each, two turns, all at once; with what was counted."""
    rng = np.random.default_rng(2)
    tenants = [rng.integers(3, tiny_model.VOCAB, 70).tolist() for _ in range(3)]
    histories = [
        SYSTEM + tenants[i % 3] + rng.integers(3, tiny_model.VOCAB, 3 + i).tolist() for i in range(6)
    ]
    with serving(
        loaded, num_pages=600, page_size=16, prefill_chunk_size=128, max_num_seqs=6, **config
    ) as client:
        for turn in range(2):
            answers = [client.send(history, greedy(12 + turn)) for history in histories]
            for history, answer in zip(histories, answers, strict=True):
                assert answer.wait().finish_reason == "length", answer.wait().error
                history += [*answer.token_ids, 7 + turn]
        counters = client.engine.stats().counters
    return histories, {metric: dict(values) for metric, values in counters.items()}


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_cascade_on_equals_cascade_off_token_for_token(tiny, monkeypatch, batch_invariant):
    monkeypatch.setenv("MLXCEL_CASCADE_ATTENTION", "off")
    want, flat = conversations(tiny, batch_invariant=batch_invariant)
    assert "cascade" not in flat["mlxcel_paged_decode_launches_total"]
    assert list(flat["mlxcel_cascade_declined_total"]) == ["switched_off"]
    assert flat["mlxcel_cascade_member_sequences_total"] == {}

    monkeypatch.setenv("MLXCEL_CASCADE_ATTENTION", "on")
    share_everything(monkeypatch)
    got, counters = conversations(tiny, batch_invariant=batch_invariant)
    assert got == want
    assert counters["mlxcel_paged_decode_launches_total"]["cascade"] > 0
    assert counters["mlxcel_cascade_member_sequences_total"][""] > 40
    assert counters["mlxcel_cascade_shared_tokens_total"][""] > 20 * 512
    assert counters["mlxcel_cascade_failures_total"] == {}


def test_the_default_costs_of_a_cpu_share_a_prompt_of_700_tokens(tiny, on_cpu):
    threads = num_threads()
    set_num_threads(1)  # many would be done before a merge pays
    try:
        _, counters = conversations(tiny)
    finally:
        set_num_threads(threads)
    assert counters["mlxcel_paged_decode_launches_total"]["cascade"] > 0


def test_without_a_prefix_cache_nothing_is_shared(tiny):
    _, counters = conversations(tiny, enable_prefix_caching=False)
    assert list(counters["mlxcel_cascade_declined_total"]) == ["nothing_shared"]
    assert list(counters["mlxcel_paged_decode_launches_total"]) == ["fused_v2"]


@pytest.mark.parametrize("broken", ["detect_shared_prefix", "plan_cascade"])
def test_an_error_in_planning_makes_the_step_flat(tiny, monkeypatch, caplog, broken):
    want, _ = conversations(tiny)

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(attention_planner, broken, fail)
    got, counters = conversations(tiny)
    assert got == want
    assert counters["mlxcel_cascade_failures_total"]["RuntimeError"] > 0
    assert list(counters["mlxcel_paged_decode_launches_total"]) == ["fused_v2"]
    assert "cascade planning failed, this step is flat: RuntimeError: out of luck" in caplog.text


def check_plans(heads: list[int], tails: list[int], num_pages: int) -> int:
    """Answer prompts that begin alike, all at once, and look at every plan; how many tiles were shared."""
    shared_tiles = 0
    wrong: list[BaseException] = []

    def look(tokens: mx.array, batch: AttentionBatch) -> None:
        nonlocal shared_tiles
        table, plan = batch.table, batch.plan
        try:
            counts = [1] * table.batch if batch.qo_indptr is None else np.diff(batch.qo_indptr).tolist()
            check_cover(plan, table, counts, True, -1)
            for tile in plan.tiles[plan.tiles[:, SHARED] == 1]:
                shared_tiles += 1
                members = plan.token_order[tile[Q_BEGIN] : tile[Q_BEGIN] + tile[Q_LEN]]
                if batch.qo_indptr is None:  # of a chunk, a page may have been replaced by an equal one since
                    first = int(table.kv_indptr[members[0]])
                    pages = table.kv_indices[first + tile[PAGE_BEGIN] : first + tile[PAGE_END]]
                    users = [client.engine._loop.allocator.users(int(page)) for page in pages]
                    assert min(users) >= len(members)
        except BaseException as error:
            wrong.append(error)
            raise

    with serving(fake_loaded(on_call=look), num_pages=num_pages, batch_invariant=False) as client:
        prompts = [[head + 1] * 20 + [i + 1] * tails[i] for i, head in enumerate(heads)]
        answers = [client.send(prompt, greedy(9)) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.wait().finish_reason == "length", wrong
            assert answer.token_ids == generate(prompt, 9)
    assert wrong == []
    return shared_tiles


def test_plans_of_an_engine_read_every_page_once_and_only_pages_in_use(monkeypatch):
    share_everything(monkeypatch)
    found: list[int] = []

    @settings(max_examples=15, deadline=None)
    @given(
        heads=st.lists(st.integers(0, 2), min_size=2, max_size=8),
        tails=st.lists(st.integers(1, 30), min_size=8, max_size=8),
        num_pages=st.sampled_from([40, 160]),
    )
    def check(heads: list[int], tails: list[int], num_pages: int) -> None:
        found.append(check_plans(heads, tails, num_pages))

    check()
    assert sum(found) > 0


# -- the planner alone -------------------------------------------------------------------------------------------


class _Config:
    num_qo_heads, num_kv_heads = 8, 2
    windows = (-1, -1)


class _MixedWindows(_Config):
    windows = (-1, 100)


def test_windows_of_several_sizes_decline():
    outcomes = Outcomes()
    planner = AttentionPlanner(_MixedWindows, "fused_v2", batch_invariant=False)
    planner.plan(table_of([40, 50]), None, outcomes)
    assert outcomes.snapshot()["mlxcel_cascade_declined_total"] == {"windows": 1}


def test_gathered_attention_declines():
    outcomes = Outcomes()
    planner = AttentionPlanner(_Config, "gather", batch_invariant=False)
    planner.plan(table_of([40, 50]), None, outcomes)
    assert outcomes.snapshot()["mlxcel_cascade_declined_total"] == {"path": 1}
    assert planner.decode_path == "gather"


def test_a_plan_is_reused_until_its_pages_or_its_tree_change():
    outcomes = Outcomes()
    planner = AttentionPlanner(_Config, "fused_v2", batch_invariant=False)
    table = table_of([40, 50])
    plan = planner.plan(table, None, outcomes)
    assert planner.plan(table.advance(), None, outcomes) is plan
    # As many pages, but now both requests begin with the same one: the flat plan would do, a shared one is better.
    ids = table.kv_indices.copy()
    ids[table.kv_indptr[1]] = ids[0]
    other = type(table)(table.kv_indptr, ids, table.kv_last_page_len, table.page_size)
    assert plan.matches(other)
    assert planner.plan(other, None, outcomes) is not plan
    assert outcomes.snapshot()["mlxcel_attention_plans_total"] == {"made": 2, "reused": 1}


@pytest.mark.parametrize("name", ["MLXCEL_CASCADE_MIN_SHARED_PAGES", "MLXCEL_CASCADE_MIN_MEMBERS"])
@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "99999999999"])
def test_malformed_floors_are_errors_at_start(monkeypatch, name, value):
    from mlxcel_ext import env

    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{name} must be a whole number, 1 or more; got '{value}'"):
        env.check_switches()

"""The engine over a model that hashes what it finds in its pages."""

from __future__ import annotations

import sys
import threading
import time

import hypothesis.strategies as st
import mlx.core as mx
import pytest
from hypothesis import given, settings

from mlxcel_ext.engine import Engine, EngineConfig, EngineDeadError, QueueFullError
from mlxcel_ext.models.batch import AttentionBatch
from mlxcel_ext.sampling_params import SamplingParams
from tests.engine.client import GREEDY, SMALL, Answer, Client, serving
from tests.support.fake_model import EOS, VOCAB, fake_loaded, generate


def greedy(max_tokens: int, **kwargs: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **{"ignore_eos": True, **kwargs})  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    cache=st.booleans(),
    pipeline=st.booleans(),
    num_pages=st.sampled_from([40, 160]),
    mixed=st.booleans(),
)
def test_cache_on_equals_cache_off_equals_alone(
    data: st.DataObject, cache: bool, pipeline: bool, num_pages: int, mixed: bool
) -> None:
    """The headline: random conversations of several turns, concurrently, give the answers they give alone."""
    heads = data.draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=40), min_size=1, max_size=3))
    talks = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, 2),
                st.lists(st.tuples(st.lists(st.integers(1, 4), max_size=6), st.integers(1, 9)), max_size=3),
            ),
            min_size=1,
            max_size=8,
        )
    )
    with serving(
        fake_loaded(), enable_prefix_caching=cache, pipeline=pipeline, num_pages=num_pages, mixed_steps=mixed
    ) as client:
        histories = [list(heads[head % len(heads)]) for head, _ in talks]
        for turn in range(3):
            answers: list[tuple[int, Answer, int]] = []
            for i, (_, turns) in enumerate(talks):
                if turn < len(turns):
                    words, count = turns[turn]
                    histories[i] += words
                    answers.append((i, client.send(histories[i], greedy(count)), count))
            for i, answer, count in answers:
                assert answer.wait().finish_reason == "length"
                assert answer.token_ids == generate(histories[i], count)
                histories[i] += answer.token_ids


def test_a_request_gets_its_text_counts_and_times() -> None:
    with serving(fake_loaded()) as client:
        prompt = list(range(1, 20))
        answer = client.ask(prompt)
        last = answer.wait()
        assert answer.token_ids == generate(prompt, 12)
        assert answer.text == "".join(chr(32 + t) for t in answer.token_ids if t != EOS)
        assert (last.num_prompt_tokens, last.num_completion_tokens, last.num_cached_tokens) == (19, 12, 0)
        assert last.times is not None
        assert last.times.submitted <= last.times.scheduled <= last.times.first_token <= last.times.finished  # type: ignore[operator]
        assert client.ask(prompt).wait().num_cached_tokens == 18
        stats = client.engine.stats()
        assert (stats.prefix_queries, stats.prefix_hits, stats.generation_tokens) == (2, 1, 24)


def test_prefill_progress_is_told_for_long_prompts() -> None:
    with serving(fake_loaded()) as client:
        answer = client.ask([1] * 40)
        assert [o.prefill_progress for o in answer.outputs if o.prefill_progress] == [(16, 40), (32, 40)]


def test_eos_stop_tokens_and_lengths_end_a_request() -> None:
    prompt = next(
        p for p in ([i, j] for i in range(1, 90) for j in range(1, 90)) if EOS in generate(p, 8)[1:]
    )
    plain = generate(prompt, 8)
    with serving(fake_loaded()) as client:
        ended = client.ask(prompt, greedy(30, ignore_eos=False))
        assert ended.wait().finish_reason == "stop"
        assert ended.wait().stop_reason is None
        assert ended.token_ids == plain[: plain.index(EOS) + 1]
        stopped = client.ask([5, 6], greedy(30, stop_token_ids=(generate([5, 6], 4)[3],)))
        assert stopped.wait().stop_reason == generate([5, 6], 4)[3]
        assert stopped.token_ids == generate([5, 6], 4)
        assert client.ask([5, 6], greedy(3)).wait().finish_reason == "length"


def test_min_tokens_holds_the_end_back() -> None:
    target = generate([5, 6], 1)[0]
    with serving(fake_loaded()) as client:
        answer = client.ask([5, 6], greedy(9, stop_token_ids=(target,), min_tokens=4))
        assert len(answer.token_ids) >= 4
        assert target not in answer.token_ids[:4]


def test_stop_strings_are_held_back_and_cut() -> None:
    text = "".join(chr(32 + t) for t in generate([7, 8, 9], 20))
    stop = text[6:9]
    at = text.index(stop)
    with serving(fake_loaded()) as client:
        answer = client.ask([7, 8, 9], greedy(20, stop=(stop, "\x00")))
        assert (answer.text, answer.wait().stop_reason) == (text[:at], stop)
        assert not any(stop[0] in o.text for o in answer.outputs if o.text and text[:at].find(stop[0]) < 0)
        kept = client.ask([7, 8, 9], greedy(20, stop=(stop,), include_stop_str_in_output=True))
        assert kept.text == text[:at] + stop


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch() -> None:
    params = SamplingParams(temperature=1.5, seed=1234, max_tokens=16, ignore_eos=True, top_k=20, top_p=0.9)
    with serving(fake_loaded(), enable_prefix_caching=False) as client:
        alone = client.ask([3, 1, 4], params).token_ids
        crowd = [client.send([9] * n, SamplingParams(max_tokens=20, ignore_eos=True)) for n in range(1, 5)]
        crowded = client.ask([3, 1, 4], params).token_ids
        for other in crowd:
            other.wait()
        assert alone == crowded
        assert (
            client.ask([3, 1, 4], SamplingParams(temperature=1.5, max_tokens=16, ignore_eos=True)).token_ids
            != alone
        )


def test_a_seed_survives_preemption() -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True)
    with serving(fake_loaded(), num_pages=24, watermark=0.0) as client:
        alone = client.ask([1, 2], params).token_ids
        answers = [client.send([1, 2], params) for _ in range(4)]
        for answer in answers:
            answer.wait()
            assert answer.token_ids == alone
        assert client.engine.stats().preemptions > 0


def test_penalties_survive_preemption() -> None:
    params = greedy(40, frequency_penalty=1.5, repetition_penalty=1.3)
    with serving(fake_loaded(), num_pages=24, watermark=0.0) as client:
        alone = client.ask([1, 2], params).token_ids
        answers = [client.send([1, 2], params) for _ in range(4)]
        assert [a.token_ids for a in answers if a.wait()] == [alone] * 4
        assert client.engine.stats().preemptions > 0


def test_logprobs_are_those_of_the_model() -> None:
    with serving(fake_loaded()) as client:
        answer = client.ask([2, 3, 5, 7], greedy(4, logprobs=3, prompt_logprobs=2))
        found = [p for o in answer.outputs for p in o.logprobs or ()]
        assert [p.token_id for p in found] == answer.token_ids
        assert all(p.rank == 1 and len(p.top) == 3 and p.top[0] == (p.token_id, p.logprob) for p in found)
        prompt = answer.outputs[0].prompt_logprobs
        assert prompt is not None
        assert prompt[0] is None
        assert [p.token_id for p in prompt[1:] if p is not None] == [3, 5, 7]
        first = prompt[1]
        assert first is not None
        assert first.top[0][0] == generate([2], 1)[0]
        long = client.ask([1] * 50, greedy(1, prompt_logprobs=0))
        scored = long.outputs[-1].prompt_logprobs
        assert scored is not None
        assert len(scored) == 50


def test_penalties_and_bias_need_no_host_token() -> None:
    with serving(fake_loaded()) as client:
        biased = client.ask([1, 2], greedy(5, logit_bias={44: 100.0}))
        assert biased.token_ids == [44] * 5
        varied = client.ask([1, 2], greedy(2, logit_bias={44: 90.0, 45: 90.0}, repetition_penalty=10.0))
        assert sorted(varied.token_ids) == [44, 45]
        assert client.engine.stats().counters["mlxcel_engine_sampling_total"].get("after_read", 0) == 0


def test_decode_steps_take_their_tokens_from_the_device() -> None:
    with serving(fake_loaded()) as client:
        client.ask([1, 2, 3], greedy(40))
        inputs = client.engine.stats().counters["mlxcel_engine_step_input_total"]
        assert inputs == {"host": 1, "device": 39}


def test_cancelled_requests_free_their_pages_and_the_others_go_on() -> None:
    with serving(fake_loaded()) as client:
        doomed = [client.send([4] * n, greedy(900)) for n in range(1, 4)]
        kept = client.send([6, 7], greedy(60))
        while not all(a.token_ids for a in doomed):
            time.sleep(0.001)
        for answer in doomed:
            client.engine.cancel(answer.request_id)  # type: ignore[attr-defined]
        assert {a.wait().finish_reason for a in doomed} == {"abort"}
        kept.wait()
        assert kept.token_ids == generate([6, 7], 60)
        client.engine.cancel("nobody")


def test_a_deadline_ends_waiting_and_running_requests() -> None:
    with serving(fake_loaded(), max_num_seqs=1) as client:
        running = client.send([1], greedy(1000), deadline=time.monotonic() + 0.3)
        waiting = client.send([2], greedy(5), deadline=time.monotonic() + 0.1)
        for answer in (running, waiting):
            assert (answer.wait().finish_reason, answer.wait().stop_reason) == ("abort", "deadline")
        assert client.ask([3], greedy(2)).wait().finish_reason == "length"


def test_bad_requests_are_refused_at_once() -> None:
    with serving(fake_loaded(max_len=64)) as client:
        for prompt, params, words in (
            ([], GREEDY, "prompt is empty"),
            ([1] * 64, GREEDY, "64 tokens, but the context holds 64"),
            ([VOCAB], GREEDY, r"in 0\.\.96; got 97"),
            ([-1], GREEDY, "got -1"),
            ([1], SamplingParams(temperature=-1.0), "temperature"),
            ([1], SamplingParams(stop_token_ids=(VOCAB,)), "stop_token_ids"),
            ([1], SamplingParams(logprobs=1000), "logprobs"),
        ):
            with pytest.raises(ValueError, match=words):
                client.send(prompt, params)
        hold = client.send([1], greedy(60))
        with pytest.raises(ValueError, match="in use"):
            client.engine.submit(hold.request_id, [1], GREEDY, Answer())  # type: ignore[attr-defined]
        hold.wait()


def test_the_queue_is_bounded() -> None:
    with serving(fake_loaded(), max_num_seqs=1, max_queue_depth=2) as client:
        answers = [client.send([1], greedy(200)) for _ in range(3)]
        with pytest.raises(QueueFullError):
            client.send([1])
        for answer in answers:
            client.engine.cancel(answer.request_id)  # type: ignore[attr-defined]
            answer.wait()


def test_the_context_ends_a_request_without_max_tokens() -> None:
    with serving(fake_loaded(max_len=40)) as client:
        last = client.ask([1, 2, 3], SamplingParams(temperature=0.0, ignore_eos=True)).wait()
        assert (last.finish_reason, last.num_completion_tokens) == ("length", 37)


def test_shutdown_drains_or_aborts() -> None:
    for drain, reason in ((True, "length"), (False, "abort")):
        engine = Engine(fake_loaded(), EngineConfig(**SMALL))  # type: ignore[arg-type]
        engine.start()
        client = Client(engine)
        answer = client.send([1, 2], greedy(200))
        while not answer.token_ids:
            time.sleep(0.001)
        engine.shutdown(drain=drain)
        assert answer.wait().finish_reason == reason
        assert engine.health().state == "dead"
        with pytest.raises(EngineDeadError):
            client.send([1])


def test_a_drain_that_takes_too_long_aborts() -> None:
    engine = Engine(fake_loaded(), EngineConfig(**SMALL))  # type: ignore[arg-type]
    engine.start()
    answer = Client(engine).send([1, 2], greedy(620))
    engine.shutdown(timeout=0.2)
    assert answer.wait().finish_reason in ("abort", "length")


def test_an_engine_that_never_started_tells_its_requests() -> None:
    engine = Engine(fake_loaded(), EngineConfig(**SMALL))  # type: ignore[arg-type]
    assert engine.health().state == "loading"
    answer = Client(engine).send([1, 2])
    engine.shutdown()
    assert answer.wait().finish_reason == "error"
    assert engine.health().state == "dead"


def test_many_threads_submit_and_cancel_at_once() -> None:
    with serving(fake_loaded(), num_pages=60) as client:
        answers: list[Answer] = []
        lock = threading.Lock()

        def worker(number: int) -> None:
            for i in range(12):
                answer = Answer()
                name = f"{number}-{i}"
                prompt = [1 + number % 2] * (1 + (number * 7 + i * 3) % 30)
                client.engine.submit(name, prompt, greedy(1 + i), answer)
                answer.prompt, answer.count = prompt, 1 + i  # type: ignore[attr-defined]
                if (number + i) % 5 == 0:
                    client.engine.cancel(name)
                with lock:
                    answers.append(answer)

        threads = [threading.Thread(target=worker, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for answer in answers:
            if answer.wait().finish_reason == "length":
                assert answer.token_ids == generate(answer.prompt, answer.count)  # type: ignore[attr-defined]
            else:
                assert answer.wait().finish_reason == "abort"


def test_stats_of_any_moment_add_up() -> None:
    """Whoever looks while requests come and go sees each page and each request once."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with serving(fake_loaded(), num_pages=60, watermark=0.0) as client:
            answers = [client.send([n % 7 + 1, 2, 3, n % 5 + 1], greedy(20)) for n in range(40)]
            looks = 0
            while not answers[-1].outputs or not answers[-1].outputs[-1].finished:
                stats = client.engine.stats()
                assert stats.pages_free + stats.pages_cached + stats.pages_in_use == stats.pages_total
                assert stats.running + stats.waiting <= 40
                assert stats.running <= stats.max_num_seqs
                looks += 1
            for answer in answers:
                answer.wait()
            stats = client.engine.stats()
            assert (stats.running, stats.waiting) == (0, 0)
            assert looks > 5
    finally:
        sys.setswitchinterval(interval)


def test_resetting_the_prefix_cache_frees_its_pages() -> None:
    with serving(fake_loaded()) as client:
        client.ask(list(range(1, 30)))
        assert client.engine.stats().pages_cached > 0
        assert client.engine.reset_prefix_cache() > 0
        assert client.engine.stats().pages_cached == 0
        assert client.ask(list(range(1, 30))).wait().num_cached_tokens == 0


def test_the_cache_budget_is_in_bytes() -> None:
    with serving(fake_loaded(), prompt_cache_bytes=5 * 2 * 4 * 8 * 4, kv_cache_dtype="float32") as client:
        client.ask(list(range(1, 60)))
        stats = client.engine.stats()
        assert stats.page_bytes == 2 * 4 * 8 * 4
        assert stats.pages_cached == 5


def test_prompt_logprobs_come_once_where_a_step_fails_behind_a_chunk_in_flight() -> None:
    chunks = []

    def fail_second_chunk(tokens: mx.array, batch: AttentionBatch) -> None:
        if tokens.size > 10:
            chunks.append(tokens.size)
            if len(chunks) == 2:
                raise RuntimeError("once")

    prompts = [[(i * 7) % 90 + n for i in range(24)] for n in (1, 2)]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    with serving(fake_loaded(on_call=fail_second_chunk)) as client:
        answers = [client.send(prompt, params) for prompt in prompts]
        for answer, prompt in zip(answers, prompts, strict=True):
            answer.wait()
            scored = next(o.prompt_logprobs for o in answer.outputs if o.prompt_logprobs)
            assert [entry and entry.token_id for entry in scored] == [None, *prompt[1:]]

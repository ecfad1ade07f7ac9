"""The scheduler over a hashing device: every request gets exactly the answer it would get alone."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mlxcel_ext.kvcache.page_allocator import PageAllocator
from mlxcel_ext.kvcache.prefix_tree import PrefixTree
from mlxcel_ext.scheduler.policy import Tick, TickPolicy
from mlxcel_ext.scheduler.request import Request, State
from mlxcel_ext.scheduler.scheduler import Scheduler
from tests.support.fake_device import FakeDevice, generate


def make_scheduler(
    num_pages: int = 32,
    page_size: int = 4,
    *,
    cache: bool = True,
    cache_pages: int | None = None,
    grant: int = 16,
    mixed: bool = True,
    max_num_seqs: int = 4,
    chunk: int = 8,
    budget: int | None = None,
    watermark: float = 0.0,
    window: int | None = None,
) -> Scheduler:
    allocator = PageAllocator(num_pages)
    tree = PrefixTree(allocator, page_size, cache_pages) if cache else None
    return Scheduler(
        allocator,
        tree,
        TickPolicy(grant, mixed),
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        prefill_chunk_size=chunk,
        token_budget=budget or max_num_seqs + chunk,
        watermark=watermark,
        window_left=window,
    )


class Driver:
    """Adds requests to a scheduler and runs them to the end."""

    def __init__(self, scheduler: Scheduler, lag: int = 1) -> None:
        self.scheduler = scheduler
        self.device = FakeDevice(scheduler, lag)
        self.requests: list[Request] = []

    def add(self, prompt: list[int], count: int, **kwargs: object) -> Request:
        request = Request(
            str(len(self.requests)),
            list(prompt),
            len(prompt) + count,
            len(self.requests),
            **kwargs,  # type: ignore[arg-type]
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def run(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work():
                return
            self.device.tick()
        raise AssertionError(
            f"{len(self.scheduler.running)} running, {len(self.scheduler.waiting)} waiting: stuck"
        )

    def check_answers(self) -> None:
        for r in self.requests:
            assert list(r.output_token_ids) == generate(
                r.tokens[: r.num_prompt_tokens],
                r.max_total_tokens - r.num_prompt_tokens,
                self.scheduler.window_left,
            )


configurations = st.fixed_dictionaries(
    {
        "num_pages": st.integers(10, 40),
        "page_size": st.sampled_from([1, 2, 4, 8]),
        "cache": st.booleans(),
        "cache_pages": st.sampled_from([None, 0, 3, 10]),
        "grant": st.sampled_from([0, 1, 4, 16]),
        "mixed": st.booleans(),
        "max_num_seqs": st.integers(1, 6),
        "chunk": st.integers(1, 12),
        "watermark": st.sampled_from([0.0, 0.1]),
        "window": st.sampled_from([None, None, 0, 1, 5, 20]),
    }
)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), config=configurations, lag=st.integers(0, 1))
def test_every_request_finishes_with_the_answer_it_gets_alone(
    data: st.DataObject, config: dict[str, object], lag: int
) -> None:
    driver = Driver(make_scheduler(**config), lag)  # type: ignore[arg-type]
    capacity = int(config["num_pages"]) * int(config["page_size"])  # type: ignore[call-overload]
    heads = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=3))
    events = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(["add", "add", "turn", "cancel", "tick", "tick", "ticks"]),
                st.integers(0, 99),
                st.integers(1, 12),
                st.lists(st.integers(0, 2), max_size=6),
            ),
            max_size=40,
        )
    )
    answered: list[Request] = []
    for kind, pick, count, tail in events:
        if kind == "add" or (kind == "turn" and answered):
            prompt = heads[pick % len(heads)] + tail
            if kind == "turn":
                prompt = answered[pick % len(answered)].tokens + tail
            prompt = prompt[: capacity - 1]
            driver.add(
                prompt,
                min(count, capacity - len(prompt)),
                priority=pick % 3,
                cache_salt=[None, "a"][pick % 2],
                use_prefix_cache=pick % 7 != 0,
            )
        elif kind == "cancel" and driver.requests:
            victim = driver.requests[pick % len(driver.requests)]
            if victim.state is not State.FINISHED:
                driver.scheduler.finish(victim)
                driver.scheduler.check()
                driver.requests.remove(victim)
        else:
            for _ in range(count if kind == "ticks" else 1):
                answered += driver.device.tick()
    driver.run()
    driver.check_answers()
    assert driver.scheduler.allocator.num_in_use == 0


@pytest.mark.parametrize("cache", [True, False])
def test_pages_behind_the_window_are_given_back(cache: bool) -> None:
    """Decoding, a request holds the pages of its window; without a window it would need 20."""
    driver = Driver(make_scheduler(24, 4, cache=cache, window=6, chunk=4))
    request = driver.add([1, 2, 3, 4, 5], 75)
    most = 0
    while driver.scheduler.has_work():
        driver.device.tick()
        if not request.prefilling:
            most = max(most, len(request.own_pages))
    driver.check_answers()
    assert most == 3  # 7 tokens lie in 3 pages at most
    assert driver.scheduler.allocator.num_in_use == 0


def test_many_long_answers_fit_where_only_their_windows_do() -> None:
    driver = Driver(make_scheduler(24, 4, cache=False, window=6, chunk=4))
    for n in range(4):
        driver.add([n, n, 2], 60)
    driver.run()
    driver.check_answers()
    assert driver.scheduler.stats.preemptions == 0


def test_what_a_window_has_passed_is_still_cached_for_the_next_turn() -> None:
    """The prompt's pages stay in the tree; only what was never in it is lost."""
    driver = Driver(make_scheduler(32, 4, window=6, chunk=4))
    first = driver.add(list(range(20)), 9)
    driver.run()
    again = driver.add([*first.tokens, 7], 2)
    driver.run()
    driver.check_answers()
    assert again.num_cached_tokens == 28  # 29 tokens were written but the last


def test_a_whole_prompt_hit_recomputes_exactly_the_last_token() -> None:
    for length in (7, 8, 9):
        driver = Driver(make_scheduler(chunk=16))
        prompt = list(range(length))
        driver.add(prompt, 3)
        driver.run()
        again = driver.add(prompt, 3)
        driver.run()
        driver.check_answers()
        assert again.num_cached_tokens == length - 1
        assert driver.device.plans[-3].rows[0].count == 1


def test_adoption_never_consumes_an_entry() -> None:
    driver = Driver(make_scheduler(num_pages=64, chunk=32))
    prompt = list(range(18))
    driver.add(prompt, 2)
    driver.run()
    followers = [driver.add([*prompt, 100 + i], 2) for i in range(4)]
    driver.run()
    driver.check_answers()
    assert [r.num_cached_tokens for r in followers] == [18] * 4


class CountedToken(int):
    """A token that counts how often it is looked up in the tree."""

    hashed = 0

    def __hash__(self) -> int:
        CountedToken.hashed += 1
        return int(self)


@pytest.mark.parametrize("second", ["same", "other", "none"])
def test_a_chunk_costs_the_tree_no_more_than_itself(second: str) -> None:
    """A prompt of 100 chunks beside a stream; a second one that waits is looked up with each."""
    driver = Driver(make_scheduler(num_pages=600, page_size=4, chunk=8, grant=1))
    stream = driver.add([1], 900)
    driver.device.tick()
    prompt = [CountedToken(n % 50) for n in range(800)]
    driver.add(prompt, 2)
    if second != "none":
        driver.add([*prompt[: 780 if second == "same" else 10], *map(CountedToken, range(20))], 2)
    CountedToken.hashed = 0
    while len(driver.scheduler.running) > 1 or driver.scheduler.waiting:
        driver.device.tick()
    assert stream.state is State.RUNNING
    assert 800 <= CountedToken.hashed < 10 * 800


def test_a_burst_shares_pages_in_the_step_that_writes_them() -> None:
    driver = Driver(make_scheduler(num_pages=64, chunk=64))
    burst = [driver.add([*range(16), 50 + i], 2) for i in range(4)]
    driver.run()
    driver.check_answers()
    assert [r.num_cached_tokens for r in burst] == [0, 16, 16, 16]
    assert len(driver.device.plans[0].rows) == 4


def test_equal_prompts_that_end_with_a_page_start_in_one_step() -> None:
    """The twin may not copy from a page of this step, and its own last page is still in use when it is replaced."""
    driver = Driver(make_scheduler(num_pages=64, chunk=64))
    driver.add(list(range(12)), 3)
    twin = driver.add(list(range(12)), 3)
    driver.add(list(range(50, 58)), 3)
    driver.run()
    driver.check_answers()
    assert twin.num_cached_tokens == 8
    assert len(driver.device.plans[0].rows) == 3


def test_salts_do_not_share() -> None:
    driver = Driver(make_scheduler(chunk=32))
    prompt = list(range(12))
    driver.add(prompt, 2, cache_salt="a")
    driver.run()
    other = driver.add(prompt, 2, cache_salt="b")
    same = driver.add(prompt, 2, cache_salt="a")
    driver.run()
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 11)


def test_the_next_turn_adopts_the_answer_too() -> None:
    driver = Driver(make_scheduler(chunk=32))
    first = driver.add(list(range(10)), 9)
    driver.run()
    second = driver.add([*first.tokens, 3, 4], 5)
    driver.run()
    driver.check_answers()
    assert second.num_cached_tokens == 18  # all but the last token, whose KV nobody computed


def test_an_exhausted_pool_preempts_the_least_progress_and_loses_nothing() -> None:
    driver = Driver(make_scheduler(num_pages=8, cache=False, chunk=16))
    old = driver.add([1] * 8, 20)
    for _ in range(4):
        driver.device.tick()
    young = driver.add([2] * 8, 20)
    driver.run()
    driver.check_answers()
    assert old.num_preemptions == 0
    assert young.num_preemptions > 0


def test_the_less_urgent_request_is_preempted_first() -> None:
    driver = Driver(make_scheduler(num_pages=8, cache=False, chunk=16))
    late = driver.add([1] * 8, 20, priority=5)
    for _ in range(4):
        driver.device.tick()
    urgent = driver.add([2] * 8, 20, priority=0)
    driver.run()
    driver.check_answers()
    assert urgent.num_preemptions == 0
    assert late.num_preemptions > 0


def test_priority_orders_the_queue() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1))
    driver.add([1], 4)
    driver.device.tick()
    slow = driver.add([2], 2, priority=9)
    urgent = driver.add([3], 2, priority=-1)
    order = []
    while driver.scheduler.has_work():
        order += driver.device.tick()
    assert order[1:] == [urgent, slow]


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("grant", [1, 4, 16])
def test_a_parked_prefill_progresses_and_decode_waits_one_chunk_at_most(grant: int, mixed: bool) -> None:
    driver = Driver(make_scheduler(num_pages=400, grant=grant, mixed=mixed, chunk=8))
    for i in range(3):
        driver.add([i], 300)
    for _ in range(3):
        driver.device.tick()
    long = driver.add(list(range(64)), 2)
    since, waited, chunks = 0, 0, 0
    while long.state is not State.FINISHED:
        before = len(driver.device.plans)
        driver.device.tick()
        for plan in driver.device.plans[before:]:
            mine = [row for row in plan.rows if row.request is long and row.prefill]
            chunks += len(mine)
            since = 0 if mine else since + 1
            waited = (
                0 if any(not row.prefill for row in plan.rows) else waited + sum(r.count for r in plan.rows)
            )
            assert since <= grant + 1 or long.num_output_tokens or not long.prefilling
            assert waited <= 8
    assert chunks == 8
    assert driver.scheduler.stats.ticks[Tick.GRANT.value] == 7


def test_without_grants_decoding_drains_before_a_parked_prefill() -> None:
    driver = Driver(make_scheduler(num_pages=100, grant=0, chunk=8))
    stream = driver.add([1], 30)
    driver.device.tick()
    long = driver.add(list(range(32)), 2)
    for _ in range(10):
        driver.device.tick()
    assert long.num_scheduled == 8
    after = driver.add([5], 2)
    driver.run()
    driver.check_answers()
    kinds = [r for r in driver.requests if r.state is State.FINISHED]
    assert len(kinds) == 3
    assert stream.num_preemptions == long.num_preemptions == after.num_preemptions == 0


def test_a_short_prompt_slips_past_a_parked_one() -> None:
    driver = Driver(make_scheduler(num_pages=400, grant=16, chunk=8))
    for i in range(2):
        driver.add([i], 200)
    driver.device.tick()
    driver.add(list(range(200)), 2)
    for _ in range(2):
        driver.device.tick()
    short = driver.add([7, 8], 1)
    for _ in range(3):
        driver.device.tick()
    assert short.state is State.FINISHED


def test_the_watermark_keeps_pages_for_the_running_rows() -> None:
    driver = Driver(make_scheduler(num_pages=10, cache=False, watermark=0.3, chunk=16))
    driver.add([1] * 15, 5)
    driver.device.tick()
    waiting = driver.add([2] * 16, 4)
    driver.device.tick()
    assert waiting.state is State.WAITING
    driver.run()
    driver.check_answers()
    assert driver.scheduler.stats.preemptions == 0


def test_a_prompt_that_fills_the_pool_is_not_blocked_by_its_own_cached_tail() -> None:
    driver = Driver(make_scheduler(num_pages=4, chunk=16))
    driver.add(list(range(14)), 1)
    driver.run()
    again = driver.add([*range(14), 99], 1)
    driver.run()
    driver.check_answers()
    assert again.num_cached_tokens is not None


def test_a_suspect_runs_alone() -> None:
    driver = Driver(make_scheduler())
    for i in range(3):
        driver.add([i, 1, 2], 6)
    for _ in range(3):
        driver.device.tick()
    while driver.device.in_flight:
        driver.device.read()
    for request in list(driver.scheduler.running):
        driver.scheduler.requeue(request, keep=False)
        driver.scheduler.suspects[request] = None
    before = len(driver.device.plans)
    while driver.scheduler.suspects:
        done = driver.device.tick()
        alone = driver.device.plans[before:]
        assert all(len(plan.rows) == 1 for plan in alone)
        for plan in alone:
            if plan.rows[0].sample:
                driver.scheduler.suspects.pop(plan.rows[0].request, None)
        before = len(driver.device.plans)
        assert not driver.scheduler.suspects.keys() & set(done)
    driver.run()
    driver.check_answers()


def test_a_budget_below_the_rows_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"\[scheduler\] max_num_batched_tokens must be at least max_num_seqs"
    ):
        make_scheduler(max_num_seqs=8, budget=4)


def test_a_suspect_without_pages_waits_for_those_that_run() -> None:
    """It cannot start beside the others: they must go on, or nothing would ever be planned again."""
    driver = Driver(make_scheduler(num_pages=4, cache=False, watermark=0.01))
    _, second = driver.add(list(range(6)), 6), driver.add(list(range(10, 16)), 6)
    driver.device.tick()
    assert len(driver.scheduler.running) == 1  # the watermark keeps the second out
    driver.scheduler.suspects[second] = None
    driver.run()
    driver.check_answers()

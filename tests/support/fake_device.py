"""A device for the scheduler's tests: pages are lists of tokens, and the next token is a hash of all it can see."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence

from mlxcel_ext.scheduler.request import Request, State
from mlxcel_ext.scheduler.scheduler import Scheduler, StepPlan

VOCAB = 997


def next_token(history: Sequence[int]) -> int:
    """The model: any wrong, missing or extra token of the history changes the answer."""
    digest = hashlib.blake2b(b",".join(b"%d" % t for t in history), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def generate(prompt: Sequence[int], count: int, window_left: int | None = None) -> list[int]:
    """What a request must answer, alone and without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens if window_left is None else tokens[-window_left - 1 :]))
    return tokens[len(prompt) :]


class FakeDevice:
    """Runs plans in order, ``lag`` steps ahead of the host: a sampled token is fed back before it is read."""

    def __init__(self, scheduler: Scheduler, lag: int = 1) -> None:
        self.scheduler = scheduler
        self.lag = lag
        self.pages: dict[int, list[int | None]] = {
            page: [None] * scheduler.page_size for page in range(scheduler.allocator.num_pages)
        }
        self.in_flight: deque[list[tuple[Request, int]]] = deque()
        self.decode_gap = 0  # prompt tokens computed since decoding rows last ran
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        size = self.scheduler.page_size
        unread = {request: token for sampled in self.in_flight for request, token in sampled}
        sources = [self.pages[c.source][: c.num_tokens] for c in plan.copies]
        for copy, source in zip(plan.copies, sources, strict=True):
            self.pages[copy.target] = [*source, *[None] * (size - copy.num_tokens)]
        written: set[tuple[int, int]] = set()
        for row in plan.rows:
            for position in range(row.start, row.start + row.count):
                tokens = row.request.tokens
                token = tokens[position] if position < len(tokens) else unread[row.request]
                slot = (row.pages[position // size], position % size)
                assert slot not in written, f"two rows write slot {slot} in one step"
                written.add(slot)
                self.pages[slot[0]][slot[1]] = token
        sampled = []
        for row in plan.rows:
            assert len(row.pages) == -(-(row.start + row.count) // size)
            window, end = self.scheduler.window_left, row.start + row.count
            first = 0 if window is None else max(0, row.start - window)
            seen = [self.pages[row.pages[p // size]][p % size] for p in range(first, end)]
            assert None not in seen, "a row reads a slot that nobody wrote"
            known = row.request.tokens[first:end]
            assert seen[: len(known)] == known, "a row reads another's tokens"
            if row.sample:
                visible = seen if window is None else seen[-window - 1 :]
                sampled.append((row.request, next_token([t for t in visible if t is not None])))
        self.in_flight.append(sampled)
        self.plans.append(plan)

    def read(self) -> list[Request]:
        """Read the oldest step; returns the requests that have all their tokens now."""
        done = []
        for request, token in self.in_flight.popleft():
            if request.state is State.FINISHED:
                continue
            self.scheduler.append(request, token)
            if len(request.tokens) == request.max_total_tokens:
                done.append(request)
        return done

    def tick(self) -> list[Request]:
        """One turn of the engine's loop, with the scheduler's self-check."""
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan is not None:
            self.submit(plan)
        done: list[Request] = []
        while self.in_flight and (len(self.in_flight) > self.lag or plan is None):
            done += self.read()
        for request in done:
            self.scheduler.finish(request)
        self.scheduler.check()
        return done

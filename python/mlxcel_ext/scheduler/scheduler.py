"""The scheduler: admission, chunked prefill, page reservation, preemption."""

from __future__ import annotations

import math
from array import array
from bisect import insort
from dataclasses import dataclass, field

from ..kvcache.page_allocator import PageAllocator
from ..kvcache.prefix_tree import PrefixMatch, PrefixTree
from .policy import Tick, TickPolicy, TickState
from .request import Request, State


@dataclass(eq=False, slots=True)
class ScheduledRow:
    """Tokens ``start .. start+count`` of one request in a step.

    pages    the request's page row once those tokens are written
    sample   a token is drawn from the last of them, the draw_index-th of the request
    slot     the request's slot, also when it has lost it since
    admitted the first row since the request's (last) admission
    """

    request: Request
    start: int
    count: int
    pages: array[int]
    sample: bool
    draw_index: int
    prefill: bool
    slot: int
    admitted: bool = False


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy-on-write: the first ``num_tokens`` slots of a shared page are needed in a page of one's own."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Copies happen before anything is written; decode rows come first.

    alone: it is the step of a suspect.
    """

    tick: Tick
    rows: list[ScheduledRow]
    copies: list[PageCopy]
    alone: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(slots=True)
class SchedulerStats:
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    #: Times that the first waiting request did not start, by reason.
    declined: dict[str, int] = field(default_factory=lambda: {"pages": 0, "watermark": 0})
    ticks: dict[str, int] = field(default_factory=lambda: {t.value: 0 for t in Tick})


class Scheduler:
    """Plans steps over a pool of pages.

    A plan is made of what the host knows; tokens that the device has sampled and nobody has read count as
    ``num_unread``. The caller submits every plan in order, reports each sampled token with ``append`` in
    the same order, and may finish a request at any time: rows already submitted for it are then ignored.

    window_left is the largest window of the model's layers, None where a layer sees everything: pages that have
    left it are given back while their request runs.

    Every request finishes: the running request with the most progress is never preempted for another,
    a single request fits into the pool, and the policy gives every parked prefill its turn.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        tree: PrefixTree | None,
        policy: TickPolicy,
        *,
        page_size: int,
        max_num_seqs: int,
        prefill_chunk_size: int,
        token_budget: int,
        watermark: float = 0.0,
        window_left: int | None = None,
    ) -> None:
        if token_budget < max_num_seqs:
            raise ValueError(
                f"[scheduler] max_num_batched_tokens must be at least max_num_seqs ({max_num_seqs}); got {token_budget}."
            )
        self.allocator = allocator
        self.tree = tree
        self.policy = policy
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.prefill_chunk_size = prefill_chunk_size
        self.token_budget = token_budget
        self.window_left = window_left
        self.watermark_pages = math.ceil(watermark * allocator.num_pages)
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # sorted by queue_key
        #: They took part in a failed step: each runs alone until the caller clears it, by taking it out of here.
        self.suspects: dict[Request, None] = {}
        self.stats = SchedulerStats()
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._since_grant = 0
        self._decode_waited = False
        # allocator.releases when the first waiting request last found too few pages.
        self._blocked_at = -1
        # Pages that the plan in the making still reads: released when it is complete.
        self._to_release: list[int] = []
        # Prompt tokens that the first waiting request would have to compute, and for what that holds.
        self._uncached: tuple[Request | None, int, int] = (None, -1, 0)

    # -- the life of a request ---------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. It must fit into the pool: pages_for(max_total_tokens) <= num_pages."""
        insort(self.waiting, request, key=lambda r: r.queue_key)
        self._blocked_at = -1

    def forget(self, plan: StepPlan) -> None:
        """A plan failed: nothing will be read from it. Its requests have to be requeued or finished."""
        for row in plan.rows:
            if row.sample:
                row.request.num_unread -= 1

    def append(self, request: Request, token: int) -> None:
        """Report the oldest unread token of a request."""
        request.tokens.append(token)
        request.num_unread -= 1

    def finish(self, request: Request, *, keep: bool = True) -> None:
        """Take a request out, whatever it is doing; its pages become free, or cached where keep is set."""
        if request.state is State.RUNNING:
            self.running.remove(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
            self._blocked_at = -1
        request.state = State.FINISHED
        self.suspects.pop(request, None)
        self._release(request, keep=keep)

    def requeue(self, request: Request, *, keep: bool) -> None:
        """Take the pages of a running request away: it recomputes them when it is admitted again.

        keep: the KV written so far is sound and may stay in the prefix cache while nobody needs the pages.
        """
        self.running.remove(request)
        request.state = State.WAITING
        request.prefilling = True
        self._release(request, keep=keep)
        self.add(request)

    def _release(self, request: Request, *, keep: bool) -> None:
        replaced: list[int] = []
        if self.tree is not None and keep and request.use_prefix_cache and request.pages:
            # From the root: the whole path has been used until now.
            replaced = self.tree.insert(
                request.tokens,
                request.pages,
                request.cache_salt,
                count=min(request.num_scheduled, len(request.tokens)),
                first=request.num_dropped,
                with_tail=True,
            )
        for page in (*request.own_pages, *replaced):
            self.allocator.release(page)
        request.pages = array("i")
        request.num_dropped = 0
        request.num_scheduled = 0
        if request.slot >= 0:
            self._slots.append(request.slot)
            request.slot = -1
        if self.tree is not None:
            self.tree.trim()

    # -- the next step -----------------------------------------------------------------------------------

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or None where nothing can run (before the submitted steps are read)."""
        if self.tree is not None:
            self.tree.begin_step()
        if self.suspects:
            suspect = min(self.suspects, key=lambda r: (r.state is not State.RUNNING, r.queue_key))
            plan = self._schedule_alone(suspect)
            if plan is not None or suspect.state is not State.WAITING or suspect.num_unread:
                return plan
            # Too few pages: those that run, and are cleared, go on until they release some.
            return self._schedule_running()
        decoding, parked = [], []
        for request in self.running:
            if request.prefilling:
                parked.append(request)
            elif request.can_decode:
                decoding.append(request)
        state = TickState(
            decoding=len(decoding),
            parked=len(parked),
            waiting=len(self.waiting),
            admissible=self._admissible(bool(parked)),
            since_grant=self._since_grant,
            decode_waited=self._decode_waited,
        )
        tick = self.policy.decide(state)
        plan = StepPlan(tick, [], [])
        with_decode = tick is Tick.DECODE or (tick in (Tick.GRANT, Tick.ADMIT) and self.policy.mixed)
        if with_decode:
            self._add_decode_rows(plan, decoding)
        if tick is Tick.PREFILL:
            self._add_prefill_rows(plan, parked_first=True, whole=False)
        elif tick is Tick.GRANT:
            self._add_prefill_rows(plan, parked_first=True, whole=True)
        elif tick is Tick.ADMIT:
            self._add_prefill_rows(plan, parked_first=False, whole=True)
        if not plan.rows and tick is not Tick.DECODE and decoding and not with_decode:
            # The admission failed for want of pages: decode, which is how pages become free.
            plan = StepPlan(Tick.DECODE, [], [])
            self._add_decode_rows(plan, decoding)
        return self._commit(plan, state)

    def _commit(self, plan: StepPlan, state: TickState) -> StepPlan | None:
        for page in self._to_release:
            self.allocator.release(page)
        self._to_release.clear()
        for row in plan.rows:
            if row.sample:
                row.request.num_unread += 1
        if not plan.rows:
            self.stats.ticks[Tick.IDLE.value] += 1
            return None
        decoded = not plan.rows[0].prefill
        self._decode_waited = state.decoding > 0 and not decoded
        self._since_grant = 0 if plan.tick in (Tick.GRANT, Tick.PREFILL) else self._since_grant + decoded
        self.stats.ticks[plan.tick.value] += 1
        return plan

    def _schedule_alone(self, request: Request) -> StepPlan | None:
        plan = StepPlan(Tick.PREFILL, [], [], alone=True)
        if request.state is State.WAITING:
            if not request.num_unread:
                self._admit(plan, request, self.prefill_chunk_size, whole=False)
        elif request.prefilling:
            self._add_chunk(plan, request, self.prefill_chunk_size)
        elif request.can_decode:
            self._add_decode_rows(plan, [request])
        return self._commit(plan, TickState(0, 0, 0, False))

    def _schedule_running(self) -> StepPlan | None:
        """A step of the running requests, without admissions."""
        plan = StepPlan(Tick.DECODE, [], [])
        self._add_decode_rows(plan, [r for r in self.running if r.can_decode])
        if not plan.rows:
            plan = StepPlan(Tick.PREFILL, [], [])
            parked = [r for r in self.running if r.prefilling]
            self._add_chunks(plan, parked, min(self.prefill_chunk_size, self.token_budget))
        return self._commit(plan, TickState(0, 0, 0, False))

    def _drop_pages(self, request: Request, start: int) -> None:
        """Give back the pages that nobody reads from a request any more who computes its token ``start``.

        The steps before this one run first, so that whoever gets the pages now cannot disturb them.
        """
        if self.window_left is None:
            return
        passed = (start - self.window_left) // self.page_size
        for page in request.pages[request.num_dropped : max(passed, 0)]:
            self.allocator.release(page)
            request.num_dropped += 1

    # -- decode rows -------------------------------------------------------------------------------------

    def _add_decode_rows(self, plan: StepPlan, decoding: list[Request]) -> None:
        size, running = self.page_size, State.RUNNING
        if self.window_left is not None:
            for request in decoding:
                self._drop_pages(request, request.num_scheduled)
        for request in decoding:
            # The state is not RUNNING any more where the request was preempted for a row before it.
            if request.num_scheduled == len(request.pages) * size and request.state is running:
                self._reserve_next(request)
        for request in decoding:
            if request.state is not running:
                continue
            start = request.num_scheduled
            request.num_scheduled = start + 1
            pages = request.pages[: start // size + 1]
            draw_index = len(request.tokens) + request.num_unread - request.num_prompt_tokens
            plan.rows.append(ScheduledRow(request, start, 1, pages, True, draw_index, False, request.slot))

    def _reserve_next(self, request: Request) -> None:
        """Take the page of the next token; where none is free, preempt, if need be the request itself."""
        while request.state is State.RUNNING:
            pages = self._take_pages(1)
            if pages is not None:
                request.pages.extend(pages)
                return
            victim = max(self.running, key=_preemption_key)
            self.stats.preemptions += 1
            victim.num_preemptions += 1
            self.requeue(victim, keep=True)

    def _take_pages(self, count: int) -> list[int] | None:
        missing = count - self.allocator.num_free
        if missing > 0 and self.tree is not None:
            self.tree.evict(missing)
        return self.allocator.allocate(count)

    # -- prefill rows ------------------------------------------------------------------------------------

    def _add_prefill_rows(self, plan: StepPlan, *, parked_first: bool, whole: bool) -> None:
        """Spend one chunk on parked and new requests.

        whole: beside decoding rows a new request starts in the rest of a chunk only where it also finishes
        its prompt there, so that it is not parked with a few tokens to go.
        """
        left = chunk = min(self.prefill_chunk_size, self.token_budget - len(plan.rows))
        parked = [r for r in self.running if r.prefilling]
        if parked_first:
            left = self._add_chunks(plan, parked, left)
        while left > 0 and self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if request.num_unread:
                break
            first = left == chunk and not parked
            taken = self._admit(plan, request, left, whole=whole and not first)
            if not taken:
                break
            left -= taken
        if not parked_first:
            self._add_chunks(plan, parked, left)

    def _add_chunks(self, plan: StepPlan, parked: list[Request], left: int) -> int:
        for request in sorted(parked, key=lambda r: r.queue_key):
            if left <= 0:
                break
            left -= self._add_chunk(plan, request, left)
        return left

    def _add_chunk(self, plan: StepPlan, request: Request, most: int, *, admitted: bool = False) -> int:
        start = request.num_scheduled
        self._drop_pages(request, start)
        count = min(most, len(request.tokens) - start)
        request.num_scheduled = start + count
        last = request.num_scheduled == len(request.tokens)
        request.prefilling = not last
        pages = request.pages[: self.pages_for(request.num_scheduled)]
        draw_index = request.num_total_tokens - request.num_prompt_tokens
        plan.rows.append(
            ScheduledRow(request, start, count, pages, last, draw_index, True, request.slot, admitted)
        )
        if self.tree is not None and request.use_prefix_cache:
            # Steps run in order, and a layer writes all rows' KV before any row reads it: whoever is planned
            # after this row may adopt its pages, in this very step too.
            self._to_release += self.tree.insert(
                request.tokens,
                request.pages,
                request.cache_salt,
                count=request.num_scheduled,
                first=request.num_dropped,
                cursor=request.cursor,
            )
        return count

    # -- admission ---------------------------------------------------------------------------------------

    def _admissible(self, parked: bool) -> bool:
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return False
        request = self.waiting[0]
        if request.num_unread or self._blocked_at == self.allocator.releases:
            return False
        # A long prompt waits for the parked one; a short one slips past it.
        return not parked or self._uncached_tokens(request) <= self.prefill_chunk_size

    def _match(self, request: Request) -> PrefixMatch:
        if self.tree is None or not request.use_prefix_cache:
            return PrefixMatch()
        # The last token is always computed: its logits are what the request wants.
        return self.tree.match(request.tokens, request.cache_salt, count=len(request.tokens) - 1)

    def _uncached_tokens(self, request: Request) -> int:
        total = len(request.tokens)
        if total <= self.prefill_chunk_size or self.tree is None or not request.use_prefix_cache:
            return total
        if self._uncached[:2] != (request, self.tree.version):
            cached = self.tree.match_length(
                request.tokens, request.cache_salt, request.cursor, count=total - 1
            )
            self._uncached = (request, self.tree.version, total - cached)
        return self._uncached[2]

    def _admit(self, plan: StepPlan, request: Request, most: int, *, whole: bool) -> int:
        """Start the first waiting request; returns the tokens planned, 0 where it has to wait."""
        match = self._match(request)
        if whole and len(request.tokens) - match.num_tokens > most:
            return 0
        pages = self._adopt(request, match)
        if pages is None and match.partial_page is not None:
            # The page to copy from may be the one page too many.
            match = PrefixMatch(match.pages, None, len(match.pages) * self.page_size)
            pages = self._adopt(request, match)
        if pages is None:
            self._blocked_at = self.allocator.releases
            return 0
        if match.partial_page is not None:
            plan.copies.append(PageCopy(match.partial_page, pages[0], match.num_tokens % self.page_size))
            self._to_release.append(match.partial_page)
        self.waiting.remove(request)
        self.running.append(request)
        request.state = State.RUNNING
        request.pages = array("i", [*match.pages, *pages])
        request.slot = self._slots.pop()
        request.num_scheduled = match.num_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = match.num_tokens
            if self.tree is not None and request.use_prefix_cache:
                self.stats.prefix_queries += 1
                self.stats.prefix_hits += match.num_tokens > 0
                self.stats.prefix_query_tokens += len(request.tokens)
                self.stats.prefix_hit_tokens += match.num_tokens
        return self._add_chunk(plan, request, most, admitted=True)

    def _adopt(self, request: Request, match: PrefixMatch) -> list[int] | None:
        """Retain the matched pages and take the others that the known tokens need, or nothing at all."""
        adopted = list(match.pages)
        if match.partial_page is not None:
            adopted.append(match.partial_page)
        for page in adopted:
            self.allocator.retain(page)
        need = self.pages_for(len(request.tokens)) - len(match.pages)
        spare = self.watermark_pages if self.running else 0
        room = self.allocator.num_free + self.allocator.num_cached
        if room >= need + spare:
            pages = self._take_pages(need)
            if pages is not None:
                return pages
        self.stats.declined["watermark" if room >= need else "pages"] += 1
        for page in adopted:
            self.allocator.release(page)
        return None

    # -- self-check --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless pages, tables, tree and states agree."""
        held = list(self.tree.pages()) if self.tree is not None else []
        assert len(held) == (self.tree.num_pages if self.tree is not None else 0)
        self.allocator.check([r.own_pages for r in self.running], held)
        assert len(self.running) <= self.max_num_seqs
        assert all(r.state is State.RUNNING for r in self.running)
        assert all(r.state is State.WAITING and not r.pages for r in self.waiting)
        assert [r.queue_key for r in self.waiting] == sorted(r.queue_key for r in self.waiting)
        for r in self.running:
            assert r.num_scheduled <= len(r.pages) * self.page_size
            assert r.num_scheduled <= r.num_total_tokens
            followed = r.cursor.pages()
            assert followed[r.num_dropped :] == list(r.pages[r.num_dropped : len(followed)])
        slots = [r.slot for r in self.running]
        assert sorted(slots + self._slots) == list(range(self.max_num_seqs)), "two requests share a slot"


def _preemption_key(request: Request) -> tuple[int, int, int, int]:
    """The largest goes first: the least urgent, then the least progress, then the youngest."""
    return (request.priority, -request.num_output_tokens, -request.num_scheduled, request.arrival)

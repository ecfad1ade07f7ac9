"""From the rows of a step to its page table and positions; from one decode step to the next, only what changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .ops import PageTable
from .ops.device import to_device
from .scheduler.request import Request
from .scheduler.scheduler import ScheduledRow

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Prompt tokens ``first .. first+count`` of a request, predicted by the tokens before them."""

    request: Request
    first: int
    count: int

    @property
    def targets(self) -> list[int]:
        return self.request.tokens[self.first : self.first + self.count]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What AttentionBatch is made of, before there is a plan."""

    positions: mx.array
    table: PageTable
    #: None: one token a request.
    qo_indptr: Int32 | None
    #: Packed tokens whose logits are wanted, of sampled rows and then of the scored ones; None: all, in order.
    logit_rows: mx.array | None
    scored: list[ScoredTokens]


class StepBatcher:
    """Makes one StepBatch after another.

    A step that decodes the rows of the step before shares that one's table, device arrays included, as long as
    no row begins a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        # Of the last step, if all its rows decoded: requests, positions of their tokens, and the table.
        self._requests: list[Request] = []
        self._starts: list[int] = []
        self._table: PageTable | None = None

    def batch(self, rows: Sequence[ScheduledRow]) -> StepBatch:
        """The batch of a step; its decode rows come first."""
        if rows[-1].prefill:
            self._table = None
            return self._mixed(rows)
        requests = [row.request for row in rows]
        starts = [row.start for row in rows]
        positions = np.array(starts, np.int32)
        last = self._table
        if (
            last is not None
            and last.room > 0
            and starts == [start + 1 for start in self._starts]
            and requests == self._requests
        ):
            table = last.advance()
        else:
            table = self._make_table(rows, positions + 1)
        self._requests, self._starts, self._table = requests, starts, table
        return StepBatch(to_device(positions), table, None, None, [])

    def _mixed(self, rows: Sequence[ScheduledRow]) -> StepBatch:
        counts = np.array([row.count for row in rows], np.int32)
        ends = np.array([row.start for row in rows], np.int32) + counts
        table = self._make_table(rows, ends)
        ends_in_batch = np.cumsum(counts, dtype=np.int32)
        qo_indptr: Int32 | None = None
        positions = ends - 1
        if int(counts.max()) > 1:
            qo_indptr = np.concatenate([np.zeros(1, np.int32), ends_in_batch])
            qo_indptr.flags.writeable = False  # so that it is recognised without a comparison
            positions = np.arange(qo_indptr[-1], dtype=np.int32) + np.repeat(ends - ends_in_batch, counts)
        logit_rows, scored = _logit_rows(rows, (ends_in_batch - 1).tolist())
        return StepBatch(to_device(positions), table, qo_indptr, logit_rows, scored)

    def _make_table(self, rows: Sequence[ScheduledRow], ends: Int32) -> PageTable:
        size = self._page_size
        full = (ends - 1) // size  # pages before the last one
        kv_indptr = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(full + 1, out=kv_indptr[1:])
        kv_indices = np.frombuffer(b"".join([row.pages for row in rows]), np.int32)
        return PageTable(kv_indptr, kv_indices, ends - full * size, size)


def _logit_rows(
    rows: Sequence[ScheduledRow], last: Sequence[int]
) -> tuple[mx.array | None, list[ScoredTokens]]:
    """Packed tokens whose logits are wanted, None for all; ``last`` holds each row's last token."""
    wanted = [at for at, row in zip(last, rows, strict=True) if row.sample]
    scored: list[ScoredTokens] = []
    for at, row in zip(last, rows, strict=True):
        job = row.request.job
        if row.prefill and job.params.prompt_logprobs is not None:
            # The prompt is scored once, not again after a preemption.
            first = max(row.start + 1, job.num_scored)
            count = min(row.start + row.count + 1, row.request.num_prompt_tokens) - first
            if count > 0:
                begin = at - row.count + first - row.start
                wanted += range(begin, begin + count)
                scored.append(ScoredTokens(row.request, first, count))
                job.num_scored = first + count
    if not scored and len(wanted) == last[-1] + 1:
        return None, scored
    return to_device(np.array(wanted, np.int32)), scored

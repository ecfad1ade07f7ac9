"""A batch that is derived from the step before equals one that is made from nothing."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from mlxcel_ext.sampling_params import SamplingParams
from mlxcel_ext.scheduler.request import Request
from mlxcel_ext.scheduler.scheduler import ScheduledRow
from mlxcel_ext.step_batch import StepBatch, StepBatcher
from tests.support.device import uploaded

PAGE = 4


def make_request(number: int, written: int) -> Request:
    request = Request(str(number), [1] * 100, 1000, number)
    request.job = SimpleNamespace(params=SamplingParams(), num_scored=1)
    request.pages = array("i", range(100 * number, 100 * number + 60))
    request.num_scheduled = written
    return request


def row_of(request: Request, count: int, *, prefill: bool) -> ScheduledRow:
    start = request.num_scheduled
    request.num_scheduled += count
    pages = request.pages[: -(-request.num_scheduled // PAGE)]
    return ScheduledRow(request, start, count, pages, True, 0, prefill, request.arrival)


def contents(batch: StepBatch) -> list[object]:
    table = batch.table
    table.validate(10_000)
    return [
        uploaded(batch.positions),
        table.kv_indptr.tolist(),
        table.kv_indices.tolist(),
        table.kv_last_page_len.tolist(),
        table.kv_len.tolist(),
        None if batch.qo_indptr is None else batch.qo_indptr.tolist(),
        uploaded(table.slots_on_device(batch.qo_indptr, 10_000)),
        None if batch.logit_rows is None else uploaded(batch.logit_rows),
    ]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.lists(st.tuples(st.sampled_from(["decode"] * 6 + ["leave", "join", "chunk"]), st.integers(0, 9))),
)
def test_a_derived_batch_equals_a_fresh_one(written: list[int], steps: list[tuple[str, int]]) -> None:
    requests = [make_request(i, n) for i, n in enumerate(written)]
    batcher = StepBatcher(PAGE)
    for kind, pick in steps:
        prefill = []
        if kind == "leave" and len(requests) > 1:
            requests.pop(pick % len(requests))
        elif kind == "join":
            requests.append(make_request(10 + pick, pick))
        elif kind == "chunk":
            requests.append(make_request(20 + pick, pick))
            prefill = [requests[-1]]
        if any(r.num_scheduled > 200 for r in requests):
            break
        rows = [row_of(r, 1, prefill=False) for r in requests if r not in prefill]
        rows += [row_of(r, 1 + pick, prefill=True) for r in prefill]
        assert contents(batcher.batch(rows)) == contents(StepBatcher(PAGE).batch(rows))


def test_decode_steps_share_what_stays_the_same() -> None:
    requests = [make_request(0, 5), make_request(1, 9)]
    batcher = StepBatcher(PAGE)
    tables = [batcher.batch([row_of(r, 1, prefill=False) for r in requests]).table for _ in range(5)]
    assert [t.kv_last_page_len.tolist() for t in tables] == [[2, 2], [3, 3], [4, 4], [1, 1], [2, 2]]
    assert tables[0].kv_indices is tables[1].kv_indices is tables[2].kv_indices
    assert tables[3].kv_indices is not tables[2].kv_indices
    assert tables[4].kv_indices is tables[3].kv_indices
    # A request whose pages were exchanged in a prompt's last chunk is not taken for the one before.
    chunk = batcher.batch([row_of(requests[0], 1, prefill=True)])
    requests[0].pages[0] = 77
    assert batcher.batch([row_of(requests[0], 1, prefill=False)]).table.kv_indices[0] == 77
    assert np.array_equal(chunk.table.kv_indptr, [0, 3])

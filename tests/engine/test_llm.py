"""The offline API over the hashing model."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from mlxcel_ext.llm import LLM, _Collector
from mlxcel_ext.outputs import Completion, RequestOutput, TokenLogprob
from mlxcel_ext.sampling_params import SamplingParams
from tests.engine.client import SMALL
from tests.support.fake_model import fake_loaded, generate


def test_threads_share_an_llm() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    start = threading.Barrier(4)

    def ask(first: int) -> None:
        start.wait()
        for n in range(30):
            prompts = [[first, 1 + n, i] for i in range(1, 4)]
            answers = llm.generate(prompts, params)
            assert [a.token_ids for a in answers] == [generate(p, 5) for p in prompts]
            assert [a.text for a in answers] == [llm.generate(p, params)[0].text for p in prompts]

    with LLM(fake_loaded(), **SMALL) as llm, ThreadPoolExecutor(4) as pool:  # type: ignore[arg-type]
        list(pool.map(ask, range(1, 5)))


def test_deltas_are_joined_without_copying_what_came_before() -> None:
    completion = Completion("r", None, [1])
    collect = _Collector(completion, threading.Semaphore(0))
    lists = set()
    for i in range(100):
        last = "length" if i == 99 else None
        scores = (TokenLogprob(i, -1.0, 1),)
        collect(
            RequestOutput("r", text=chr(97 + i % 26), token_ids=(i,), logprobs=scores, finish_reason=last)
        )
        lists |= {id(completion.logprobs), id(completion.token_ids)}
    assert len(lists) == 2
    assert completion.text == "".join(chr(97 + i % 26) for i in range(100))
    assert completion.token_ids == [s.token_id for s in completion.logprobs or []] == list(range(100))

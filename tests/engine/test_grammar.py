"""Constrained output over the hashing model: whatever it wants to say, it says it within the grammar."""

from __future__ import annotations

import json
import re
import threading

import pytest

from mlxcel_ext.grammar import Grammar, GrammarError
from mlxcel_ext.sampling_params import GrammarSpec, SamplingParams
from tests.engine.client import serving
from tests.support.fake_model import EOS, fake_loaded, generate


def constrained(spec: GrammarSpec, **kwargs: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 200, "grammar": spec, **kwargs})  # type: ignore[arg-type]


def test_a_choice_is_one_of_its_alternatives() -> None:
    spec = GrammarSpec("choice", ("red", "green", 'say-"blue"\\'))
    with serving(fake_loaded()) as client:
        texts = {client.ask([n], constrained(spec)).text for n in range(1, 25)}
    assert texts <= {"red", "green", 'say-"blue"\\'}
    assert len(texts) > 1


@pytest.mark.parametrize(
    "choices", [("app", "apple"), ("", "apple"), ("",), tuple(f"{n}x" for n in range(4096))]
)
def test_choices_may_be_many_empty_or_the_beginning_of_others(choices: tuple[str, ...]) -> None:
    with serving(fake_loaded()) as client:
        texts = {client.ask([n], constrained(GrammarSpec("choice", choices))).text for n in range(1, 17)}
    assert texts <= set(choices)


def test_a_regex_is_matched() -> None:
    with serving(fake_loaded()) as client:
        for n in range(1, 9):
            answer = client.ask([n], constrained(GrammarSpec("regex", r"[a-f]{3,5}-\d{2}")))
            assert re.fullmatch(r"[a-f]{3,5}-\d{2}", answer.text)
            assert answer.wait().finish_reason == "stop"


def test_a_schema_gives_valid_json() -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    with serving(fake_loaded()) as client:
        sent = [
            client.send(
                [n], constrained(GrammarSpec("json_schema", json.dumps(schema)), temperature=1.0, seed=n)
            )
            for n in range(1, 7)
        ]
        for answer in sent:
            assert answer.wait().finish_reason == "stop", answer.text
            value = json.loads(answer.text)
            assert isinstance(value["ok"], bool)
            assert value["kind"] in ("a", "b")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("stop", ["", "d"])
def test_min_tokens_puts_off_what_a_grammar_leaves_open_and_no_more(temperature: float, stop: str) -> None:
    params: dict[str, object] = {"temperature": temperature, "seed": 1, "min_tokens": 30}
    params["stop_token_ids"] = tuple(fake_loaded().tokenizer.encode(stop))
    with serving(fake_loaded()) as client:
        for n in range(1, 6):
            ended = client.ask([n], constrained(GrammarSpec("choice", ("ab", "cd")), **params))
            assert ended.wait().finish_reason == "stop"
            assert ended.text in ({"ab", "c"} if stop else {"ab", "cd"})
            open_ended = client.ask([n], constrained(GrammarSpec("regex", "[a-z]{1,60}"), **params))
            assert open_ended.wait().finish_reason == "stop"
            assert re.fullmatch("[a-z]{30,60}", open_ended.text)


def test_a_lark_grammar_and_a_json_object() -> None:
    with serving(fake_loaded()) as client:
        lark = 'start: "a" NUMBER ";"\nNUMBER: /[0-9]{1,3}/'
        assert re.fullmatch(r"a\d{1,3};", client.ask([1], constrained(GrammarSpec("grammar", lark))).text)
        assert client.ask([2], constrained(GrammarSpec("json_object"), max_tokens=20)).text.startswith("{")


def test_free_rows_are_the_same_beside_constrained_ones() -> None:
    free = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with serving(fake_loaded()) as client:
        bound = [client.send([n], constrained(GrammarSpec("regex", r"[a-z]{20,30}"))) for n in range(1, 4)]
        answers = [client.send([n, 7], free) for n in range(1, 4)]
        for n, answer in zip(range(1, 4), answers, strict=True):
            answer.wait()
            assert answer.token_ids == generate([n, 7], 40)
        assert all(re.fullmatch(r"[a-z]{20,30}", b.text) for b in bound if b.wait())
        assert client.engine.stats().counters["mlxcel_engine_sampling_total"]["after_read"] > 10


def test_a_grammar_survives_preemption() -> None:
    spec = GrammarSpec("regex", r"[a-z]{40}")
    gate = threading.Event()
    gate.set()
    loaded = fake_loaded(on_call=lambda *_: gate.wait(10))
    with serving(loaded, num_pages=24, watermark=0.0) as client:
        alone = client.ask([1, 2], constrained(spec)).text
        gate.clear()  # compiling takes longer than answering: none may end before all are there
        answers = [client.send([1, 2], constrained(spec)) for _ in range(4)]
        gate.set()
        assert {a.text for a in answers if a.wait()} == {alone}
        assert client.engine.stats().preemptions > 0


def test_the_end_is_no_text() -> None:
    with serving(fake_loaded()) as client:
        answer = client.ask([5], constrained(GrammarSpec("regex", r"[ab]+"), max_tokens=60))
        assert set(answer.text) <= {"a", "b"}
        assert answer.token_ids.count(EOS) <= 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (GrammarSpec("json_schema", "{"), "is not JSON"),
        (GrammarSpec("json_schema", "[1]"), "must be an object"),
        (GrammarSpec("json_schema", '{"type": "nonsense"}'), "does not compile"),
        (GrammarSpec("regex", "(unclosed"), "does not compile.*unclosed group"),
        (GrammarSpec("regex", "a" * 300_000), "at most 262144 characters; got 300000"),
        (GrammarSpec("choice", ("a" * 200_000, "b" * 100_000)), "at most 262144 characters; got 300000"),
        (GrammarSpec("grammar", "start: missing"), "does not compile"),
        (GrammarSpec("json_schema", '{"$ref": "#"}'), "does not compile"),
        (GrammarSpec("grammar", "start: <nope>"), "does not compile"),
        (GrammarSpec("choice", ()), "non-empty list"),
        (GrammarSpec("nonsense", "x"), "kind must be one of"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_grammar_is_refused_at_submission(spec: GrammarSpec, words: str) -> None:
    with serving(fake_loaded()) as client, pytest.raises(ValueError, match=words):
        client.send([1], constrained(spec))


def test_a_panic_of_the_matcher_is_an_error_of_the_request() -> None:
    class PanicException(BaseException):  # as pyo3's
        pass

    class Matcher:
        def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
            raise PanicException("index out of bounds")

        consume_token = unsafe_compute_mask_ptr

    grammar = Grammar(Matcher(), 64)  # type: ignore[arg-type]
    with pytest.raises(GrammarError, match="index out of bounds"):
        grammar.mask()


@pytest.mark.parametrize("method", ["mask", "accept"])
def test_a_grammar_that_fails_in_the_middle_is_its_author_s_error(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request ends as a client's error; those beside it, grammars too, never notice."""
    original = getattr(Grammar, method)
    calls: dict[Grammar, int] = {}

    def fails_at_last(grammar: Grammar, *args: int) -> object:
        calls[grammar] = calls.get(grammar, 0) + 1
        if calls[grammar] > 10:
            raise GrammarError("[grammar] too complex")
        return original(grammar, *args)

    monkeypatch.setattr(Grammar, method, fails_at_last)
    free = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with serving(fake_loaded()) as client:
        beside = client.send([1, 7], free)
        short = client.send([3], constrained(GrammarSpec("regex", r"[a-z]{5}")))
        long = client.send([2], constrained(GrammarSpec("regex", r"[a-z]{50}")))
        last = long.wait()
        assert (last.finish_reason, last.client_error) == ("error", True)
        assert last.error == "[grammar] too complex"
        assert re.fullmatch(r"[a-z]{9,10}", long.text)
        assert short.wait().finish_reason == "stop"
        assert not beside.wait().client_error
        assert beside.token_ids == generate([1, 7], 40)
        assert client.engine.stats().counters["mlxcel_request_failures_total"] == {"grammar": 1}
        assert client.engine.stats().counters["mlxcel_step_failures_total"] == {}


def test_a_fault_of_ours_in_a_grammar_is_no_client_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(grammar: Grammar) -> None:
        raise KeyError("bug")

    with serving(fake_loaded()) as client:
        client.ask([2], constrained(GrammarSpec("regex", r"[a-z]{5}")))
        params = constrained(GrammarSpec("regex", r"[a-y]{5}"))
        compiled = client.engine._grammars.compile(params.grammar)  # type: ignore[arg-type]
        monkeypatch.setattr(client.engine._grammars, "compile", lambda spec: compiled)
        monkeypatch.setattr(Grammar, "mask", bug)
        last = client.ask([2], params).wait()
        assert (last.finish_reason, last.client_error) == ("error", False)

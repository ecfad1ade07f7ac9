"""Tool-call parsers: every way of cutting a text into pieces gives the same calls and text."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_ext.server.json_scan import CallDelta
from mlxcel_ext.server.protocol import FunctionSpec, NamedFunction, NamedToolChoice, Tool
from mlxcel_ext.server.tools import (
    PARSERS,
    ForcedParser,
    ToolParser,
    detect_parser,
    forced_schema,
    held_back,
)

CALL = '{"name": "weather", "arguments": {"city": "Ulm \\"}\\u00e9", "days": [1, {"a": null}]}}'
ARGUMENTS = {"city": 'Ulm "}é', "days": [1, {"a": None}]}


def collect(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text and (name, arguments) of all calls, joined as a client joins them."""
    text, names, arguments = "", {}, {}
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    for delta in deltas:
        if isinstance(delta, str):
            text += delta
        else:
            assert isinstance(delta, CallDelta)
            assert (delta.name is not None) == (delta.index not in names), "the name comes once, first"
            names.setdefault(delta.index, delta.name)
            arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    return text, [(names[index], arguments[index]) for index in sorted(names)]


CASES = [
    ("hermes", f"Let me see.<tool_call>\n{CALL}\n</tool_call>", "Let me see.", [ARGUMENTS]),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", [ARGUMENTS] * 2),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "weather"}</tool_call> ok', " ok", [{"a": 1}]),
    ("hermes", f"\n<tool_call>{CALL}</tool_call>\nThat was it.\n", "\nThat was it.\n", [ARGUMENTS]),
    ("hermes", f"<tool_call>{CALL} and {CALL}</tool_call>", f" and {CALL}", [ARGUMENTS]),
    ("hermes", f"<tool_call>{CALL}\n<tool_call>{CALL}", "", [ARGUMENTS] * 2),
    ("hermes", f"<tool_call><tool_call>{CALL}</tool_call>", "<tool_call>", [ARGUMENTS]),
    (
        "hermes",
        f"</tool_call> <tool_call>{CALL}</tool_call></tool_call>",
        "</tool_call> </tool_call>",
        [ARGUMENTS],
    ),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {} oops}</tool_call>', " oops}", [{}]),
    ("hermes", '<tool_call>{"name": "weather", "id": 7, "arguments": {}, "x": "}"}</tool_call>', "", [{}]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {}, "parameters": {"a": 1}}', "", [{}]),
    ("hermes", '<tool_call>{"name": "weather", oops', '<tool_call>{"name": "weather", oops', []),
    ("hermes", '<tool_call>{"name": "weather"', '<tool_call>{"name": "weather"', []),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}', '<tool_call>{"name": "", "arguments": {}}', []),
    ("hermes", '<tool_call>{"arguments": "{', '<tool_call>{"arguments": "{', []),
    ("hermes", "<tool_call>", "<tool_call>", []),
    ("hermes", "<tool_call>\n ", "<tool_call>\n ", []),
    ("hermes", " \n", " \n", []),
    ("hermes", '<tool_call>{"name": "weather"}</tool_call>', "", [{}]),
    ("hermes", '<tool_call>{"name":"weather","arguments":"{\\"a\\": 1}"}</tool_call>', "", [{"a": 1}]),
    ("hermes", "a < b, <tool, <tool_cal", "a < b, <tool, <tool_cal", []),
    ("hermes", "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
    ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', []),
    ("llama3_json", CALL.replace("arguments", "parameters"), "", [ARGUMENTS]),
    ("llama3_json", f"<|python_tag|>{CALL}; {CALL}", "", [ARGUMENTS] * 2),
    ("llama3_json", "It is {fine}.", "It is {fine}.", []),
    ("llama3_json", ' {"answer": 42}', ' {"answer": 42}', []),
    ("llama3_json", f" {CALL}; {CALL} Done; or not", " Done; or not", [ARGUMENTS] * 2),
    ("llama3_json", f"{CALL};", ";", [ARGUMENTS]),
    ("llama3_json", f"Sure. <|python_tag|>{CALL}", "Sure. ", [ARGUMENTS]),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3_json", "<|pyt", "<|pyt", []),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [ARGUMENTS] * 2),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"a": "}"}[TOOL_CALLS]weather{"a": 2}', "", [{"a": "}"}, {"a": 2}]),
    ("mistral", "text [TOOL_CAL", "text [TOOL_CAL", []),
    (
        "mistral",
        f"[TOOL_CALLS][{CALL}]\n[TOOL_CALLS]weather[CALL_ID]a1[ARGS] {{}} so",
        " so",
        [ARGUMENTS, {}],
    ),
    ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ("mistral", "[TOOL_CALLS] [x]", "[TOOL_CALLS] [x]", []),
    ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    ("mistral", "[TOOL_CALLS]  is what, {I} say", "[TOOL_CALLS]  is what, {I} say", []),
    ("mistral", "[TOOL_CALLS] {}", "[TOOL_CALLS] {}", []),
    ("mistral", f"[TOOL_CALLS][{CALL}, and", ", and", [ARGUMENTS]),
    ("mistral", "[TOOL_CALLS]weather[ARGS]", "[TOOL_CALLS]weather[ARGS]", []),
    # A name that JSON's parser gives up on, or that UTF-8 cannot carry, is no call: it shows as it was.
    (
        "mistral",
        '[TOOL_CALLS][{"name": ' + "[" * 3000 + "]" * 3000 + "}]",
        '[TOOL_CALLS][{"name": ' + "[" * 3000 + "]" * 3000 + "}]",
        [],
    ),
    ("mistral", r'[TOOL_CALLS][{"name": "\ud800"}]', r'[TOOL_CALLS][{"name": "\ud800"}]', []),
]


@pytest.mark.parametrize(("family", "source", "text", "calls"), CASES)
def test_a_call_reads_the_same_whole_and_by_character(
    family: str, source: str, text: str, calls: list
) -> None:
    for pieces in ([source], list(source)):
        got_text, got_calls = collect(PARSERS[family](), pieces)
        assert got_text == text
        assert [name for name, _ in got_calls] == ["weather"] * len(calls)
        assert [json.loads(arguments) for _, arguments in got_calls] == calls


@given(
    family=st.sampled_from(sorted(PARSERS)),
    source=st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "[TOOL_CALLS]",
                "<|python_tag|>",
                CALL,
                "{",
                "}",
                '"',
                "[",
                "]",
                " a",
                ";",
                '"name"',
                ":",
            ]
        ),
        max_size=12,
    ).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_any_cut_of_any_text_gives_one_reading(family: str, source: str, cuts: list[int]) -> None:
    edges = sorted({0, len(source), *(min(cut, len(source)) for cut in cuts)})
    pieces = [source[a:b] for a, b in itertools.pairwise(edges)]
    text, calls = collect(PARSERS[family](), [source])
    assert collect(PARSERS[family](), pieces) == (text, calls)
    if not calls:
        assert text == source


@given(
    family=st.sampled_from(sorted(PARSERS)),
    parts=st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "[TOOL_CALLS]",
                "<|python_tag|>",
                CALL,
                "[",
                "]",
                "{",
                ", ",
                "; ",
                "§ ",
            ]
        ),
        max_size=16,
    ),
)
def test_no_word_between_calls_is_lost(family: str, parts: list[str]) -> None:
    text, calls = collect(PARSERS[family](), ["".join(parts)])
    said = text + "".join(name + arguments for name, arguments in calls)
    assert said.count("§") == parts.count("§ ")
    assert said.count("Ulm") == parts.count(CALL)


@pytest.mark.parametrize("family", sorted(PARSERS))
def test_arguments_stream_before_the_call_ends(family: str) -> None:
    head = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS][", "llama3_json": ""}[family]
    parser = PARSERS[family]()
    deltas = parser.feed(head + '{"name": "weather", "arguments": {"city": "Ul')
    assert deltas == [CallDelta(0, "weather", '{"city": "Ul')]


def test_a_forced_named_call_is_its_arguments() -> None:
    assert collect(ForcedParser("f"), ['{"a"', ": 1}"]) == ("", [("f", '{"a": 1}')])


def test_a_required_call_is_an_array() -> None:
    source = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    assert collect(ForcedParser(None), list(source)) == ("", [("f", '{"a": 1}'), ("g", "{}")])


def test_the_schema_of_a_forced_choice_names_the_tools() -> None:
    tools = [
        Tool(FunctionSpec("f", parameters={"type": "object", "properties": {}})),
        Tool(FunctionSpec("g")),
    ]
    assert forced_schema(tools, NamedToolChoice(NamedFunction("g"))) == {"type": "object"}
    assert forced_schema(tools, "required", 1)["maxItems"] == 1
    schema = forced_schema(tools, "required")
    assert "maxItems" not in schema
    assert [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]] == ["f", "g"]


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("", "hermes"),
    ],
)
def test_the_template_tells_the_family(template: str, family: str) -> None:
    assert detect_parser(template) == family


def test_only_a_possible_marker_is_held_back() -> None:
    assert held_back("abc<tool", ("<tool_call>",)) == 5
    assert held_back("abc<<", ("<tool_call>",)) == 1
    assert held_back("abc", ("<tool_call>",)) == 0

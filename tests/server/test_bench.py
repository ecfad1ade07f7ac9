"""`bench serve` against a server over the fake engine."""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
from collections.abc import Callable

import pytest

from mlxcel_ext.bench.client import Sample, Target
from mlxcel_ext.bench.counters import Expected, notes
from mlxcel_ext.bench.report import percentile, summarize
from mlxcel_ext.cli import main

from .conftest import RunningServer
from .fake_engine import FakeEngine

Serve = Callable[..., RunningServer]


def bench(server: RunningServer, *arguments: str) -> int:
    return main(
        [
            "bench",
            "serve",
            "--base-url",
            server.url,
            "--num-prompts",
            "6",
            "--random-output-len",
            "5",
            *arguments,
        ]
    )


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_levels_give_vllms_keys(
    serve: Serve,
    engine: FakeEngine,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    endpoint: str,
) -> None:
    engine.step_seconds = 0.002
    server = serve(api_key=("key",))
    arguments = [
        "--endpoint",
        endpoint,
        "--api-key",
        "key",
        "--max-concurrency",
        "1,4",
        "--random-input-len",
        "20",
    ]
    saving = [
        "--save-detailed",
        "--result-dir",
        str(tmp_path),
        "--result-filename",
        "r.json",
        "--metadata",
        "a=b",
    ]
    assert bench(server, *arguments, *saving, "--metrics", "mlxcel_generation_tokens_total") == 0
    printed = capsys.readouterr().out
    assert printed.count("Serving Benchmark Result") == 2
    assert "mlxcel_generation_tokens_total: +30" in printed
    for level in (1, 4):
        result = json.loads((tmp_path / f"r-c{level}.json").read_text())
        assert (result["completed"], result["failed"], result["max_concurrency"]) == (6, 0, level)
        assert result["total_output_tokens"] == 30
        assert result["output_lens"] == [5] * 6
        assert [len(gaps) for gaps in result["itls"]] == [4] * 6
        assert result["metrics"]["mlxcel_generation_tokens_total"] == 30
        for name in (
            "mean_ttft_ms",
            "median_tpot_ms",
            "p99_itl_ms",
            "mean_e2el_ms",
            "request_throughput",
            "output_throughput",
            "total_token_throughput",
        ):
            assert result[name] > 0
        assert result["a"] == "b"
    if endpoint == "/v1/completions":
        assert result["input_lens"] == [20] * 6


def test_a_note_where_the_expected_counter_stood_still(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    counters = (
        "mlxcel_paged_decode_launches_total{path=fused_v2},mlxcel_paged_decode_launches_total{path=cascade}"
    )
    assert bench(serve(), "--metrics", counters) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("mlxcel_paged_decode_launches_total{path=fused_v2}: +") for line in lines)
    assert [line for line in lines if line.startswith("NOTE")] == [
        "NOTE: mlxcel_paged_decode_launches_total{path=cascade} did not move: this level did not take the path it counts"
    ]


def test_cascade_counters_are_printed_where_they_moved(
    serve: Serve, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve()
    assert bench(server, "--metrics", "mlxcel_generation_tokens_total") == 0
    assert "cascade" not in capsys.readouterr().out
    engine.cascade = True
    assert bench(server, "--metrics", "mlxcel_generation_tokens_total") == 0
    found = dict(re.findall(r"^(mlxcel_\S+): \+(\d+)$", capsys.readouterr().out, re.MULTILINE))
    launches = int(found['mlxcel_paged_decode_launches_total{path="cascade"}'])
    assert launches > 0
    assert int(found["mlxcel_cascade_member_sequences_total"]) % 3 == 0
    assert int(found["mlxcel_cascade_shared_tokens_total"]) % 64 == 0


def test_shared_prefixes_are_shared(serve: Serve, engine: FakeEngine) -> None:
    arguments = [
        "--dataset-name",
        "shared-prefix",
        "--shared-prefix-len",
        "32",
        "--shared-suffix-len",
        "4",
        "--shared-num-prefixes",
        "2",
    ]
    assert bench(serve(), *arguments, "--num-warmups", "0") == 0
    prompts = [tuple(ids) for ids, _ in engine.seen]
    assert {len(ids) for ids in prompts} == {36}
    assert len({ids[:32] for ids in prompts}) == 2
    assert len(set(prompts)) == 6


def test_a_file_of_prompts(serve: Serve, engine: FakeEngine, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"prompt": "two", "output_tokens": 2}\n')
    assert bench(serve(), "--dataset-name", "custom", "--dataset-path", str(path), "--num-warmups", "0") == 0
    assert sorted((len(ids), params.max_tokens) for ids, params in engine.seen) == [(3, 2)] * 3 + [(3, 5)] * 3


def test_a_rate_spreads_the_arrivals(serve: Serve, tmp_path: pathlib.Path) -> None:
    saving = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert bench(serve(), "--request-rate", "20", "--prompt-form", "text", *saving) == 0
    assert json.loads((tmp_path / "r.json").read_text())["duration"] > 0.05


def test_failed_requests_are_counted_and_shown(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(serve(), "--model", "wrong", "--prompt-form", "text") == 1
    printed = capsys.readouterr()
    assert "Failed requests:                          6" in printed.out
    assert "model_not_found" in printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-concurrency", "x"],
        ["--metrics", "a b"],
        ["--percentile-metrics", "xyz"],
        ["--request-rate", "0"],
        ["--metadata", "a"],
        ["--dataset-name", "custom"],
        ["--dataset-name", "custom", "--dataset-path", "/nowhere"],
        ["--random-range-ratio", "2"],
        ["--base-url", "ftp://x"],
    ],
)
def test_bad_flags_are_one_line(
    serve: Serve, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert bench(serve(), *arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--port", "9"]) == 2
    assert "no server at http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize("chunked", [True, False])
async def test_the_client_reads_every_kind_of_body(chunked: bool) -> None:
    events = (
        b': hi\n\ndata: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[{"text":"b"}]}\n\ndata: [DONE]\n\n'
    )

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if chunked:
            cut = 25  # in the middle of an event
            pieces = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (events[:cut], events[cut:]))
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + events)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    sample = await Target(f"http://127.0.0.1:{port}").stream("/x", {"a": 1}, 5)
    assert (sample.error, sample.text, sample.output_tokens, len(sample.itl)) == ("", "ab", 2, 1)
    server.close()


@pytest.mark.parametrize("header", ["transfer-encoding: chunked", "content-length: 500"])
async def test_a_server_that_dies_amid_an_answer_is_told(header: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        event = b'data: {"choices":[{"text":"a"}]}\n\n'
        framed = b"%x\r\n%s\r\n" % (len(event), event) if "chunked" in header else event
        writer.write(f"HTTP/1.1 200 OK\r\n{header}\r\n\r\n".encode() + framed)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    sample = await Target(f"http://127.0.0.1:{port}").stream("/x", {"a": 1}, 5)
    assert "closed the connection amid the answer" in sample.error
    server.close()


def test_summaries_of_known_numbers() -> None:
    samples = [Sample(0, 0.1, [0.1, 0.3], 0.5, 10, 3), Sample(0, 0.3, [], 0.3, 10, 1), Sample(error="x")]
    result = summarize(samples, 2.0, [50, 99])
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (2, 1, 4)
    assert result["mean_ttft_ms"] == pytest.approx(200)
    assert result["mean_tpot_ms"] == pytest.approx(200)
    assert result["median_itl_ms"] == pytest.approx(200)
    assert result["p50_e2el_ms"] == pytest.approx(400)
    assert result["output_throughput"] == 2
    assert percentile([1, 2, 3, 4], 50) == 2.5


def test_an_expected_counter_matches_by_label() -> None:
    deltas = {("c_total", frozenset({("path", "a")})): 3.0}
    assert notes([Expected.parse("c{path=a}"), Expected.parse('c_total{path="b"}')], deltas) == [
        "c{path=a}: +3",
        'NOTE: c_total{path="b"} did not move: this level did not take the path it counts',
    ]

"""The smaller routes: models, tokens, cache, metrics, the OpenAPI document, the dashboard's data."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from mlxcel_ext.server.app import ROUTES
from mlxcel_ext.server.settings import ServerSettings

from .fake_engine import FakeEngine, FakeTokenizer


async def test_models_lists_every_name(client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/models")).json()
    assert [card["id"] for card in body["data"]] == ["fake", "alias"]
    assert body["data"][0]["max_model_len"] == 2048
    assert (await client.get("/v1/models/alias")).json()["id"] == "alias"
    answer = await client.post("/v1/completions", json={"model": "alias", "prompt": "a", "max_tokens": 1})
    assert answer.json()["model"] == "alias"


async def test_tokenize_and_detokenize_are_inverse(client: httpx.AsyncClient) -> None:
    body = (await client.post("/tokenize", json={"prompt": "né", "return_token_strs": True})).json()
    assert body == {
        "count": 3,
        "max_model_len": 2048,
        "tokens": FakeTokenizer().encode("né"),
        "token_strs": ["n", "bytes:\\xc3", "bytes:\\xa9"],
    }
    assert (await client.post("/detokenize", json={"tokens": body["tokens"]})).json() == {"prompt": "né"}


async def test_tokenize_renders_messages(client: httpx.AsyncClient) -> None:
    body = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})).json()
    assert body["tokens"] == FakeTokenizer().encode("<user>a<assistant>")


async def test_special_tokens_can_be_left_out_of_the_text(client: httpx.AsyncClient) -> None:
    tokens = FakeTokenizer().encode("<user>a")
    assert (await client.post("/detokenize", json={"tokens": tokens})).json()["prompt"] == "<user>a"
    answer = await client.post("/detokenize", json={"tokens": tokens, "skip_special_tokens": True})
    assert answer.json()["prompt"] == "a"


async def test_cache_stats_and_reset(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": "a prompt longer than a page", "max_tokens": 1})
    stats = (await client.get("/v1/cache/stats")).json()
    assert (stats["page_size"], stats["pages_total"], stats["prefix_hit_rate"]) == (16, 1000, 0.0)
    assert (await client.post("/v1/cache/reset")).json() == {"pages_dropped": 1}
    assert (await client.post("/v1/cache/reset")).json() == {"pages_dropped": 0}


async def samples(client: httpx.AsyncClient) -> dict[str, float]:
    """Sample name to value; labels of which tests need none are left out."""
    text = (await client.get("/metrics")).text
    return {
        s.name + s.labels.get("finished_reason", ""): s.value
        for f in parse_text(text)
        for s in f.samples
        if s.labels.get("le", "+Inf") == "+Inf"
    }


async def test_metrics_count_requests_under_both_names(client: httpx.AsyncClient) -> None:
    before = await samples(client)
    await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5})
    await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2, "stream": True})
    after = await samples(client)

    def moved(name: str) -> float:
        return after[name] - before.get(name, 0)

    for prefix in ("mlxcel_", "vllm:"):
        assert moved(f"{prefix}prompt_tokens_total") == 6
        assert moved(f"{prefix}generation_tokens_total") == 7
        assert moved(f"{prefix}request_success_totallength") == 2
        assert moved(f"{prefix}time_to_first_token_seconds_count") == 2
        assert moved(f"{prefix}inter_token_latency_seconds_count") == 5
        for name in (
            "e2e_request_latency",
            "request_queue_time",
            "request_prefill_time",
            "request_decode_time",
        ):
            assert moved(f"{prefix}{name}_seconds_count") == 2
        assert moved(f"{prefix}request_generation_tokens_sum") == 7
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "cache_config_info",
    ):
        assert f"vllm:{name}" in after
    assert after["mlxcel_paged_decode_launches_total"] > 0


async def test_counters_without_a_label_begin_at_zero(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.cascade = True
    text = (await client.get("/metrics")).text
    assert 'mlxcel_cascade_shared_tokens_total{model_name="fake"} 0.0' in text
    await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    text = (await client.get("/metrics")).text
    assert 'mlxcel_cascade_shared_tokens_total{model_name="fake"} 128.0' in text
    assert 'mlxcel_paged_decode_launches_total{model_name="fake",path="cascade"} 2.0' in text


async def test_metrics_speak_openmetrics_too(client: httpx.AsyncClient) -> None:
    response = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    families = {family.name for family in parse_openmetrics(response.text)}
    assert {"mlxcel_prompt_tokens", "vllm:prompt_tokens"} <= families
    assert response.headers["content-type"].startswith("application/openmetrics-text")


async def test_paths_and_methods_that_do_not_exist_share_one_label(client: httpx.AsyncClient) -> None:
    for index in range(3):
        await client.get(f"/made/up/{index}")
        await client.request(f"MADEUP{index}", "/health")
    text = (await client.get("/metrics")).text
    assert "made/up" not in text
    assert "MADEUP" not in text
    assert re.search(r'mlxcel_http_requests_total\{method="any",route="/health",status="405"\} 3', text)
    assert re.search(r'mlxcel_http_requests_total\{method="any",route="unmatched",status="404"\} 3', text)


class TestWithoutAliases:
    @pytest.fixture
    def settings(self) -> ServerSettings:
        return ServerSettings(("fake",), metrics_compat="none")

    async def test_the_aliases_can_be_left_out(self, client: httpx.AsyncClient) -> None:
        assert "vllm:" not in (await client.get("/metrics")).text


async def test_the_document_names_every_route(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    described = {path.replace("{name}", "{name:path}") for path in document["paths"]} | {"/openapi.json"}
    assert described == {route.path for route in ROUTES}
    schema = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "temperature", "logit_bias", "structured_outputs", "stream_options"} <= set(schema)


async def test_the_dashboards_data(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5})
    data = (await client.get("/dashboard/data")).json()
    assert data["health"]["state"] == "ok"
    assert data["stats"]["generation_tokens"] == 5
    assert data["outcomes"] == {"length": 1}
    assert set(data["latency"]["ttft"]) == {"p50", "p90", "p99"}
    assert data["requests"][0]["tokens"] == 5


async def test_a_health_check_is_answered_while_rows_run(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    running = asyncio.create_task(client.post("/v1/completions", json={"prompt": "STALL"}))
    while not engine.stats().running:
        await asyncio.sleep(0.005)
    assert (await client.get("/health")).status_code == 200
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert engine.stats().running == 0

"""The dashboard in a real browser."""

from __future__ import annotations

import concurrent.futures
import pathlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable

import httpx
import pytest

from .conftest import RunningServer
from .fake_engine import FakeEngine

pytestmark = pytest.mark.browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1300,1000",
]


def browse(url: str, profile: pathlib.Path, *flags: str) -> str:
    """What Chromium prints; it waits until the page has polled a few times."""
    assert CHROMIUM, "this test needs Chromium: apt-get install chromium"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--virtual-time-budget=4000", *flags, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def load(server: RunningServer) -> None:
    """A few seconds of requests, so that the plots have something to show."""
    body = {"prompt": "the same long prompt, again and again", "max_tokens": 25}
    with concurrent.futures.ThreadPoolExecutor(6) as pool, httpx.Client(timeout=30) as client:
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            list(pool.map(lambda _: client.post(server.url + "/v1/completions", json=body), range(6)))


def test_the_dashboard_shows_the_server(
    serve: Callable[..., RunningServer], engine: FakeEngine, tmp_path: pathlib.Path
) -> None:
    engine.step_seconds = 0.005
    server = serve()
    load(server)
    page = browse(server.url + "/dashboard", tmp_path / "profile", "--dump-dom")
    assert re.search(r'<h1 id="model">fake</h1>', page)
    assert re.search(r'<span id="state"[^>]*>ok</span>', page)
    assert page.count("<polyline") >= 5
    assert page.count("<circle") >= 20
    assert "cascade" not in page[page.index("</script>") :] + page[: page.index("<script>")]
    generated = re.search(r"generated tokens</th><td>([\d.]+)(k?)", page)
    assert generated
    assert float(generated[1]) * (1000 if generated[2] else 1) >= 25


def test_the_dashboard_shows_cascades_where_there_are_any(
    serve: Callable[..., RunningServer], engine: FakeEngine, tmp_path: pathlib.Path
) -> None:
    engine.cascade = True
    server = serve()
    httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 5})
    page = browse(server.url + "/dashboard", tmp_path / "profile", "--dump-dom")
    assert re.search(r"cascade: launches, members, shared tokens</th><td>5, 15, 320</td>", page)


def test_the_dashboard_says_when_the_engine_is_dead(
    serve: Callable[..., RunningServer], engine: FakeEngine, tmp_path: pathlib.Path
) -> None:
    server = serve()
    engine.kill("the thread died")
    page = browse(server.url + "/dashboard", tmp_path / "profile", "--dump-dom")
    assert re.search(r'<span id="state"[^>]*class="bad"[^>]*>dead: the thread died</span>', page)

"""Server processes for the benchmarks."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (OSError, urllib.error.HTTPError):
        return False


@contextlib.contextmanager
def running(*command: str, path: str = "/health", limit: float = 300.0) -> Iterator[Server]:
    """`python COMMAND --port FREE`, once it answers 200 at path; ended by SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Ended from outside, Python would leave the server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    process = subprocess.Popen([sys.executable, *command, "--port", str(port)])
    server = Server(f"http://127.0.0.1:{port}", process)
    end = time.monotonic() + limit
    try:
        while not _answers(server.url + path):
            if process.poll() is not None:
                raise SystemExit(f"{command} ended with status {process.returncode}")
            if time.monotonic() > end:
                raise SystemExit(f"{command} did not answer within {limit:g} s")
            time.sleep(0.1)
        yield server
        if process.poll() is not None:
            raise SystemExit(f"{command} ended amid the benchmark with status {process.returncode}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ours(*arguments: str) -> contextlib.AbstractContextManager[Server]:
    """`mlxcel-ext serve` with these arguments."""
    return running("-m", "mlxcel_ext", "serve", "--log-level", "warning", *arguments)

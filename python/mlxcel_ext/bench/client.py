"""A small HTTP/1.1 client that stamps each server-sent event as it arrives: its own cost stays out of the numbers."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

#: Longest line of a stream; logprobs make long ones.
_LINE_LIMIT = 2**24
_READ = 65536


@dataclass
class Sample:
    """What one request measured, in seconds."""

    start: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None for answers of one token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True)
class Target:
    """A server, by its base URL."""

    url: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--base-url wants http://host:port, got {self.url!r}")

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urllib.parse.urlsplit(self.url)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        return await asyncio.open_connection(parts.hostname, port, ssl=tls, limit=_LINE_LIMIT)

    def head(self, method: str, path: str, length: int) -> bytes:
        parts = urllib.parse.urlsplit(self.url)
        lines = [
            f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1",
            f"host: {parts.netloc}",
            "connection: close",
        ]
        if length:
            lines += ["content-type: application/json", f"content-length: {length}"]
        if self.api_key:
            lines.append(f"authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def fetch(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Status and whole body of one request."""
        payload = b"" if body is None else json.dumps(body).encode()
        reader, writer = await self.open()
        try:
            writer.write(self.head(method, path, len(payload)) + payload)
            await writer.drain()
            status, headers = await _read_head(reader)
            return status, b"".join([piece async for piece in _read_body(reader, headers)])
        finally:
            writer.close()

    async def stream(self, path: str, body: dict[str, Any], timeout: float) -> Sample:
        """Send a streaming request and measure it; a failure is the sample's error."""
        sample = Sample(start=time.perf_counter())
        try:
            async with asyncio.timeout(timeout):
                await self._stream(path, body, sample)
        except TimeoutError:
            sample.error = f"no end within {timeout:g} s"
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            sample.error = f"{type(error).__name__}: {error}"
        return sample

    async def _stream(self, path: str, body: dict[str, Any], sample: Sample) -> None:
        payload = json.dumps(body).encode()
        reader, writer = await self.open()
        try:
            sample.start = time.perf_counter()
            writer.write(self.head("POST", path, len(payload)) + payload)
            await writer.drain()
            status, headers = await _read_head(reader)
            pieces = _read_body(reader, headers)
            if status != 200:
                text = b"".join([piece async for piece in pieces]).decode("utf-8", "replace")
                sample.error = f"HTTP {status}: {text[:300]}"
                return
            await _measure(pieces, sample)
        finally:
            writer.close()


async def _measure(pieces: AsyncIterator[bytes], sample: Sample) -> None:
    last = sample.start
    chunks = 0
    buffer = b""
    async for piece in pieces:
        now = time.perf_counter()
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            line = line.strip()
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                continue
            event = msgspec.json.decode(payload)
            if "error" in event:
                sample.error = json.dumps(event["error"])
                return
            if usage := event.get("usage"):
                sample.prompt_tokens = usage.get("prompt_tokens") or 0
                sample.output_tokens = usage.get("completion_tokens") or 0
                sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            for choice in event.get("choices") or ():
                delta = choice.get("delta")
                if delta is not None and not delta and choice.get("finish_reason"):
                    continue  # a chat's last chunk says how it ended and holds no token
                if delta is not None and "content" in delta and not delta["content"] and "role" in delta:
                    continue  # its first says the role
                if chunks == 0:
                    sample.ttft = now - sample.start
                else:
                    sample.itl.append(now - last)
                chunks += 1
                last = now
                sample.text += choice.get("text") or (delta or {}).get("content") or ""
    sample.latency = last - sample.start
    sample.output_tokens = sample.output_tokens or chunks
    if chunks == 0:
        sample.error = "the stream held no token"


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1])
    except (IndexError, ValueError, asyncio.IncompleteReadError):
        raise ValueError("the answer is no HTTP") from None
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return status, headers


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Pieces of the body as they come: chunked, of known length, or up to the end of the connection."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        buffer = b""
        while piece := await reader.read(_READ):
            body, buffer, ended = _dechunk(buffer + piece)
            if body:
                yield body
            if ended:
                return
        raise _cut_off()
    left = int(headers["content-length"]) if "content-length" in headers else None
    while left is None or left > 0:
        piece = await reader.read(_READ if left is None else min(left, _READ))
        if not piece:
            if left is not None:
                raise _cut_off()
            return
        left = None if left is None else left - len(piece)
        yield piece


def _dechunk(data: bytes) -> tuple[bytes, bytes, bool]:
    """The chunks that data holds whole, joined; what is left; and whether the last chunk was among them."""
    parts = []
    at = 0
    while (line_end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:line_end].split(b";")[0], 16)
        start = line_end + 2
        if len(data) < start + size + 2:
            break
        parts.append(data[start : start + size])
        at = start + size + 2
        if size == 0:
            return b"".join(parts), b"", True
    return b"".join(parts), data[at:], False


def _cut_off() -> ConnectionError:
    return ConnectionResetError("the server closed the connection amid the answer")

"""An engine without a model, with the real one's public methods: deterministic tokens, delays and faults.

Its tokenizer has one token a byte, so text splits within characters as real tokens do. The answer to a
prompt is the prompt's own text again and again, or what `replies` says for the first key that the prompt
holds. Words in the prompt make faults: see FAULTS.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mlxcel_ext.engine_config import EngineConfig, EngineDeadError, EngineStats, Health, QueueFullError
from mlxcel_ext.outputs import RequestOutput, RequestTimes, TokenLogprob
from mlxcel_ext.sampling_params import SamplingParams

EOS = 0
FIRST_BYTE = 3  # ids 0..2 are special
VOCAB_SIZE = 256 + FIRST_BYTE
SPECIAL = ("<eos>", "<user>", "<assistant>")

#: A prompt that holds the word gets the fault.
FAULTS = {
    "ROWFAULT": "its third token raises in the engine",
    "DEADEND": "its grammar allows no third token",
    "STALL": "no token ever comes",
    "SLOWPREFILL": "its prefill takes 0.6 s and reports progress",
}


class FakeTokenizer:
    """Bytes as tokens."""

    vocab_size = VOCAB_SIZE
    max_token_chars = 64
    eos_token_ids = (EOS,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        while text:
            for token_id, name in enumerate(SPECIAL):
                if text.startswith(name):
                    ids.append(token_id)
                    text = text[len(name) :]
                    break
            else:
                ids += [byte + FIRST_BYTE for byte in text[0].encode()]
                text = text[1:]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return SPECIAL[token_id].encode() if token_id < FIRST_BYTE else bytes([token_id - FIRST_BYTE])

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        kept = (i for i in ids if i >= FIRST_BYTE or not skip_special_tokens)
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        return SPECIAL[token_id] if token_id < FIRST_BYTE else chr(token_id - FIRST_BYTE)


class FakeTemplate:
    """<user>text<assistant>, and a refusal of conversations that begin with the assistant."""

    source = "{% for message in messages %} {{ tools }} <tool_call>"

    def render(self, messages, /, *, tools=None, add_generation_prompt=True, **kwargs) -> str:  # type: ignore[no-untyped-def]
        if messages[0]["role"] == "assistant":
            raise ValueError("[chat_template] the template refuses the messages: it must begin with the user")
        names = "".join(f"({tool['function']['name']})" for tool in tools or [])
        text = names + "".join(
            f"{'<assistant>' if message['role'] == 'assistant' else '<user>'}{message['content']}"
            for message in messages
        )
        return text + ("<assistant>" if add_generation_prompt else "") + kwargs.get("suffix", "")


class FakeModel:
    name = "fake"
    tokenizer = FakeTokenizer()
    chat_template: FakeTemplate | None = FakeTemplate()


@dataclass
class _Request:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    on_output: Callable[[RequestOutput], None]
    deadline: float | None
    answer: list[int]
    times: RequestTimes
    sent: int = 0
    text: str = ""
    shown: int = 0
    ids: list[int] = field(default_factory=list)


class FakeEngine:
    """Steps on a thread of its own, step_seconds each; every running request gets a token a step."""

    def __init__(
        self, config: EngineConfig | None = None, *, step_seconds: float = 0.0, max_model_len: int = 2048
    ) -> None:
        self.config = config or EngineConfig()
        self.max_model_len = max_model_len
        self.step_seconds = step_seconds
        self.replies: dict[str, str] = {}
        self.seen: list[tuple[list[int], SamplingParams]] = []
        self.placed: list[tuple[int, str | None]] = []  # priority and cache_salt
        self.cancelled: list[str] = []
        self.died = ""
        self.cascade = False  # its steps claim to have read shared prefixes once
        self._tokenizer = FakeTokenizer()
        self._lock = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._cached: set[tuple[int, ...]] = set()
        self._totals = {"prompt_tokens": 0, "generation_tokens": 0, "steps": 0}
        self._stop = False
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        with self._lock:
            self._stop = True
            cut = [] if drain else [*self._running, *self._waiting]
            if cut:
                self._running = []
                self._waiting.clear()
            self._lock.notify_all()
        for request in cut:
            self._send(request, finish_reason="abort", error="the server shuts down")
        self._thread.join(timeout)

    def kill(self, reason: str) -> None:
        """Die as the real engine does: everything waiting or running fails at once."""
        with self._lock:
            self.died = reason
            doomed, self._running = [*self._running, *self._waiting], []
            self._waiting.clear()
        for request in doomed:
            self._send(request, finish_reason="error", error=reason)

    def submit(
        self, request_id, prompt_token_ids, params, on_output, *, priority=0, cache_salt=None, deadline=None
    ) -> None:  # type: ignore[no-untyped-def]
        params.validate(VOCAB_SIZE)
        if params.grammar is not None and "bad" in params.grammar.value:
            raise ValueError(f"[grammar] {params.grammar.kind} does not compile: bad")
        if not prompt_token_ids or len(prompt_token_ids) >= self.max_model_len:
            raise ValueError(
                f"[engine] prompt of {len(prompt_token_ids)} tokens does not fit {self.max_model_len}"
            )
        prompt_text = self._tokenizer.decode(prompt_token_ids)
        reply = next((text for key, text in self.replies.items() if key in prompt_text), None)
        visible = [token for token in prompt_token_ids if token >= FIRST_BYTE] or [FIRST_BYTE + 33]
        answer = [*self._tokenizer.encode(reply), EOS] if reply is not None else visible * self.max_model_len
        request = _Request(
            request_id, prompt_token_ids, params, on_output, deadline, answer, RequestTimes(time.monotonic())
        )
        with self._lock:
            if self.died or self._stop:
                raise EngineDeadError(f"the engine is dead: {self.died}")
            if len(self._waiting) >= self.config.max_queue_depth:
                raise QueueFullError(f"{len(self._waiting)} requests wait already")
            self.seen.append((prompt_token_ids, params))
            self.placed.append((priority, cache_salt))
            self._waiting.append(request)
            self._lock.notify_all()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            self.cancelled.append(request_id)
            self._running = [r for r in self._running if r.request_id != request_id]
            self._waiting = deque(r for r in self._waiting if r.request_id != request_id)

    def health(self) -> Health:
        return Health("dead", self.died) if self.died else Health("ok")

    def stats(self) -> EngineStats:
        with self._lock:
            used = sum(-(-(len(r.prompt) + r.sent) // 16) for r in self._running)
            return EngineStats(
                running=len(self._running),
                waiting=len(self._waiting),
                max_num_seqs=self.config.max_num_seqs,
                max_model_len=self.max_model_len,
                page_size=16,
                page_bytes=1024,
                pages_total=1000,
                pages_free=1000 - used,
                pages_in_use=used,
                prefix_queries=len(self.seen),
                counters=self._counters(),
                counter_labels={"mlxcel_paged_decode_launches_total": "path"},
                **self._totals,
            )

    def _counters(self) -> dict[str, dict[str, int]]:
        steps = self._totals["steps"]
        if not self.cascade:
            return {"mlxcel_paged_decode_launches_total": {"fused_v2": steps}}
        return {
            "mlxcel_paged_decode_launches_total": {"cascade": steps},
            "mlxcel_cascade_member_sequences_total": {"": 3 * steps},
            "mlxcel_cascade_shared_tokens_total": {"": 64 * steps} if steps else {},
        }

    def reset_prefix_cache(self) -> int:
        dropped = len(self._cached)
        self._cached.clear()
        return dropped

    def _loop(self) -> None:
        while True:
            with self._lock:
                while not self._stop and not self._running and not self._waiting:
                    self._lock.wait()
                if self._stop:
                    return
                while self._waiting and len(self._running) < self.config.max_num_seqs:
                    self._running.append(self._waiting.popleft())
                batch = list(self._running)
                self._totals["steps"] += 1
            time.sleep(self.step_seconds or (0.005 if all("STALL" in self._prompt(r) for r in batch) else 0))
            for request in batch:
                self._step(request)

    def _prompt(self, request: _Request) -> str:
        return self._tokenizer.decode(request.prompt)

    def _step(self, request: _Request) -> None:
        now = time.monotonic()
        prompt = self._prompt(request)
        if request.deadline is not None and now > request.deadline:
            self._finish(request, "abort", stop_reason="deadline", error="deadline")
            return
        if "STALL" in prompt:
            return
        if "SLOWPREFILL" in prompt and request.sent == 0:
            for done in range(3):
                self._send(request, prefill_progress=(done * 10, len(request.prompt)))
                time.sleep(0.2)
        if "ROWFAULT" in prompt and request.sent == 2:
            self._finish(request, "error", error="injected fault")
            return
        if "DEADEND" in prompt and request.sent == 2:
            self._finish(request, "error", error="[grammar] nothing may follow", client_error=True)
            return
        if request.sent == 0:
            request.times = RequestTimes(request.times.submitted, now, now)
            self._totals["prompt_tokens"] += len(request.prompt)
        token = request.answer[request.sent]
        request.sent += 1
        self._totals["generation_tokens"] += 1
        self._emit(request, token)

    def _emit(self, request: _Request, token: int) -> None:
        params = request.params
        ended = token == EOS and not params.ignore_eos
        if not ended:
            request.ids.append(token)
        text = self._tokenizer.decode(request.ids, params.skip_special_tokens)
        finish, stop_reason = ("stop" if ended else None), None
        for stop in params.stop:
            if stop in text:
                text, finish, stop_reason = text[: text.index(stop)], "stop", stop
        if token in params.stop_token_ids:
            finish, stop_reason = "stop", token
        if finish is None and (
            request.sent == params.max_tokens or len(request.prompt) + request.sent >= self.max_model_len
        ):
            finish = "length"
        visible = text
        if finish is None:
            visible = text.rstrip("\ufffd")
            for stop in params.stop:
                visible = next(
                    (visible[:-n] for n in range(len(stop), 0, -1) if visible.endswith(stop[:n])), visible
                )
        delta, request.shown = visible[request.shown :], max(request.shown, len(visible))
        fields = {"text": delta, "token_ids": (token,), "finish_reason": finish, "stop_reason": stop_reason}
        if params.logprobs is not None:
            fields["logprobs"] = (self._logprob(token, params.logprobs),)
        if request.sent == 1 and params.prompt_logprobs is not None:
            rest = (self._logprob(t, params.prompt_logprobs) for t in request.prompt[1:])
            fields["prompt_logprobs"] = (None, *rest)
        if finish is not None:
            self._finish(request, **fields)
        else:
            self._send(request, **fields)

    @staticmethod
    def _logprob(token: int, alternatives: int) -> TokenLogprob:
        top = tuple(((token + i) % VOCAB_SIZE, -0.5 - i) for i in range(alternatives))
        return TokenLogprob(token, -0.5, 1, top)

    def _finish(self, request: _Request, finish_reason: str, **fields: object) -> None:
        with self._lock:
            if request not in self._running:
                return  # cancelled meanwhile: the real engine sends its abort to nobody
            self._running.remove(request)
        times = request.times
        request.times = RequestTimes(times.submitted, times.scheduled, times.first_token, time.monotonic())
        self._send(request, finish_reason=finish_reason, **fields)

    def _send(self, request: _Request, **fields: object) -> None:
        request.on_output(
            RequestOutput(
                request.request_id,
                num_prompt_tokens=len(request.prompt),
                num_completion_tokens=request.sent,
                num_cached_tokens=16 if tuple(request.prompt[:16]) in self._cached else 0,
                times=request.times,
                **fields,  # type: ignore[arg-type]
            )
        )
        if fields.get("finish_reason") and len(request.prompt) > 16:
            self._cached.add(tuple(request.prompt[:16]))

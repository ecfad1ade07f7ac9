"""A request as the scheduler sees it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..kvcache.prefix_tree import Cursor


class State(Enum):
    WAITING = "waiting"  # queued; also after a preemption
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """Token counts and pages of one request.

    tokens         prompt and output that the host knows
    num_unread     tokens sampled on the device that the host has not read yet; they follow ``tokens``
    num_scheduled  leading tokens whose KV is written by the steps submitted so far
    pages          pages of those tokens and of the ones to come, in order
    num_dropped    leading pages that have been given back: every window has passed them, nobody reads them. Their
                   ids keep the places of the others.
    cursor         how far its tokens were followed in the prefix tree. An admission adopts all pages up to there, so
                   that they are its own while it runs.
    """

    request_id: str
    tokens: list[int]
    max_total_tokens: int
    arrival: int
    priority: int = 0
    cache_salt: str | None = None
    use_prefix_cache: bool = True
    #: What the engine knows about it; the scheduler never looks.
    job: Any = None

    num_prompt_tokens: int = field(init=False)
    state: State = State.WAITING
    pages: array[int] = field(default_factory=lambda: array("i"))
    num_dropped: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    num_scheduled: int = 0
    num_unread: int = 0
    prefilling: bool = True
    #: Its place among the running requests, 0 .. max_num_seqs-1; -1 while it does not run.
    slot: int = -1
    #: Tokens adopted from the prefix cache when it was first admitted; None before that.
    num_cached_tokens: int | None = None
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def own_pages(self) -> array[int]:
        """Pages that it uses: all but the dropped ones."""
        return self.pages[self.num_dropped :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_total_tokens(self) -> int:
        """Tokens of prompt and output, unread ones included."""
        return len(self.tokens) + self.num_unread

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def can_decode(self) -> bool:
        """Another token may be sampled (a finished length is known before its last token is read)."""
        return not self.prefilling and self.num_total_tokens < self.max_total_tokens

    @property
    def queue_key(self) -> tuple[int, int]:
        return (self.priority, self.arrival)

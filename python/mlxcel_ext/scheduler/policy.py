"""What one tick of the engine does: a pure function of what waits, what runs and what happened before."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Tick(Enum):
    """The kinds of step."""

    IDLE = "idle"
    DECODE = "decode"
    PREFILL = "prefill"  # nothing decodes: parked prefills first, then new requests
    GRANT = "grant"  # a parked prefill's turn beside the decoding rows
    ADMIT = "admit"  # new requests beside the decoding rows


@dataclass(frozen=True, slots=True)
class TickState:
    """What a decision depends on.

    decoding           running rows that could decode now
    parked             running rows whose prompt is not finished
    waiting            queued requests
    admissible         the first of them may start now
    since_grant        ticks since a parked prefill last had its turn
    decode_waited      the last tick made decoding rows wait (only where steps are not mixed)
    """

    decoding: int
    parked: int
    waiting: int
    admissible: bool
    since_grant: int = 0
    decode_waited: bool = False


@dataclass(frozen=True, slots=True)
class TickPolicy:
    """The policy and its settings (EngineConfig explains them)."""

    grant_interval: int
    mixed: bool = True

    def interval(self, state: TickState) -> int:
        """Decode ticks between two grants: the setting, less where many requests wait and few decode.

        The share of prefill ticks follows the demand, so that one decoding row does not hold up a whole
        queue, and one parked prompt does not disturb a full batch more than the setting allows.
        """
        queued = state.parked + state.waiting
        return self.grant_interval * state.decoding // (state.decoding + queued)

    def decide(self, state: TickState) -> Tick:
        if not state.decoding:
            return Tick.PREFILL if state.parked or state.admissible else Tick.IDLE
        if state.decode_waited and not self.mixed:
            return Tick.DECODE
        if state.parked:
            if not self.grant_interval:
                return Tick.DECODE
            if state.since_grant >= self.interval(state):
                return Tick.GRANT
        return Tick.ADMIT if state.admissible else Tick.DECODE

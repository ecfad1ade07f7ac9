"""The tick policy alone: bounds that hold in every state."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from mlxcel_ext.scheduler.policy import Tick, TickPolicy, TickState

states = st.builds(
    TickState,
    decoding=st.integers(0, 40),
    parked=st.integers(0, 5),
    waiting=st.integers(0, 50),
    admissible=st.booleans(),
    since_grant=st.integers(0, 40),
    decode_waited=st.booleans(),
)


@given(states, st.integers(0, 32), st.booleans())
def test_a_tick_has_something_to_do(state: TickState, grant: int, mixed: bool) -> None:
    tick = TickPolicy(grant, mixed).decide(state)
    if tick is Tick.DECODE:
        assert state.decoding
    elif tick is Tick.GRANT:
        assert state.decoding
        assert state.parked
    elif tick is Tick.ADMIT:
        assert state.decoding
        assert state.admissible
    elif tick is Tick.PREFILL:
        assert state.parked or state.admissible
    else:
        assert (state.decoding, state.parked, state.admissible) == (0, 0, False)


@given(states, st.integers(1, 32))
def test_a_parked_prefill_is_due_after_the_interval_at_the_latest(state: TickState, grant: int) -> None:
    tick = TickPolicy(grant).decide(state)
    if state.parked and state.since_grant >= grant:
        assert tick in (Tick.GRANT, Tick.PREFILL)


@given(states, st.integers(0, 32))
def test_unmixed_steps_never_make_decoding_wait_twice(state: TickState, grant: int) -> None:
    if state.decoding and state.decode_waited:
        assert TickPolicy(grant, mixed=False).decide(state) is Tick.DECODE


@given(states)
def test_interval_zero_lets_decoding_drain(state: TickState) -> None:
    if state.decoding and state.parked:
        assert TickPolicy(0).decide(state) is Tick.DECODE


def test_the_interval_follows_the_demand() -> None:
    policy = TickPolicy(16)
    assert policy.interval(TickState(31, 1, 0, False)) == 15
    assert policy.interval(TickState(4, 1, 0, False)) == 12
    assert policy.interval(TickState(1, 1, 30, False)) == 0

"""When a message is tried again, and what becomes of each class of failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.outbox import (
    BECOMES,
    ENDED,
    LIVE,
    MOVES,
    RETRY_AFTER_MS_MAX,
    RETRY_DELAYS_MS,
    Event,
    Failure,
    Message,
    Schedule,
    Settle,
    State,
    Verdict,
)
from tests.storage.harness import NOW_MS

ONE = Message(7, b"hook", State.CLAIMED, None, worker=b"w" * 16, claim=3)


def delays(schedule: Schedule, chance: float) -> list[int]:
    return [schedule.due_ms(n, NOW_MS, chance=chance) - NOW_MS for n in range(7)]


def test_the_delays_of_the_default_schedule() -> None:
    assert RETRY_DELAYS_MS == (5_000, 30_000, 120_000, 600_000, 1_800_000)
    assert delays(Schedule(), 0.5) == [*RETRY_DELAYS_MS, 1_800_000, 1_800_000]


def test_jitter_spreads_a_delay_both_ways() -> None:
    assert delays(Schedule(), 0.0)[0] == 4_500
    assert delays(Schedule(), 1.0)[0] == 5_500
    assert delays(Schedule((1,), jitter=1), 0.0)[0] == 1, "never at once"


@pytest.mark.parametrize(
    ("retry_at_ms", "expected_ms"),
    [
        (NOW_MS + 1, NOW_MS + 1),
        (NOW_MS + RETRY_AFTER_MS_MAX, NOW_MS + RETRY_AFTER_MS_MAX),
        (NOW_MS + RETRY_AFTER_MS_MAX + 1, NOW_MS + 5_000),
        (NOW_MS, NOW_MS + 5_000),
        (NOW_MS - 1, NOW_MS + 5_000),
        (-1, NOW_MS + 5_000),
        (None, NOW_MS + 5_000),
    ],
)
def test_retry_after_wins_when_it_is_valid_and_in_the_future(
    retry_at_ms: int | None, expected_ms: int
) -> None:
    found = Schedule().due_ms(0, NOW_MS, chance=0.5, retry_at_ms=retry_at_ms)
    assert found == expected_ms


@pytest.mark.parametrize(("delays_ms", "jitter"), [((), 0.1), ((0,), 0.1), ((1,), 1.1), ((1,), -1)])
def test_a_schedule_that_cannot_be_is_refused(delays_ms: tuple[int, ...], jitter: float) -> None:
    with pytest.raises(ValueError, match=r"delays|jitter"):
        Schedule(delays_ms, jitter)


@pytest.mark.parametrize(
    ("failure", "verdict"),
    [
        (Failure.REJECTED, Verdict.DEAD),
        (Failure.THROTTLED, Verdict.RETRY),
        (Failure.UNAVAILABLE, Verdict.RETRY),
        (Failure.INDETERMINATE, Verdict.RETRY),
        (Failure.EXPIRED, Verdict.EXPIRED),
        (Failure.UNREADABLE, Verdict.DEAD),
        (Failure.UNEXPECTED, Verdict.RETRY),
    ],
)
def test_each_class_of_failure_has_its_end(failure: Failure, verdict: Verdict) -> None:
    due_ms = NOW_MS + 30_000 if verdict is Verdict.RETRY else 0
    settled = Schedule().settlement(ONE._replace(attempts=1), failure, NOW_MS)
    assert settled == Settle(ONE.credential, NOW_MS, verdict, failure, due_ms)
    assert BECOMES[failure] is verdict


@pytest.mark.parametrize("failure", set(Failure) - set(BECOMES))
def test_a_class_that_is_no_workers_is_refused(failure: Failure) -> None:
    with pytest.raises(KeyError):
        Schedule().settlement(ONE, failure, NOW_MS)


def test_the_table_of_moves_knows_every_state_and_event() -> None:
    assert set(MOVES) == set(State)
    assert {event for moves in MOVES.values() for event in moves} == set(Event)
    assert {to for moves in MOVES.values() for to in moves.values()} == set(State)
    left = {state for state, moves in MOVES.items() if set(moves.values()) & LIVE}
    assert left == LIVE, "what has ended never comes back under its id"
    assert set(State) - LIVE == ENDED


def test_the_design_has_the_table_of_moves() -> None:
    design = (Path(__file__).parents[2] / "DESIGN.md").read_text()
    for state, moves in MOVES.items():
        for event, to in moves.items():
            row = f"| {state.name.lower()} | {event.value} | {to.name.lower()} |"
            assert row in design

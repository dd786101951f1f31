"""The verdicts on a stored session: ARCHITECTURE's table, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker_ext.resume import Finding, Verdict, position_of, verdict
from storage.api import (
    HELD,
    RECEIVED,
    SENT,
    Claim,
    Consumer,
    Delivery,
    Entry,
    LogState,
    Loss,
    Snapshot,
)
from storage.errors import DatabaseGenerationChanged, ResumeHistoryUnavailable

NOW = "g" * 32
BEFORE = "f" * 32
LOG = LogState("d" * 32, NOW, boot=3, head=100, floor=20)


def snapshot(
    cursor: int,
    *deliveries: Delivery,
    generation: str = NOW,
    loss: Loss | None = None,
) -> Snapshot:
    consumer = Consumer(1, b"dev", b"", b"A" * 16, generation, cursor, next_claim=2, next_held=9)
    claims = (Claim(1, deliveries),) if deliveries else ()
    held = {d.offset: Entry(0, b"t", b"", 1) for d in deliveries if d.state & HELD}
    return Snapshot(consumer, (), claims, held, frozenset(), loss)


def sent(offset: int, state: int = SENT) -> Delivery:
    return Delivery(offset, offset % 65535 + 1, 2, state)


@pytest.mark.parametrize(
    ("found", "position"),
    [
        (snapshot(50), 50),
        (snapshot(50, sent(40)), 39),
        (snapshot(50, sent(45, RECEIVED), sent(48)), 44),
        (snapshot(50, sent(1, SENT | HELD)), 50),  # a held message has no offset in the history
        (snapshot(50, sent(1, RECEIVED | HELD), sent(30)), 29),
        (snapshot(10, sent(40)), 10),  # released back: the cursor is the lowest
        (snapshot(0), 0),
    ],
)
def test_a_position_is_just_before_the_oldest_entry_that_is_not_settled(
    found: Snapshot, position: int
) -> None:
    assert position_of(found) == position


LOST = Loss(b"t", 60)

TABLE: list[tuple[Snapshot, str, Verdict, str, int]] = [
    # snapshot, on_generation_change, verdict, reason, code (0 = none)
    (snapshot(50), "resume", Verdict.RESUME, "ok", 0),
    (snapshot(100), "resume", Verdict.RESUME, "ok", 0),
    (snapshot(0), "resume", Verdict.RESUME, "ok", 0),  # below the floor, but nothing it wants
    (snapshot(50, sent(40)), "reset", Verdict.RESUME, "ok", 0),
    (snapshot(50, loss=LOST), "resume", Verdict.RESET, "history-pruned", 410),
    (snapshot(50, loss=LOST), "reset", Verdict.RESET, "history-pruned", 410),
    (snapshot(50, generation=BEFORE), "resume", Verdict.REBIND, "generation-changed", 409),
    (snapshot(50, generation=BEFORE), "reset", Verdict.RESET, "generation-changed", 409),
    (snapshot(101), "resume", Verdict.RESET, "position-ahead", 409),
    (snapshot(101), "reset", Verdict.RESET, "position-ahead", 409),
    # ahead is never trusted, whatever generation, and whatever of it was ahead
    (snapshot(101, generation=BEFORE), "resume", Verdict.RESET, "position-ahead", 409),
    (snapshot(50, sent(101)), "resume", Verdict.RESET, "position-ahead", 409),
    (snapshot(50, sent(101, RECEIVED)), "resume", Verdict.RESET, "position-ahead", 409),
    (snapshot(50, sent(900, SENT | HELD)), "resume", Verdict.RESUME, "ok", 0),
    # what was pruned is gone in every generation
    (snapshot(50, generation=BEFORE, loss=LOST), "resume", Verdict.RESET, "history-pruned", 410),
]


@pytest.mark.case("HK-16")
@pytest.mark.case("HK-17")
@pytest.mark.parametrize(("found", "configured", "expected", "reason", "code"), TABLE)
def test_the_verdict_on_a_stored_session(
    found: Snapshot, configured: str, expected: Verdict, reason: str, code: int
) -> None:
    finding = verdict(found, LOG, on_generation_change=configured)
    assert (finding.verdict, finding.reason) == (expected, reason)
    assert (0 if finding.error is None else finding.error.code) == code
    if expected is Verdict.RESUME:
        assert finding == Finding(Verdict.RESUME)


def test_a_refusal_says_what_was_held_and_what_is_there() -> None:
    pruned = verdict(snapshot(50, loss=LOST), LOG, on_generation_change="resume").error
    assert pruned == ResumeHistoryUnavailable(50, 60, b"t")
    other = verdict(snapshot(50, generation=BEFORE), LOG, on_generation_change="resume").error
    assert other == DatabaseGenerationChanged(BEFORE, NOW, 50, 100)
    ahead = verdict(snapshot(101), LOG, on_generation_change="resume").error
    assert ahead == DatabaseGenerationChanged(NOW, NOW, 101, 100)
    assert "ahead" in str(ahead)


def test_an_empty_log_resumes_a_session_that_has_nothing() -> None:
    empty = replace(LOG, head=0, floor=0)
    assert verdict(snapshot(0), empty, on_generation_change="reset") == Finding(Verdict.RESUME)

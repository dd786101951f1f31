"""The judge of act two: what became of the alerts, and whether a promise was broken. Pure.

acknowledged   the publisher saw PUBACK.
delivered      the receiver answered 2xx; distinct alerts.
lost           acknowledged, and never delivered.
delivered again  a request for an alert that had been answered 2xx. At least once allows it, and
               nothing in this act should cause one.
too early      a request before the time that the receiver had asked for (Retry-After).
unsigned       a request without the right signature.
dead letter    the alert that the receiver does not understand: rejected once, never tried again by
               itself, delivered after it was reissued by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["HookFacts", "Request", "judge_hooks"]

THROTTLED = 429
SLACK_MS = 20  # the receiver notes the time when it decides, which is before the answer is read


class Request(NamedTuple):
    """One request as the receiver saw it. alert: which one. at_ms: when it was answered."""

    event_id: str
    alert: str
    attempt: int
    status: int
    at_ms: int
    is_signed: bool

    @property
    def is_taken(self) -> bool:
        """Whether it was answered 2xx."""
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class HookFacts:
    """All that was counted in act two. waited: alerts in the backlog while the receiver was down.

    back_ms: from the receiver's return to the last of them, None = never.
    """

    published: int
    acknowledged: int
    delivered: int
    lost: int
    delivered_again: int
    waited: int
    throttled: int
    too_early: int
    unsigned: int
    dead_letters: int
    reissued: int
    poison_requests: int
    back_ms: int | None

    def reasons(self) -> list[str]:
        """Say which promises were broken; empty when none was."""
        found = [
            (self.lost, "alerts acknowledged and lost"),
            (self.delivered_again, "alerts delivered again"),
            (self.too_early, "requests before Retry-After was over"),
            (self.unsigned, "requests that were not signed"),
            (self.published - self.acknowledged, "alerts never acknowledged"),
        ]
        reasons = [f"{count} {what}" for count, what in found if count]
        if not self.throttled:
            reasons.append("the receiver never asked to wait")
        if not self.waited:
            reasons.append("nothing waited while the receiver was down")
        if self.dead_letters != 1:
            reasons.append(f"{self.dead_letters} dead letters instead of 1")
        if (self.reissued, self.poison_requests) != (1, 2):
            reasons.append("the dead letter was not rejected once and delivered when reissued")
        return reasons


def judge_hooks(
    published: Iterable[str],
    acknowledged: Iterable[str],
    requests: Sequence[Request],
    *,
    poison: str,
    waited: int,
    dead_letters: int,
    returned_ms: int,
    busy_ms: int,
) -> HookFacts:
    """Count what became of the alerts. poison: the one that is not understood at first."""
    acked = set(acknowledged)
    taken: dict[str, int] = {}
    again = 0
    for one in requests:
        if one.is_taken:
            again += one.alert in taken
            taken.setdefault(one.alert, one.at_ms)
    asked = [one.at_ms for one in requests if one.status == THROTTLED]
    others = [at_ms for alert, at_ms in taken.items() if alert != poison and at_ms > returned_ms]
    lost = acked - taken.keys()
    return HookFacts(
        published=len(set(published)),
        acknowledged=len(acked),
        delivered=len(taken),
        lost=len(lost),
        delivered_again=again,
        waited=waited,
        throttled=len(asked),
        too_early=sum(
            at_ms < one.at_ms < at_ms + busy_ms - SLACK_MS for at_ms in asked for one in requests
        ),
        unsigned=sum(not one.is_signed for one in requests),
        dead_letters=dead_letters,
        reissued=int(poison in taken),
        poison_requests=sum(one.alert == poison for one in requests),
        back_ms=max(others) - returned_ms if others and not lost - {poison} else None,
    )

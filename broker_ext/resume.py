"""May a returning session continue from its position? Pure functions.

| finding | verdict |
|---|---|
| generation is current, nothing that matches was pruned after the position | RESUME |
| an entry that matches, above the position, was pruned | RESET, 410 (SKIP where so configured) |
| the position belongs to another generation | REBIND, 409 (RESET where so configured) |
| the position is ahead of the head | RESET, 409: its offsets will be used again |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from broker_ext.reasons import NO_WORDS, Words
from storage.errors import DatabaseGenerationChanged, ResumeHistoryUnavailable, ResumeRefused

if TYPE_CHECKING:
    from storage.api import LogState, Snapshot

__all__ = ["Finding", "Verdict", "is_blank", "position_of", "verdict", "words_of"]


class Verdict(Enum):
    """What is done with a stored session."""

    RESUME = "resume"
    REBIND = "rebind"
    SKIP = "skip"
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict and, unless it is RESUME, why. reason: a stable word for counters and logs."""

    verdict: Verdict
    reason: str = "ok"
    error: ResumeRefused | None = None


def words_of(finding: Finding) -> Words:
    """What an MQTT 5 client is told of its reset: ``resume: 410 history-pruned``, and the same in
    User Properties, with its position and what that was compared with."""
    error = finding.error
    if error is None:
        return NO_WORDS
    what = f"{error.code} {finding.reason}"
    pairs = {"resume": what}
    if isinstance(error, ResumeHistoryUnavailable):
        pairs |= {"position": str(error.position), "floor": str(error.floor)}
    elif isinstance(error, DatabaseGenerationChanged):
        pairs |= {
            "position": str(error.position),
            "head": str(error.head),
            "generation": error.current,
        }
    told = tuple((name.encode(), value.encode()) for name, value in pairs.items())
    return Words(f"resume: {what}".encode(), told)


def position_of(snapshot: Snapshot) -> int:
    """The offset up to which everything was delivered; below the cursor while deliveries from the
    history are unsettled."""
    unsettled = [
        d.offset for claim in snapshot.claims for d in claim.deliveries if not d.state & 0x80
    ]
    return min([snapshot.consumer.cursor, *(offset - 1 for offset in unsettled)])


def is_blank(snapshot: Snapshot) -> bool:
    """Whether nothing was ever written to a record since it was made.

    Then its client is not known to have had the CONNACK that belongs to it, and that one may have
    said that an older session is gone: it is said again (Session Present 0). What is lost is
    nothing. As soon as the client has sent something, DISCONNECT included, ``next_packet_id`` is
    set, so that the existence of a session is kept [MQTT-3.1.2-4].
    """
    is_new = snapshot.consumer.next_packet_id == 0
    return is_new and not (snapshot.subscriptions or snapshot.claims or snapshot.inbound)


def verdict(
    snapshot: Snapshot,
    log: LogState,
    *,
    on_generation_change: str,
    on_history_pruned: str = "reset",
) -> Finding:
    """Decide whether a session may continue.

    on_generation_change: "resume" replays from the offset, unchecked, and binds to the current
    generation; "reset" is the strict choice. on_history_pruned: "skip" delivers what is left.
    Source: [MQTT-3.1.2-5], [MQTT-3.2.2-2]; two errors for two causes as in etcd's kvstore.go.
    """
    consumer = snapshot.consumer
    position = position_of(snapshot)
    highest = max(
        [
            consumer.cursor,
            *(d.offset for c in snapshot.claims for d in c.deliveries if not d.state & 0x80),
        ]
    )
    changed = DatabaseGenerationChanged(consumer.generation, log.generation, position, log.head)
    if highest > log.head:
        return Finding(Verdict.RESET, "position-ahead", changed)
    if snapshot.loss is not None:
        error = ResumeHistoryUnavailable(
            position, snapshot.loss.pruned_through, snapshot.loss.topic
        )
        if on_history_pruned == "reset":
            return Finding(Verdict.RESET, "history-pruned", error)
        if consumer.generation == log.generation:
            return Finding(Verdict.SKIP, "history-pruned", error)
    if consumer.generation != log.generation:
        if on_generation_change == "reset":
            return Finding(Verdict.RESET, "generation-changed", changed)
        return Finding(Verdict.REBIND, "generation-changed", changed)
    return Finding(Verdict.RESUME)

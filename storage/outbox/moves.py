"""What may become of a message: state -> event -> state. A missing key *is* the refusal.

waiting     due at ``due_ms``; nobody has it
claimed     one acquisition has it, until ``until_ms``
done        it was taken by its receiver; the body is erased, the row tells the tale
dead        a dead letter: nobody tries again unless an operator has it reissued
superseded  a newer message has its place; the body is erased
expired     its deadline passed before it was sent; the body is erased
reissued    a dead letter that a fresh message replaces; the body is erased
"""

from __future__ import annotations

from enum import Enum, IntEnum, unique
from typing import Final

__all__ = ["ENDED", "LIVE", "MOVES", "Event", "Failure", "State", "Verdict"]


@unique
class State(IntEnum):
    """Of a message. Numbers are stored: never give one again."""

    WAITING = 0
    CLAIMED = 1
    DONE = 2
    DEAD = 3
    SUPERSEDED = 4
    EXPIRED = 5
    REISSUED = 6


LIVE: Final = frozenset({State.WAITING, State.CLAIMED})
"""It may still be sent."""
ENDED: Final = frozenset(State) - LIVE
"""It will not be sent again under this id."""


@unique
class Failure(IntEnum):
    """Why a message was not taken: a class, never the text of an exception. Numbers are stored.

    The first seven are what a worker reports (storage.outbox.schedule says what becomes of each);
    LAPSED is what a reap reports: the worker went away with it, or was too slow. The last two are
    of sessions: larger than its client takes, and one that made its client go again and again.
    """

    NONE = 0
    REJECTED = 1
    THROTTLED = 2
    UNAVAILABLE = 3
    INDETERMINATE = 4
    EXPIRED = 5
    UNREADABLE = 6
    UNEXPECTED = 7
    LAPSED = 8
    TOO_LARGE = 9
    UNDELIVERABLE = 10


@unique
class Verdict(IntEnum):
    """What a worker settles a message as."""

    DONE = 0
    RETRY = 1
    DEAD = 2
    EXPIRED = 3


@unique
class Event(Enum):
    """What happens to a message."""

    CLAIM = "claimed by a worker"
    EXTEND = "lease extended"
    RELEASE = "released, not tried"
    DONE = "settled: done"
    RETRY = "settled: retry, or lease lapsed"
    EXHAUST = "the last attempt failed"
    DEAD = "settled: dead, or unreadable"
    EXPIRE = "its deadline passed"
    SUPERSEDE = "a newer one for its key"
    REISSUE = "reissued by an operator"


MOVES: Final[dict[State, dict[Event, State]]] = {
    State.WAITING: {
        Event.CLAIM: State.CLAIMED,
        Event.EXPIRE: State.EXPIRED,
        Event.SUPERSEDE: State.SUPERSEDED,
        Event.DEAD: State.DEAD,
    },
    State.CLAIMED: {
        Event.EXTEND: State.CLAIMED,
        Event.RELEASE: State.WAITING,
        Event.DONE: State.DONE,
        Event.RETRY: State.WAITING,
        Event.EXHAUST: State.DEAD,
        Event.DEAD: State.DEAD,
        Event.EXPIRE: State.EXPIRED,
        Event.SUPERSEDE: State.SUPERSEDED,
    },
    State.DONE: {},
    State.DEAD: {Event.REISSUE: State.REISSUED},
    State.SUPERSEDED: {},
    State.EXPIRED: {},
    State.REISSUED: {},
}
"""A row that has ended leaves the table by Purge alone."""

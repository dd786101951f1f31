"""The values and operations of the outbox; the package's docstring is the contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from storage.outbox.moves import Failure, State, Verdict

if TYPE_CHECKING:
    from storage.api import Entry

__all__ = [
    "ATTEMPTS_MAX",
    "CLAIM_BYTES_MAX",
    "CLAIM_MESSAGES_MAX",
    "QUEUE_BYTES_MAX",
    "RETRY_DELAYS_MS",
    "SESSIONS",
    "WORKER_BYTES",
    "AuditRecord",
    "Backlog",
    "ClaimNext",
    "Claimed",
    "Credential",
    "DeadLetter",
    "Enqueue",
    "Enqueued",
    "ExpireMessages",
    "Extend",
    "Message",
    "OutboxOp",
    "OutboxReads",
    "Purge",
    "Purged",
    "Reap",
    "Reaped",
    "Reissue",
    "Reissued",
    "Release",
    "Settle",
]

WORKER_BYTES: Final = 16
"""A worker is named by 16 random bytes, minted when it starts: never all zero."""

QUEUE_BYTES_MAX: Final = 255
"""Name of a queue: not empty. Names that begin with $ are the project's own."""

SESSIONS: Final = b"$sessions"
"""The queue of what sessions could not deliver; Message.destination is the client id. One queue for
all, so that its figures are one row and its dead letters one list, however many sessions."""

ATTEMPTS_MAX: Final = 6
"""Default of Enqueue.attempts_max: the first attempt and one for each of RETRY_DELAYS_MS."""

RETRY_DELAYS_MS: Final = (5_000, 30_000, 120_000, 600_000, 1_800_000)
"""5 s, 30 s, 2 min, 10 min, 30 min: about 43 minutes until a message is a dead letter."""

CLAIM_MESSAGES_MAX: Final = 256
CLAIM_BYTES_MAX: Final = 4 << 20
"""What one acquisition takes at most; a larger message is claimed alone."""


# ---------------------------------------------------------------------------------- values


class Credential(NamedTuple):
    """Names one acquisition of one message. Every settlement states it.

    worker: WORKER_BYTES, who acquired it. claim: 1, 2, 3, ... of the database, a new one for each
    ClaimNext, never used again. One with a part missing (b"", 0, None) is refused.
    """

    message_id: int
    worker: bytes
    claim: int


class Message(NamedTuple):
    """A message of the outbox as it is stored.

    id: 1, 2, 3, ... of the database, never used again.
    message: what is sent, None = erased. Its expires_ms is the deadline; its offset is 0.
    offset: of the history entry that it was made of, 0 = of none.
    destination: whom it is for, where the queue does not tell (a client id); may be empty.
    attempts: settlements that failed or succeeded, and lapsed leases. attempts_max: 0 = no limit.
    created_ms: enqueued. due_ms: when it is (or was last) due. until_ms: end of the lease, 0 = not
        claimed. ended_ms: when it came to its state, 0 = it is waiting or claimed.
    failure: class of the last one. worker, claim: of the last acquisition, b"" and 0 = never.
    reissue_of, reissued_as: ids of the dead letter it replaces and of what replaced it, 0 = none.
    """

    id: int
    queue: bytes
    state: State
    message: Entry | None
    offset: int = 0
    destination: bytes = b""
    attempts: int = 0
    attempts_max: int = 0
    created_ms: int = 0
    due_ms: int = 0
    until_ms: int = 0
    ended_ms: int = 0
    failure: Failure = Failure.NONE
    worker: bytes = b""
    claim: int = 0
    reissue_of: int = 0
    reissued_as: int = 0

    @property
    def credential(self) -> Credential:
        """Of the acquisition that it was read under."""
        return Credential(self.id, self.worker, self.claim)


class Backlog(NamedTuple):
    """Figures of one queue, kept as work is done. Counts are of messages there are, by state;
    ended ones until they are purged.

    oldest_due_ms: due time of the first in line: at or below now = how long it has been due; above
        = when there will be something to claim; 0 = nothing is waiting.
    """

    queue: bytes
    waiting: int = 0
    claimed: int = 0
    done: int = 0
    dead: int = 0
    superseded: int = 0
    expired: int = 0
    reissued: int = 0
    oldest_due_ms: int = 0


class AuditRecord(NamedTuple):
    """One reissue. number: 1, 2, 3, ...; actor: who asked, our own words for it (a user name)."""

    number: int
    at_ms: int
    actor: bytes
    queue: bytes
    message_id: int
    new_id: int


class DeadLetter(NamedTuple):
    """A delivery that a session gives up (Advance.dead): a message of SESSIONS that is dead from
    the start. Its destination is the client id of the consumer.

    message: its offset is kept. erase: keep no body.
    """

    message: Entry
    failure: Failure
    at_ms: int
    attempts: int = 0
    erase: bool = False


# ------------------------------------------------------------------------------ operations


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Add a message to a queue (which is made when it is first named).

    message: what is sent. Its expires_ms is the deadline: it is not claimed after that. Its offset
        is kept as Message.offset.
    not_before_ms: not due before it.
    key: idempotency: if the queue has a message of this key, in any state and not purged, nothing
        is done. b"" = none.
    supersede_key: live messages of the queue with this key become superseded, a claimed one too:
        who settles it later is refused. b"" = none. Keys are stored as hashes.
    attempts_max: the attempt that makes it a dead letter, 0 = no limit.
    Outcome: Enqueued.
    """

    queue: bytes
    message: Entry
    now_ms: int
    not_before_ms: int = 0
    key: bytes = b""
    supersede_key: bytes = b""
    destination: bytes = b""
    attempts_max: int = ATTEMPTS_MAX


class Enqueued(NamedTuple):
    """Outcome of Enqueue. is_new: False = ``id`` has the key already. superseded: id of the message
    that gave way, 0 = none."""

    id: int
    is_new: bool
    superseded: int = 0


@dataclass(frozen=True, slots=True)
class ClaimNext:
    """Acquire what is due, in the order of due time, then id, under one new claim number.

    Disjoint: what is claimed is not due. A message whose deadline is over becomes expired instead,
    one whose body cannot be read becomes dead (UNREADABLE). One whose lease lapsed the last time is
    claimed alone: if it is what killed its worker, it takes no others with it again.
    worker: who acquires. until_ms: end of the lease. limit: 1..CLAIM_MESSAGES_MAX messages are
    looked at; bytes_max: of payloads, but at least one message.
    Outcome: Claimed, or ClaimNotHeld when ``worker`` is missing.
    """

    queue: bytes
    worker: bytes
    now_ms: int
    until_ms: int
    limit: int = CLAIM_MESSAGES_MAX
    bytes_max: int = CLAIM_BYTES_MAX


class Claimed(NamedTuple):
    """Outcome of ClaimNext. messages: each with its credential. expired, unreadable: ids of those
    that were ended instead. more: there may be more that is due."""

    messages: tuple[Message, ...]
    expired: tuple[int, ...] = ()
    unreadable: tuple[int, ...] = ()
    more: bool = False


@dataclass(frozen=True, slots=True)
class Extend:
    """Move the end of the lease of one acquisition to ``until_ms``; never back.
    Outcome: None or ClaimNotHeld."""

    credential: Credential
    now_ms: int
    until_ms: int


@dataclass(frozen=True, slots=True)
class Settle:
    """Say what became of a claimed message. Charges an attempt (EXPIRED does not).

    DONE: taken; the body is erased. RETRY: due again at ``due_ms`` (now, if that is past), or a
    dead letter if that was the last attempt. DEAD: a dead letter; the body stays for a reissue
    unless ``erase``. EXPIRED: its deadline passed before it was sent; the body is erased.
    Outcome: the State it has now, or ClaimNotHeld. Raises ValueError for what cannot be.
    """

    credential: Credential
    now_ms: int
    verdict: Verdict
    failure: Failure = Failure.NONE
    due_ms: int = 0
    erase: bool = False

    def __post_init__(self) -> None:
        if (self.verdict is Verdict.DONE) != (self.failure is Failure.NONE):
            msg = "done is no failure, and everything else has one"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Release:
    """Give a claimed message back unsent: it is due as it was, and no attempt is charged.

    Only for what was certainly not begun (shutdown); what may have been sent is left to its lease.
    Outcome: None or ClaimNotHeld.
    """

    credential: Credential
    now_ms: int


@dataclass(frozen=True, slots=True)
class Reap:
    """End up to ``limit`` leases that lapsed at ``now_ms``, whoever had them: an attempt is charged
    (LAPSED), and the message is due again after the delay of that attempt, or a dead letter.

    delays_ms: () = due as it was, so that it keeps its place in line. all_leases: those that have
    not lapsed, too: at an opening, when whoever had them is gone.
    Outcome: Reaped."""

    now_ms: int
    limit: int
    delays_ms: tuple[int, ...] = RETRY_DELAYS_MS
    all_leases: bool = False


class Reaped(NamedTuple):
    """Outcome of Reap: ids. more: another call would reap more."""

    waiting: tuple[int, ...]
    dead: tuple[int, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class ExpireMessages:
    """End up to ``limit`` waiting messages whose deadline is over, due or not.
    Outcome: tuple of their ids."""

    now_ms: int
    limit: int


@dataclass(frozen=True, slots=True)
class Reissue:
    """Enqueue a fresh message with the body of a dead letter, which becomes reissued. It is due at
    once, has no attempts behind it, takes over key and supersede key, and keeps a deadline that is
    not over. Recorded in the audit.

    actor: who asked. attempts_max: None = as the dead letter had.
    Outcome: Reissued, or ReissueRefused: not a dead letter, erased, or a live message has its
    supersede key.
    """

    message_id: int
    now_ms: int
    actor: bytes
    attempts_max: int | None = None


class Reissued(NamedTuple):
    """Outcome of Reissue."""

    id: int
    queue: bytes


@dataclass(frozen=True, slots=True)
class Purge:
    """Delete up to ``limit`` messages that ended before a time, oldest first.

    dead_before_ms: of dead letters; done_before_ms: of all others. 0 = none.
    audit_before_ms: audit records, likewise, up to ``limit`` more. queue: b"" = of all queues.
    Outcome: Purged.
    """

    done_before_ms: int
    dead_before_ms: int
    limit: int
    queue: bytes = b""
    audit_before_ms: int = 0


class Purged(NamedTuple):
    """Outcome of Purge. more: another call would delete more."""

    messages: int
    audit: int
    more: bool


OutboxOp = Enqueue | ClaimNext | Extend | Settle | Release | Reap | ExpireMessages | Reissue | Purge


# ----------------------------------------------------------------------------------- reads


class OutboxReads(Protocol):
    """Reading the outbox without claiming anything (Store.outbox). Committed batches only."""

    async def backlog(self) -> list[Backlog]:
        """Figures of every queue, in the order of their names. Costs two reads a queue."""
        ...

    async def dead_letters(
        self, queue: bytes, after: tuple[int, int] = (0, 0), limit: int = 100
    ) -> list[Message]:
        """Dead letters in the order they died. after: (ended_ms, id) of the last one of the page
        before. One whose body is damaged is there without it."""
        ...

    async def show(self, message_id: int) -> Message | None:
        """One message, None = there is none (purged, or never). Raises MessageDamaged."""
        ...

    async def audit(self, after: int = 0, limit: int = 100) -> list[AuditRecord]:
        """Audit records in order, above a number."""
        ...

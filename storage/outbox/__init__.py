"""The outbox: messages under claims, for whoever delivers them. The contract.

A *producer* enqueues, a *worker* claims a batch, sends and settles, a *janitor* reaps, expires and
purges, an *operator* looks and reissues (storage.roles has a handle for each). Everything is an
operation of a Batch like all others, so an enqueue shares the transaction of whatever else it
stands beside; ``Store.outbox`` reads.

Rule 1. Whoever has a message has it under a Credential: message id, worker, claim number. A claim
        names one acquisition, not one worker: claiming again makes another one.
Rule 2. Extend, Settle and Release state the credential and the time, and hold only while the
        message is claimed under it and the lease has not lapsed at ``now_ms`` (it has when until_ms
        <= now_ms). Otherwise their outcome is ClaimNotHeld (message_id, claim, found) and the row
        stays as it is, to the byte: reaped, claimed again by another or by the same worker,
        superseded, settled, purged, or lapsed with nobody behind it. A credential with a part
        missing is refused before anything is read. Callers absorb ClaimNotHeld, log it once, never
        retry it, and go on with their batch.
Rule 3. No operation reads a clock or draws a random number: ``now_ms`` is the caller's.
Rule 4. What is due is claimed in the order of due time, then id; claims are disjoint. A message
        whose lease lapsed is claimed alone the next time.
Rule 5. An attempt is charged when a message is settled or its lease is reaped, not when it is
        claimed or released. The attempt ``attempts_max`` that fails makes it a dead letter.
Rule 6. Whichever of two operations commits first wins, and the other is refused: settle against
        supersede, extend against reap, reissue against enqueue.
Rule 7. A body is erased when its message is done, superseded, expired or reissued; a dead letter
        keeps it, for a reissue, until it is purged, unless it was settled with ``erase``.

How a sink uses it::

    # move the sink's consumer and enqueue what the range held: one fenced operation, refused whole
    # (Fenced) when the incarnation is not on the record, or (ClaimNotHeld) for a claim
    Advance(consumer_id, incarnation, cursor=chunk.through, enqueue=[
        Enqueue(b"hook", entry, now_ms) for entry, _qos in chunk.entries])

    claimed = ClaimNext(b"hook", worker, now_ms, until_ms=now_ms + 60_000, limit=32)
    # for each message of the outcome Claimed: check message.message.expires_ms, send, then one of
    Settle(message.credential, now_ms, Verdict.DONE)
    schedule.settlement(message, Failure.UNAVAILABLE, now_ms, chance=random(), retry_at_ms=...)
    # while it takes long: Extend(message.credential, now_ms, until_ms=now_ms + 60_000)
    # at shutdown, for what was not begun: Release(message.credential, now_ms)

Backlog.oldest_due_ms says when it is worth to claim again.
"""

from storage.outbox.moves import ENDED, LIVE, MOVES, Event, Failure, State, Verdict
from storage.outbox.schedule import BECOMES, RETRY_AFTER_MS_MAX, Schedule
from storage.outbox.vocabulary import (
    ATTEMPTS_MAX,
    CLAIM_BYTES_MAX,
    CLAIM_MESSAGES_MAX,
    QUEUE_BYTES_MAX,
    RETRY_DELAYS_MS,
    SESSIONS,
    WORKER_BYTES,
    AuditRecord,
    Backlog,
    Claimed,
    ClaimNext,
    Credential,
    DeadLetter,
    Enqueue,
    Enqueued,
    ExpireMessages,
    Extend,
    Message,
    OutboxOp,
    OutboxReads,
    Purge,
    Purged,
    Reap,
    Reaped,
    Reissue,
    Reissued,
    Release,
    Settle,
)

__all__ = [
    "ATTEMPTS_MAX",
    "BECOMES",
    "CLAIM_BYTES_MAX",
    "CLAIM_MESSAGES_MAX",
    "ENDED",
    "LIVE",
    "MOVES",
    "QUEUE_BYTES_MAX",
    "RETRY_AFTER_MS_MAX",
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
    "Event",
    "ExpireMessages",
    "Extend",
    "Failure",
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
    "Schedule",
    "Settle",
    "State",
    "Verdict",
]

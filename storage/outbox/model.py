"""The outbox in memory: the model that the other one is tested against.

Written from the contract alone, to be read and not to be fast: one dict of messages, and everything
that is asked for is found by looking at all of them. It shares values with the engine, and neither
its tables nor its table of moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from storage.errors import ClaimNotHeld, ReissueRefused
from storage.outbox.moves import Failure, State, Verdict
from storage.outbox.vocabulary import (
    SESSIONS,
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
    Purge,
    Purged,
    Reap,
    Reaped,
    Reissue,
    Reissued,
    Release,
    Settle,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Kept", "OutboxModel", "OutboxTables"]

Put: TypeAlias = Callable[[dict[Any, Any], Any, Any], None]
"""(table, key, value): sets or deletes (None), and remembers how to undo that."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A message with its keys; b"" = none."""

    message: Message
    key: bytes
    supersede_key: bytes


@dataclass(slots=True)
class OutboxTables:
    """Values are replaced, never changed. last: number given last, of each kind."""

    messages: dict[int, Kept] = field(default_factory=dict)
    queues: dict[bytes, int] = field(default_factory=dict)
    audit: dict[int, AuditRecord] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)


class OutboxModel:
    """Operations and reads; see storage.outbox. put: how a table is changed."""

    def __init__(self, tables: Callable[[], OutboxTables], put: Put) -> None:
        self._of = tables
        self._put = put

    # ------------------------------------------------------------------------------ helpers

    def _next(self, kind: str) -> int:
        number = self._of().last.get(kind, 0) + 1
        self._put(self._of().last, kind, number)
        return number

    def _messages(self, queue: bytes | None = None) -> Iterator[Message]:
        for kept in list(self._of().messages.values()):
            if queue is None or kept.message.queue == queue:
                yield kept.message

    def _change(self, old: Message, **changes: Any) -> None:
        """Put a message back changed; a body goes with the states that have none."""
        kept = self._of().messages[old.id]
        after = old._replace(**changes)
        if after.state not in {State.WAITING, State.CLAIMED, State.DEAD}:
            after = after._replace(message=None)
        key = b"" if after.state is State.REISSUED else kept.key
        self._put(self._of().messages, after.id, Kept(after, key, kept.supersede_key))

    def _end(self, old: Message, state: State, now_ms: int, **changes: Any) -> None:
        self._change(old, state=state, ended_ms=now_ms, until_ms=0, **changes)

    def _held(self, credential: Credential, now_ms: int) -> Message:
        message_id, worker, claim = credential
        if not message_id or not claim or not worker or len(worker) != 16 or not any(worker):
            raise ClaimNotHeld(0, claim or 0, message_id or 0, "incomplete")
        kept = self._of().messages.get(message_id)
        if kept is None:
            raise ClaimNotHeld(0, claim, message_id, "gone")
        message = kept.message
        if message.state is not State.CLAIMED:
            raise ClaimNotHeld(0, claim, message_id, message.state.name.lower())
        if (message.worker, message.claim) != (worker, claim):
            raise ClaimNotHeld(0, claim, message_id, "claimed")
        if now_ms >= message.until_ms:
            raise ClaimNotHeld(0, claim, message_id, "lapsed")
        return message

    def _fail(self, message: Message, now_ms: int, due_ms: int, failure: Failure) -> State:
        attempts = message.attempts + 1
        changes = {"attempts": attempts, "failure": failure}
        if 0 < message.attempts_max <= attempts:
            self._end(message, State.DEAD, now_ms, **changes)
            return State.DEAD
        due_ms = max(now_ms, due_ms)
        self._change(message, state=State.WAITING, due_ms=due_ms, until_ms=0, **changes)
        return State.WAITING

    # --------------------------------------------------------------------------- operations

    def enqueue(self, op: Enqueue) -> Enqueued:
        """See storage.outbox.Enqueue."""
        self._name(op.queue)
        for kept in self._of().messages.values():
            if op.key and (kept.message.queue, kept.key) == (op.queue, op.key):
                return Enqueued(kept.message.id, is_new=False)
        superseded = 0
        for kept in list(self._of().messages.values()):
            is_live = kept.message.state in {State.WAITING, State.CLAIMED}
            is_same = (kept.message.queue, kept.supersede_key) == (op.queue, op.supersede_key)
            if op.supersede_key and is_same and is_live:
                superseded = kept.message.id
                self._end(kept.message, State.SUPERSEDED, op.now_ms)
        message = Message(
            id=self._next("message"),
            queue=op.queue,
            state=State.WAITING,
            message=op.message._replace(offset=0),
            offset=op.message.offset,
            destination=op.destination,
            attempts_max=op.attempts_max,
            created_ms=op.now_ms,
            due_ms=max(op.now_ms, op.not_before_ms),
        )
        self._put(self._of().messages, message.id, Kept(message, op.key, op.supersede_key))
        return Enqueued(message.id, is_new=True, superseded=superseded)

    def _name(self, queue: bytes) -> None:
        if queue not in self._of().queues:
            self._put(self._of().queues, queue, self._next("queue"))

    def bury(self, letter: DeadLetter, client_id: bytes) -> None:
        """A dead letter of a session (Advance.dead)."""
        self._name(SESSIONS)
        message = Message(
            id=self._next("message"),
            queue=SESSIONS,
            state=State.DEAD,
            message=None if letter.erase else letter.message._replace(offset=0),
            offset=letter.message.offset,
            destination=client_id,
            attempts=letter.attempts,
            created_ms=letter.at_ms,
            due_ms=letter.at_ms,
            ended_ms=letter.at_ms,
            failure=letter.failure,
        )
        self._put(self._of().messages, message.id, Kept(message, b"", b""))

    def claim_next(self, op: ClaimNext) -> Claimed:
        """See storage.outbox.ClaimNext."""
        if not op.worker or len(op.worker) != 16 or not any(op.worker):
            raise ClaimNotHeld(0, 0, found="incomplete")
        due = sorted(
            (message.due_ms, message.id, message)
            for message in self._messages(op.queue)
            if message.state is State.WAITING and message.due_ms <= op.now_ms
        )[: op.limit]
        if not due:
            return Claimed(())
        claim = self._next("claim")
        taken: list[Message] = []
        expired: list[int] = []
        taken_bytes = 0
        is_full = is_alone = False
        for _, _, message in due:
            if is_alone:
                is_full = True
                break
            assert message.message is not None
            if _is_over(message, op.now_ms):
                self._end(message, State.EXPIRED, op.now_ms, failure=Failure.EXPIRED)
                expired.append(message.id)
                continue
            taken_bytes += len(message.message.payload)
            is_alone = message.failure is Failure.LAPSED
            if taken and (taken_bytes > op.bytes_max or is_alone):
                is_full = True
                break
            changes = {"worker": op.worker, "claim": claim, "until_ms": op.until_ms}
            self._change(message, state=State.CLAIMED, **changes)
            taken.append(self._of().messages[message.id].message)
        more = is_full or len(due) == op.limit
        return Claimed(tuple(taken), tuple(expired), (), more)

    def extend(self, op: Extend) -> None:
        """See storage.outbox.Extend."""
        message = self._held(op.credential, op.now_ms)
        if op.until_ms > message.until_ms:
            self._change(message, until_ms=op.until_ms)

    def release(self, op: Release) -> None:
        """See storage.outbox.Release."""
        self._change(self._held(op.credential, op.now_ms), state=State.WAITING, until_ms=0)

    def settle(self, op: Settle) -> State:
        """See storage.outbox.Settle."""
        message = self._held(op.credential, op.now_ms)
        if op.verdict is Verdict.RETRY:
            return self._fail(message, op.now_ms, op.due_ms, op.failure)
        if op.verdict is Verdict.EXPIRED:
            self._end(message, State.EXPIRED, op.now_ms, failure=op.failure)
            return State.EXPIRED
        attempts = message.attempts + 1
        if op.verdict is Verdict.DONE:
            self._end(message, State.DONE, op.now_ms, attempts=attempts)
            return State.DONE
        body = None if op.erase else message.message
        changes = {"attempts": attempts, "failure": op.failure, "message": body}
        self._end(message, State.DEAD, op.now_ms, **changes)
        return State.DEAD

    def reap(self, op: Reap) -> Reaped:
        """See storage.outbox.Reap."""
        lapsed = sorted(
            (message.until_ms, message.id, message)
            for message in self._messages()
            if message.state is State.CLAIMED
            if op.all_leases or message.until_ms <= op.now_ms
        )[: op.limit]
        ids: dict[State, list[int]] = {State.WAITING: [], State.DEAD: []}
        for _, _, message in lapsed:
            due_ms = op.now_ms
            if op.delays_ms:
                due_ms += op.delays_ms[min(message.attempts, len(op.delays_ms) - 1)]
            state = self._fail(message, op.now_ms, due_ms, Failure.LAPSED)
            ids[state].append(message.id)
            if not op.delays_ms:
                self._change(self._of().messages[message.id].message, due_ms=message.due_ms)
        return Reaped(tuple(ids[State.WAITING]), tuple(ids[State.DEAD]), len(lapsed) == op.limit)

    def expire_messages(self, op: ExpireMessages) -> tuple[int, ...]:
        """See storage.outbox.ExpireMessages."""
        over = sorted(
            (message.message.expires_ms, message.id, message)
            for message in self._messages()
            if message.state is State.WAITING and message.message is not None
            if _is_over(message, op.now_ms)
        )[: op.limit]
        for _, _, message in over:
            self._end(message, State.EXPIRED, op.now_ms, failure=Failure.EXPIRED)
        return tuple(message_id for _, message_id, _ in over)

    def purge(self, op: Purge) -> Purged:
        """See storage.outbox.Purge."""
        over: list[tuple[int, bool, int, int]] = []
        for message in self._messages():
            if message.ended_ms and (not op.queue or message.queue == op.queue):
                is_dead = message.state is State.DEAD
                if message.ended_ms < (op.dead_before_ms if is_dead else op.done_before_ms):
                    queue = self._of().queues[message.queue]
                    over.append((queue, is_dead, message.ended_ms, message.id))
        for _, _, _, message_id in sorted(over)[: op.limit]:
            self._put(self._of().messages, message_id, None)
        audit: list[int] = []
        for number, record in sorted(self._of().audit.items()):
            if len(audit) == op.limit or record.at_ms >= op.audit_before_ms:
                break
            audit.append(number)
        for number in audit:
            self._put(self._of().audit, number, None)
        deleted = min(len(over), op.limit)
        return Purged(deleted, len(audit), op.limit in {deleted, len(audit)})

    def reissue(self, op: Reissue) -> Reissued:
        """See storage.outbox.Reissue."""
        kept = self._of().messages.get(op.message_id)
        if kept is None:
            raise ReissueRefused(op.message_id, "gone")
        old = kept.message
        if old.state is not State.DEAD:
            raise ReissueRefused(op.message_id, old.state.name.lower())
        for other in self._of().messages.values():
            is_live = other.message.state in {State.WAITING, State.CLAIMED}
            is_same = (other.message.queue, other.supersede_key) == (old.queue, kept.supersede_key)
            if kept.supersede_key and is_live and is_same:
                raise ReissueRefused(op.message_id, "live", other.message.id)
        if old.message is None:
            raise ReissueRefused(op.message_id, "erased")
        body = old.message
        if _is_over(old, op.now_ms):
            body = body._replace(expires_ms=0)
        fresh = Message(
            id=self._next("message"),
            queue=old.queue,
            state=State.WAITING,
            message=body,
            offset=old.offset,
            destination=old.destination,
            attempts_max=old.attempts_max if op.attempts_max is None else op.attempts_max,
            created_ms=op.now_ms,
            due_ms=op.now_ms,
            reissue_of=old.id,
        )
        self._end(old, State.REISSUED, op.now_ms, reissued_as=fresh.id)
        self._put(self._of().messages, fresh.id, Kept(fresh, kept.key, kept.supersede_key))
        number = self._next("audit")
        record = AuditRecord(number, op.now_ms, op.actor, old.queue, old.id, fresh.id)
        self._put(self._of().audit, number, record)
        return Reissued(fresh.id, old.queue)

    # -------------------------------------------------------------------------------- reads

    def backlog(self) -> list[Backlog]:
        """Counted, not kept: this is the model."""
        found: list[Backlog] = []
        for queue in sorted(self._of().queues):
            messages = list(self._messages(queue))
            counts = (sum(m.state is state for m in messages) for state in State)
            due = (m.due_ms for m in messages if m.state is State.WAITING)
            found.append(Backlog._make((queue, *counts, min(due, default=0))))
        return found

    def dead_letters(self, queue: bytes, after: tuple[int, int], limit: int) -> list[Message]:
        """See storage.outbox.OutboxReads."""
        dead = sorted(
            (message.ended_ms, message.id, message)
            for message in self._messages(queue)
            if message.state is State.DEAD and (message.ended_ms, message.id) > after
        )
        return [message for _, _, message in dead[:limit]]

    def show(self, message_id: int) -> Message | None:
        """See storage.outbox.OutboxReads."""
        kept = self._of().messages.get(message_id)
        return None if kept is None else kept.message

    def audit(self, after: int, limit: int) -> list[AuditRecord]:
        """See storage.outbox.OutboxReads."""
        numbers = sorted(number for number in self._of().audit if number > after)
        return [self._of().audit[number] for number in numbers[:limit]]

    def wrong(self) -> Iterator[str]:
        """Violations."""
        for message_id, kept in self._of().messages.items():
            message = kept.message
            is_live = message.state in {State.WAITING, State.CLAIMED}
            if message.id != message_id or message_id > self._of().last.get("message", 0):
                yield f"message {message_id} says it is {message.id}"
            if is_live and message.message is None:
                yield f"message {message_id} is to be sent and has no body"
            if is_live != (message.ended_ms == 0):
                yield f"message {message_id} ended at {message.ended_ms}"
            if (message.state is State.CLAIMED) != (message.until_ms > 0):
                yield f"message {message_id} is leased until {message.until_ms}"


def _is_over(message: Message, now_ms: int) -> bool:
    assert message.message is not None
    return 0 < message.message.expires_ms <= now_ms

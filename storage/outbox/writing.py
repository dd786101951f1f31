"""Operations on the outbox: each reads the rows it needs, checks, and moves them.

Rule 1. A refusal is raised before the first change; so a refused operation changed nothing.
Rule 2. Operations of one batch share their Books, which the engine closes.
Rule 3. ``_move`` looks every move up in the table of legal moves (storage.outbox.moves).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from storage.errors import ClaimNotHeld, MessageDamaged, ReissueRefused
from storage.kv import U64, U64_U64, Space
from storage.names import filter_hash
from storage.outbox.books import Books, body_of, row_of
from storage.outbox.moves import LIVE, MOVES, Event, Failure, State, Verdict
from storage.outbox.rows import NO_KEY, Row, decode_audit, encode_audit
from storage.outbox.vocabulary import (
    CLAIM_MESSAGES_MAX,
    SESSIONS,
    WORKER_BYTES,
    AuditRecord,
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
    from collections.abc import Sequence

    from storage.kv import ReadTxn, WriteTxn
    from storage.outbox.rows import Queue

__all__ = [
    "add",
    "claim_next",
    "enqueue",
    "expire_messages",
    "extend",
    "purge",
    "reap",
    "reissue",
    "release",
    "settle",
]

ATTEMPTS_COUNTED_MAX: Final = 0xFFFF
"""Row.attempts saturates."""


def _move(row: Row, event: Event, **changes: Any) -> Row:
    """The row after an event; KeyError = a bug of ours, the move is not legal."""
    return row._replace(state=MOVES[row.state][event], **changes)


def _ended(row: Row, event: Event, now_ms: int, **changes: Any) -> Row:
    """The row after an event that ends the message; its body goes, unless ``has_body`` says so."""
    return _move(row, event, ended_ms=now_ms, until_ms=0, **{"has_body": 0, **changes})


def _charged(row: Row) -> int:
    return min(row.attempts + 1, ATTEMPTS_COUNTED_MAX)


def _failed(row: Row, now_ms: int, due_ms: int, failure: Failure) -> Row:
    """The row after an attempt that failed: due again, or dead if it was the last one."""
    attempts = _charged(row)
    if row.attempts_max and attempts >= row.attempts_max:
        kept = row.has_body
        return _ended(row, Event.EXHAUST, now_ms, attempts=attempts, failure=failure, has_body=kept)
    due_ms = max(due_ms, now_ms)
    return _move(row, Event.RETRY, attempts=attempts, failure=failure, due_ms=due_ms, until_ms=0)


def _found(books: Books, space: Space, key: bytes) -> Row | None:
    """The message that an index names in the last eight bytes; one that is damaged leaves the
    index, so that it does not hold up the others, and check() tells."""
    try:
        row = row_of(books.txn, int.from_bytes(key[-8:], "big"))
    except MessageDamaged:
        row = None
    if row is None:
        books.txn.delete(space, key)
    return row


# --------------------------------------------------------------------------------- enqueuing


def add(
    txn: WriteTxn, enqueued: Sequence[Enqueue], dead: Sequence[DeadLetter], client_id: bytes
) -> None:
    """What an Advance leaves in the outbox."""
    books = Books(txn)
    for op in enqueued:
        enqueue(books, op)
    for letter in dead:
        _bury(books, letter, client_id)
    books.close()


def _hashed(key: bytes) -> bytes:
    return filter_hash(key) if key else NO_KEY


def _holder(txn: ReadTxn, queue: int, kind: bytes, key: bytes) -> Row | None:
    """The message that has a key; none if that one is damaged: check() tells, the key goes on."""
    if key == NO_KEY:
        return None
    packed_id = txn.get(Space.OUTBOX_KEY, U64.pack(queue) + kind + key)
    try:
        return None if packed_id is None else row_of(txn, int.from_bytes(packed_id, "big"))
    except MessageDamaged:
        return None


def enqueue(books: Books, op: Enqueue) -> Enqueued:
    """See storage.outbox.Enqueue."""
    queue = books.named(op.queue)
    key, supersede = _hashed(op.key), _hashed(op.supersede_key)
    if (known := _holder(books.txn, queue.number, b"i", key)) is not None:
        return Enqueued(known.id, is_new=False)
    older = _holder(books.txn, queue.number, b"s", supersede)
    if older is not None:
        books.put(_ended(older, Event.SUPERSEDE, op.now_ms), older)
    row = Row(
        id=books.next("message"),
        state=State.WAITING,
        failure=Failure.NONE,
        has_body=1,
        attempts=0,
        attempts_max=op.attempts_max,
        queue=queue.number,
        created_ms=op.now_ms,
        due_ms=max(op.now_ms, op.not_before_ms),
        until_ms=0,
        ended_ms=0,
        expires_ms=op.message.expires_ms,
        offset=op.message.offset,
        claim=0,
        reissue_of=0,
        reissued_as=0,
        worker=NO_KEY,
        key=key,
        supersede=supersede,
        destination=op.destination,
    )
    books.put_body(row.id, op.message)
    books.put(row, None)
    return Enqueued(row.id, is_new=True, superseded=0 if older is None else older.id)


def _bury(books: Books, letter: DeadLetter, client_id: bytes) -> None:
    """A dead letter of a session."""
    row = Row(
        id=books.next("message"),
        state=State.DEAD,
        failure=letter.failure,
        has_body=not letter.erase,
        attempts=min(letter.attempts, ATTEMPTS_COUNTED_MAX),
        attempts_max=0,
        queue=books.named(SESSIONS).number,
        created_ms=letter.at_ms,
        due_ms=letter.at_ms,
        until_ms=0,
        ended_ms=letter.at_ms,
        expires_ms=letter.message.expires_ms,
        offset=letter.message.offset,
        claim=0,
        reissue_of=0,
        reissued_as=0,
        worker=NO_KEY,
        key=NO_KEY,
        supersede=NO_KEY,
        destination=client_id,
    )
    if row.has_body:
        books.put_body(row.id, letter.message)
    books.put(row, None)


# ---------------------------------------------------------------------------------- claiming


def claim_next(books: Books, op: ClaimNext) -> Claimed:
    """See storage.outbox.ClaimNext."""
    assert 1 <= op.limit <= CLAIM_MESSAGES_MAX, "a claim is of 1 to CLAIM_MESSAGES_MAX messages"
    if not _is_worker(op.worker):
        raise ClaimNotHeld(0, 0, found="incomplete")
    queue = books.find(op.queue)
    if queue is None:
        return Claimed(())
    due = books.txn.scan(
        Space.OUTBOX_DUE, U64.pack(queue.number), U64_U64.pack(queue.number, op.now_ms + 1)
    )
    keys = [key for key, _ in islice(due, op.limit)]
    if not keys:
        return Claimed(())
    number = books.next("claim")
    batch = _Acquisition(books, op, queue, number)
    is_full = not all(map(batch.take, keys))
    more = is_full or len(keys) == op.limit
    return Claimed(tuple(batch.messages), tuple(batch.expired), tuple(batch.unreadable), more)


class _Acquisition:
    """One claim as it is filled."""

    def __init__(self, books: Books, op: ClaimNext, queue: Queue, number: int) -> None:
        self.books = books
        self.op = op
        self.queue = queue
        self.number = number
        self.room = op.bytes_max
        self.is_alone = False
        self.messages: list[Message] = []
        self.expired: list[int] = []
        self.unreadable: list[int] = []

    def take(self, key: bytes) -> bool:
        """Claim a message that is due, or end it; False if there is no room for it."""
        if self.is_alone:
            return False
        books, op = self.books, self.op
        row = _found(books, Space.OUTBOX_DUE, key)
        if row is None:
            return True
        if 0 < row.expires_ms <= op.now_ms:
            books.put(_ended(row, Event.EXPIRE, op.now_ms, failure=Failure.EXPIRED), row)
            self.expired.append(row.id)
            return True
        try:
            body = body_of(books.txn, row)
        except MessageDamaged:
            self._bury(row)
            return True
        assert body is not None, "a waiting message has its body"
        self.room -= len(body.payload)
        self.is_alone = row.failure is Failure.LAPSED
        if self.messages and (self.room < 0 or self.is_alone):
            return False
        claimed = _move(row, Event.CLAIM, until_ms=op.until_ms, worker=op.worker, claim=self.number)
        books.put(claimed, row)
        self.messages.append(claimed.message(self.queue.name, body))
        return True

    def _bury(self, row: Row) -> None:
        failure = Failure.UNREADABLE
        dead = _ended(row, Event.DEAD, self.op.now_ms, failure=failure, has_body=row.has_body)
        self.books.put(dead, row)
        self.unreadable.append(row.id)


def _is_worker(worker: bytes) -> bool:
    return isinstance(worker, bytes) and len(worker) == WORKER_BYTES and worker != NO_KEY


def _held(txn: ReadTxn, credential: Credential, now_ms: int) -> Row:
    """The message, if it is claimed under the credential and its lease has not lapsed."""
    message_id, worker, claim = credential
    if not (message_id and claim and _is_worker(worker)):
        raise ClaimNotHeld(0, claim or 0, message_id or 0, "incomplete")
    row = row_of(txn, message_id)
    if row is None:
        found = "gone"
    elif row.state is not State.CLAIMED:
        found = row.state.name.lower()
    elif row.claim != claim or row.worker != worker:
        found = "claimed"
    elif row.until_ms <= now_ms:
        found = "lapsed"
    else:
        return row
    raise ClaimNotHeld(0, claim, message_id, found)


def extend(books: Books, op: Extend) -> None:
    """See storage.outbox.Extend."""
    row = _held(books.txn, op.credential, op.now_ms)
    books.put(_move(row, Event.EXTEND, until_ms=max(row.until_ms, op.until_ms)), row)


def release(books: Books, op: Release) -> None:
    """See storage.outbox.Release."""
    row = _held(books.txn, op.credential, op.now_ms)
    books.put(_move(row, Event.RELEASE, until_ms=0), row)


def settle(books: Books, op: Settle) -> State:
    """See storage.outbox.Settle."""
    row = _held(books.txn, op.credential, op.now_ms)
    after = _settled(row, op)
    books.put(after, row)
    return after.state


def _settled(row: Row, op: Settle) -> Row:
    if op.verdict is Verdict.DONE:
        failure = row.failure  # of an attempt before this one: part of the tale
        return _ended(row, Event.DONE, op.now_ms, attempts=_charged(row), failure=failure)
    if op.verdict is Verdict.RETRY:
        return _failed(row, op.now_ms, op.due_ms, op.failure)
    if op.verdict is Verdict.EXPIRED:
        return _ended(row, Event.EXPIRE, op.now_ms, failure=op.failure)
    kept = row.has_body and not op.erase
    changes = {"attempts": _charged(row), "failure": op.failure, "has_body": int(kept)}
    return _ended(row, Event.DEAD, op.now_ms, **changes)


# --------------------------------------------------------------------------------- sweeping


def reap(books: Books, op: Reap) -> Reaped:
    """See storage.outbox.Reap. Goes by lease time alone, whoever the worker was."""
    stop = None if op.all_leases else U64.pack(op.now_ms + 1)
    lapsed = books.txn.scan(Space.OUTBOX_LEASE, stop=stop)
    keys = [key for key, _ in islice(lapsed, op.limit)]
    waiting: list[int] = []
    dead: list[int] = []
    for key in keys:
        row = _found(books, Space.OUTBOX_LEASE, key)
        if row is None:
            continue
        due_ms = op.now_ms
        if op.delays_ms:
            due_ms += op.delays_ms[min(row.attempts, len(op.delays_ms) - 1)]
        after = _failed(row, op.now_ms, due_ms, Failure.LAPSED)
        if not op.delays_ms:
            after = after._replace(due_ms=row.due_ms)
        books.put(after, row)
        (dead if after.state is State.DEAD else waiting).append(row.id)
    return Reaped(tuple(waiting), tuple(dead), len(keys) == op.limit)


def expire_messages(books: Books, op: ExpireMessages) -> tuple[int, ...]:
    """See storage.outbox.ExpireMessages."""
    over = books.txn.scan(Space.OUTBOX_EXPIRY, stop=U64.pack(op.now_ms + 1))
    expired: list[int] = []
    for key, _value in list(islice(over, op.limit)):
        row = _found(books, Space.OUTBOX_EXPIRY, key)
        if row is not None:
            books.put(_ended(row, Event.EXPIRE, op.now_ms, failure=Failure.EXPIRED), row)
            expired.append(row.id)
    return tuple(expired)


def purge(books: Books, op: Purge) -> Purged:
    """See storage.outbox.Purge."""
    deleted = 0
    for number in _queues(books, op.queue):
        for is_dead, before_ms in ((0, op.done_before_ms), (1, op.dead_before_ms)):
            start = U64.pack(number) + bytes((is_dead,))
            over = books.txn.scan(Space.OUTBOX_ENDED, start, start + U64.pack(before_ms))
            for key, _value in list(islice(over, op.limit - deleted)):
                row = _found(books, Space.OUTBOX_ENDED, key)
                if row is not None:
                    books.delete(row)
                deleted += 1
    audit = _purge_audit(books.txn, op)
    return Purged(deleted, audit, op.limit in {deleted, audit})


def _queues(books: Books, only: bytes) -> range | list[int]:
    """Numbers of the queue of a name, or of all."""
    if not only:
        return range(1, books.ends.queue)
    found = books.find(only)
    return [] if found is None else [found.number]


def _purge_audit(txn: WriteTxn, op: Purge) -> int:
    """Audit records are in the order of their times, up to a clock that was set back."""
    over: list[bytes] = []
    for key, raw in txn.scan(Space.AUDIT):
        if len(over) == op.limit:
            break
        record = decode_audit(int.from_bytes(key, "big"), raw)
        if op.audit_before_ms <= (0 if record is None else record.at_ms):
            break
        over.append(key)
    for key in over:
        txn.delete(Space.AUDIT, key)
    return len(over)


# --------------------------------------------------------------------------------- operating


def reissue(books: Books, op: Reissue) -> Reissued:
    """See storage.outbox.Reissue."""
    txn = books.txn
    old = row_of(txn, op.message_id)
    if old is None:
        raise ReissueRefused(op.message_id, "gone")
    if Event.REISSUE not in MOVES[old.state]:
        raise ReissueRefused(op.message_id, old.state.name.lower())
    live = _holder(txn, old.queue, b"s", old.supersede)
    if live is not None and live.state in LIVE:
        raise ReissueRefused(op.message_id, "live", live.id)
    body = body_of(txn, old)
    if body is None:
        raise ReissueRefused(op.message_id, "erased")
    number = books.next("message")
    if 0 < body.expires_ms <= op.now_ms:  # a deadline that is over would end it at once
        body = body._replace(expires_ms=0)
    fresh = old._replace(
        id=number,
        expires_ms=body.expires_ms,
        state=State.WAITING,
        failure=Failure.NONE,
        attempts=0,
        attempts_max=old.attempts_max if op.attempts_max is None else op.attempts_max,
        created_ms=op.now_ms,
        due_ms=op.now_ms,
        ended_ms=0,
        claim=0,
        worker=NO_KEY,
        reissue_of=old.id,
    )
    # the key goes from one to the other, so the one that gives it comes first
    gone = _ended(old, Event.REISSUE, op.now_ms, reissued_as=number, key=NO_KEY)
    books.put(gone, old)
    books.put_body(number, body)
    books.put(fresh, None)
    queue = books.queue(old.queue).name
    record = AuditRecord(books.next("audit"), op.now_ms, op.actor, queue, old.id, number)
    txn.put(Space.AUDIT, U64.pack(record.number), encode_audit(record))
    return Reissued(number, queue)

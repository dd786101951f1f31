"""One batch, one transaction: what the writer does, whatever the backend.

Between batches the engine holds nothing that is not on disk but caches. A batch that fails, for
whatever reason, is followed by ``aborted``, which reads the ends of the history again; so one
poisonous operation leaves the store as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from storage import consumers
from storage.api import (
    Acquire,
    Advance,
    Batch,
    Bind,
    Detach,
    Discard,
    DropWill,
    Expire,
    FilterCount,
    Opened,
    Outcome,
    Prune,
    Retain,
    StoreWill,
    Subscribe,
    Unsubscribe,
    Will,
)
from storage.blocks import Damage, decode_message, encode_message
from storage.errors import RecordDamaged, StoreRefusal
from storage.history import History
from storage.kv import U64, ReadTxn, Space, WriteTxn
from storage.meta import Ends, Identity, MetaDamaged, read_ends
from storage.names import key_of
from storage.outbox import (
    ClaimNext,
    Enqueue,
    ExpireMessages,
    Extend,
    Purge,
    Reap,
    Reissue,
    Release,
    Settle,
    writing,
)
from storage.outbox.books import Books
from storage.records import decode_will, encode_will
from storage.retention import prune

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage.api import Entry

__all__ = ["Engine", "apply_as_role", "filter_counts", "frees", "opened", "retained_page", "wills"]


def _retain(txn: WriteTxn, _: History, op: Retain) -> None:
    key = key_of(op.message.topic)
    if op.message.payload:
        txn.put(Space.RETAINED, key, encode_message(op.message))
    else:
        txn.delete(Space.RETAINED, key)


def _store_will(txn: WriteTxn, _: History, op: StoreWill) -> None:
    txn.put(Space.WILL, op.will.incarnation, encode_will(op.will))


def _drop_will(txn: WriteTxn, _: History, op: DropWill) -> bool:
    return txn.delete(Space.WILL, op.incarnation)


_OPERATIONS: Final[dict[type, Callable[..., Outcome]]] = {
    Acquire: consumers.acquire,
    Advance: consumers.advance,
    Subscribe: consumers.subscribe,
    Unsubscribe: consumers.unsubscribe,
    Bind: consumers.bind,
    Detach: consumers.detach,
    Discard: consumers.discard,
    Expire: consumers.expire,
    Retain: _retain,
    StoreWill: _store_will,
    DropWill: _drop_will,
    Prune: prune,
}

_OUTBOX: Final[dict[type, Callable[..., Outcome]]] = {
    Enqueue: writing.enqueue,
    ClaimNext: writing.claim_next,
    Extend: writing.extend,
    Settle: writing.settle,
    Release: writing.release,
    Reap: writing.reap,
    ExpireMessages: writing.expire_messages,
    Reissue: writing.reissue,
    Purge: writing.purge,
}

_FREEING: Final = (Discard, Expire, Prune, Detach, Purge, ExpireMessages)
"""Operations that make room: a batch of these alone may use what is kept back for them."""


SEEN_MS: Final = 1000
"""How closely the latest time is remembered (Opened.seen_ms)."""


class Engine:
    """The single writer. All calls from one thread, each in a transaction of its own."""

    def __init__(self, identity: Identity, ends: Ends) -> None:
        self._history = History(identity, ends)
        self._is_applied = False

    @property
    def ends(self) -> Ends:
        """As of the last committed batch, outside of one."""
        return self._history.ends

    @property
    def identity(self) -> Identity:
        """Of the database that is written to."""
        return self._history.identity

    def read_tail(self, txn: ReadTxn) -> None:
        """Take up what the last run left unfinished."""
        self._history.tail.read(txn, self._history.ends)

    def apply(self, batch: Batch, txn: WriteTxn) -> list[Outcome]:
        """Apply a batch. Call ``committed`` or ``aborted`` afterwards; or apply it once more, if
        its transaction was given up."""
        if self._is_applied:
            self.aborted()
        self._is_applied = True
        history = self._history
        if batch.stored_ms >= history.ends.seen_ms + SEEN_MS:
            history.ends.seen_ms = batch.stored_ms
        if batch.entries:
            history.append(txn, batch.entries, batch.stored_ms)
        outcomes = _outcomes(txn, history, batch)
        if history.is_changed():
            history.ends.write(txn)
        return outcomes

    def committed(self) -> None:
        """The batch is on disk."""
        self._history.committed()
        self._is_applied = False

    def aborted(self) -> None:
        """The batch is gone."""
        self._history.aborted()
        self._is_applied = False


def _outcomes(txn: WriteTxn, history: History | None, batch: Batch) -> list[Outcome]:
    outcomes: list[Outcome] = []
    books: Books | None = None  # shared by operations of the outbox that follow each other
    for op in batch.ops:
        work = _OUTBOX.get(type(op))
        try:
            if work is not None:
                books = books or Books(txn)
                outcomes.append(work(books, op))
                continue
            if books is not None:
                books.close()
                books = None
            outcomes.append(_OPERATIONS[type(op)](txn, history, op))
        except StoreRefusal as refusal:
            outcomes.append(refusal)
    if books is not None:
        books.close()
    return outcomes


def apply_as_role(batch: Batch, txn: WriteTxn) -> list[Outcome]:
    """Apply a batch of a role: its operations are of the outbox, which needs no engine, so this may
    be in another thread than the writer's (storage.outbox.rights)."""
    return _outcomes(txn, None, batch)


def frees(batch: Batch) -> bool:
    """Whether a batch makes room: it may use what is kept back for that."""
    return not batch.entries and all(isinstance(op, _FREEING) for op in batch.ops)


def filter_counts(txn: ReadTxn) -> tuple[FilterCount, ...]:
    """The distinct durable filters. Raises MetaDamaged: without one of them messages would not be
    logged for those who wait for them."""
    found: list[FilterCount] = []
    for _, row in txn.scan(Space.FILTER):
        if len(row) <= U64.size:
            raise MetaDamaged("a filter of its sessions is damaged")
        found.append(FilterCount(row[U64.size :], int.from_bytes(row[: U64.size], "big")))
    return tuple(found)


def wills(txn: ReadTxn) -> tuple[Will, ...]:
    """All that are stored; one that is damaged is left to ``check``: it cannot be published."""
    found: list[Will] = []
    for incarnation, raw in txn.scan(Space.WILL):
        try:
            found.append(decode_will(incarnation, raw))
        except RecordDamaged:
            continue
    return tuple(found)


def retained_page(txn: ReadTxn, after: bytes | None, limit: int) -> list[Entry]:
    """Retained messages in the order of their keys; those that are damaged are left out."""
    start = b"" if after is None else txn.place(Space.RETAINED, key_of(after)) + b"\x00"
    found: list[Entry] = []
    for _, raw in txn.scan(Space.RETAINED, start):
        if len(found) == limit:
            break
        try:
            found.append(decode_message(raw))
        except Damage:
            continue
    return found


def opened(txn: WriteTxn, identity: Identity, minted: str, now_ms: int) -> tuple[Opened, Engine]:
    """The opening itself: detach owners that died, and say what the broker must know."""
    ends = read_ends(txn)
    now_ms = max(now_ms, ends.seen_ms)
    engine = Engine(identity, ends)
    engine.read_tail(txn)
    consumers.detach_all(txn, ends.head, now_ms)
    found = Opened(ends.log(identity), filter_counts(txn), wills(txn), minted, now_ms)
    return found, engine

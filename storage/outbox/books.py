"""The rows of the outbox as the operations of one batch work on them.

Rule 1. ``Books.put`` is the only way a message changes: it brings every row by which the message is
        found (rows.indexes), its body and the figures of its queue in line with the move.
Rule 2. Figures and numbers are read once, kept here while the operations run, and written by
        ``close``. That they are damaged is MetaDamaged, which no refusal is: the batch fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from storage.blocks import Damage, decode_message, encode_message
from storage.errors import MessageDamaged
from storage.kv import U64, Space
from storage.outbox.rows import (
    ENDS_KEY,
    FIGURES_PREFIX,
    NAME_PREFIX,
    Ends,
    Queue,
    Row,
    indexes,
)
from storage.outbox.vocabulary import QUEUE_BYTES_MAX

if TYPE_CHECKING:
    from storage.api import Entry
    from storage.kv import ReadTxn, WriteTxn

__all__ = ["Books", "body_of", "read_ends", "read_queue", "row_of"]


def row_of(txn: ReadTxn, message_id: int) -> Row | None:
    """Raises MessageDamaged."""
    raw = txn.get(Space.OUTBOX, U64.pack(message_id))
    return None if raw is None else Row.unpack(message_id, raw)


def body_of(txn: ReadTxn, row: Row) -> Entry | None:
    """None if it was erased. Raises MessageDamaged."""
    if not row.has_body:
        return None
    raw = txn.get(Space.OUTBOX_BODY, U64.pack(row.id))
    try:
        return decode_message(raw or b"")
    except Damage:
        raise MessageDamaged(row.id) from None


def read_ends(txn: ReadTxn) -> Ends:
    """Raises MetaDamaged."""
    raw = txn.get(Space.OUTBOX_QUEUE, ENDS_KEY)
    return Ends() if raw is None else Ends.unpack(raw)


def read_queue(txn: ReadTxn, number: int) -> Queue:
    """Raises MetaDamaged."""
    raw = txn.get(Space.OUTBOX_QUEUE, FIGURES_PREFIX + U64.pack(number))
    return Queue.unpack(number, raw or b"")


class Books:
    """A view of the outbox. Make it, change rows, ``close`` it; one at a time."""

    __slots__ = ("_changed", "_ends", "_is_counted", "_queues", "txn")

    def __init__(self, txn: WriteTxn) -> None:
        self.txn = txn
        self._ends: Ends | None = None
        self._queues: dict[int, Queue] = {}
        self._changed: set[int] = set()
        self._is_counted = False

    def next(self, kind: Literal["message", "claim", "queue", "audit"]) -> int:
        """Take the next number of a kind."""
        self._is_counted = True
        return self.ends.next(kind)

    @property
    def ends(self) -> Ends:
        """The numbers to be given next."""
        if self._ends is None:
            self._ends = read_ends(self.txn)
        return self._ends

    def queue(self, number: int) -> Queue:
        """By its number."""
        found = self._queues.get(number)
        if found is None:
            found = self._queues[number] = read_queue(self.txn, number)
        return found

    def find(self, name: bytes) -> Queue | None:
        """By its name, None = it was never named."""
        packed = self.txn.get(Space.OUTBOX_QUEUE, NAME_PREFIX + name)
        return None if packed is None else self.queue(int.from_bytes(packed, "big"))

    def named(self, name: bytes) -> Queue:
        """By its name; made if it is new."""
        found = self.find(name)
        if found is None:
            assert 0 < len(name) <= QUEUE_BYTES_MAX, "a queue's name has 1 to 255 bytes"
            found = self._make(self.next("queue"), name)
        return found

    def _make(self, number: int, name: bytes) -> Queue:
        self.txn.put(Space.OUTBOX_QUEUE, NAME_PREFIX + name, U64.pack(number))
        self._changed.add(number)
        found = self._queues[number] = Queue(name, number)
        return found

    def restore(self, number: int, name: bytes) -> None:
        """Make a queue under a number that it had (a repair)."""
        if self.find(name) is None:
            self._make(number, name)

    def put(self, row: Row, before: Row | None) -> None:
        """Write a message that is new (``before`` None) or moved."""
        txn = self.txn
        new = indexes(row)
        counts = self._counts(row.queue)
        if before is not None:
            self._drop(row, before, new)
            counts[before.state] -= 1
        counts[row.state] += 1
        for (space, key), value in new.items():
            txn.put(space, key, value)
        txn.put(Space.OUTBOX, U64.pack(row.id), row.pack())

    def _drop(self, row: Row, before: Row, new: dict[tuple[Space, bytes], bytes]) -> None:
        """Delete what no longer leads to a message, and its body if it is erased; of ``new``, what
        is there already needs no write."""
        for at in indexes(before):
            if at in new:
                del new[at]
            else:
                self.txn.delete(*at)
        if before.has_body and not row.has_body:
            self.txn.delete(Space.OUTBOX_BODY, U64.pack(row.id))

    def put_body(self, message_id: int, body: Entry) -> None:
        """Of a message that is new."""
        self.txn.put(Space.OUTBOX_BODY, U64.pack(message_id), encode_message(body))

    def delete(self, row: Row) -> None:
        """Delete a message with all that leads to it."""
        for at in indexes(row):
            self.txn.delete(*at)
        if row.has_body:
            self.txn.delete(Space.OUTBOX_BODY, U64.pack(row.id))
        self.txn.delete(Space.OUTBOX, U64.pack(row.id))
        self._counts(row.queue)[row.state] -= 1

    def _counts(self, queue: int) -> list[int]:
        """Figures that are about to change."""
        self._changed.add(queue)
        return self.queue(queue).counts

    def close(self) -> None:
        """Write figures and numbers that changed."""
        put = self.txn.put
        for number in self._changed:
            raw = self._queues[number].pack()
            put(Space.OUTBOX_QUEUE, FIGURES_PREFIX + U64.pack(number), raw)
        if self._is_counted:
            put(Space.OUTBOX_QUEUE, ENDS_KEY, self.ends.pack())

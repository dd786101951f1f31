"""Reading the outbox; see storage.outbox.OutboxReads."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from storage.errors import MessageDamaged
from storage.kv import U64, Space
from storage.outbox.books import body_of, read_queue, row_of
from storage.outbox.rows import NAME_PREFIX, decode_audit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any

    from storage.kv import ReadTxn
    from storage.outbox.rows import Row
    from storage.outbox.vocabulary import AuditRecord, Backlog, Message

__all__ = ["Reads", "audit", "backlog", "dead_letters", "show"]


def _queues(txn: ReadTxn) -> list[int]:
    """Numbers of all queues, in the order of their names."""
    stop = bytes((NAME_PREFIX[0] + 1,))
    return [
        int.from_bytes(packed, "big")
        for _, packed in txn.scan(Space.OUTBOX_QUEUE, NAME_PREFIX, stop)
    ]


def backlog(txn: ReadTxn) -> list[Backlog]:
    """See storage.outbox.OutboxReads."""
    found: list[Backlog] = []
    for number in _queues(txn):
        rows = txn.scan(Space.OUTBOX_DUE, U64.pack(number), U64.pack(number + 1))
        first = next(iter(rows), None)
        oldest_due_ms = 0 if first is None else int.from_bytes(first[0][8:16], "big")
        found.append(read_queue(txn, number).backlog(oldest_due_ms))
    return found


def _readable(txn: ReadTxn, row: Row, queue: bytes) -> Message:
    """A message, without its body if that is damaged."""
    try:
        body = body_of(txn, row)
    except MessageDamaged:
        body = None
    return row.message(queue, body)


def dead_letters(txn: ReadTxn, queue: bytes, after: tuple[int, int], limit: int) -> list[Message]:
    """See storage.outbox.OutboxReads."""
    packed = txn.get(Space.OUTBOX_QUEUE, NAME_PREFIX + queue)
    if packed is None:
        return []
    dead = packed + b"\x01"
    start = dead + U64.pack(after[0]) + U64.pack(after[1] + 1)
    rows = txn.scan(Space.OUTBOX_ENDED, start, packed + b"\x02")
    found: list[Message] = []
    for key, _ in list(islice(rows, limit)):
        try:
            row = row_of(txn, int.from_bytes(key[-8:], "big"))
        except MessageDamaged:
            continue  # check() tells
        if row is not None:
            found.append(_readable(txn, row, queue))
    return found


def show(txn: ReadTxn, message_id: int) -> Message | None:
    """See storage.outbox.OutboxReads."""
    row = row_of(txn, message_id)
    if row is None:
        return None
    return row.message(read_queue(txn, row.queue).name, body_of(txn, row))


def audit(txn: ReadTxn, after: int, limit: int) -> list[AuditRecord]:
    """See storage.outbox.OutboxReads."""
    rows = txn.scan(Space.AUDIT, U64.pack(after + 1))
    records = (decode_audit(int.from_bytes(key, "big"), raw) for key, raw in rows)
    return list(islice((record for record in records if record is not None), limit))


class Reads:
    """storage.outbox.OutboxReads over something that runs a piece of work in a read transaction."""

    def __init__(self, read: Callable[[Callable[[ReadTxn], Any]], Awaitable[Any]]) -> None:
        self._read = read

    async def backlog(self) -> list[Backlog]:
        found: list[Backlog] = await self._read(backlog)
        return found

    async def dead_letters(
        self, queue: bytes, after: tuple[int, int] = (0, 0), limit: int = 100
    ) -> list[Message]:
        found: list[Message] = await self._read(lambda txn: dead_letters(txn, queue, after, limit))
        return found

    async def show(self, message_id: int) -> Message | None:
        found: Message | None = await self._read(lambda txn: show(txn, message_id))
        return found

    async def audit(self, after: int = 0, limit: int = 100) -> list[AuditRecord]:
        found: list[AuditRecord] = await self._read(lambda txn: audit(txn, after, limit))
        return found

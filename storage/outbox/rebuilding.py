"""What a repair (storage.repair) makes of an outbox: sound rows go on, all that leads to them anew.

A row that is damaged: the message is left out; whoever holds it is refused.
A body that is damaged, missing or does not open: the message becomes a dead letter without a body
    (UNREADABLE), so that an operator sees what was lost; one that was dead keeps its state.
Figures, numbers, indexes: derived again. A queue whose name cannot be told is called by its number.
An audit record that is damaged is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from storage.blocks import Damage, decode_message
from storage.errors import MessageDamaged
from storage.kv import U64, Space
from storage.meta import MetaDamaged
from storage.outbox.books import Books
from storage.outbox.moves import LIVE, Failure, State
from storage.outbox.rows import (
    ENDS_KEY,
    FIGURES_PREFIX,
    NAME_PREFIX,
    Ends,
    Queue,
    Row,
    decode_audit,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage.kv import Database, WriteTxn
    from storage.salvage import Salvage

__all__ = ["rebuild_outbox"]

BATCH_ROWS: Final = 1000
BATCH_BYTES: Final = 4 << 20
"""Written in one transaction."""


def rebuild_outbox(source: Salvage, target: Database, say: Callable[[str], None]) -> None:
    """Fill the outbox of ``target``, which is empty. say: is told what was lost."""
    _Outbox(source, target, say).run()


class _Outbox:
    """One repair. ends: above every number that is known. batch: (row, its body)."""

    def __init__(self, source: Salvage, target: Database, say: Callable[[str], None]) -> None:
        self.source = source
        self.target = target
        self.say = say
        self.ends = Ends()
        self.names: dict[int, bytes] = {}
        self.batch: list[tuple[Row, bytes]] = []
        self.batch_bytes = 0

    def run(self) -> None:
        """Names first: a message is put under its queue."""
        self._read_queues()
        for packed_id, raw in self.source.rows(Space.OUTBOX):
            self._message(int.from_bytes(packed_id, "big"), raw)
        self._write_messages()
        audit = self._read_audit()

        def work(txn: WriteTxn) -> None:
            for key, raw in audit:
                txn.put(Space.AUDIT, key, raw)
            txn.put(Space.OUTBOX_QUEUE, ENDS_KEY, self.ends.pack())

        if self.ends.queue > 1 or audit:
            self.target.write(work)

    def _read_queues(self) -> None:
        ends = self.ends
        for key, raw in self.source.rows(Space.OUTBOX_QUEUE):
            kind, rest = key[:1], key[1:]
            if key == ENDS_KEY:
                try:
                    self.ends = ends = Ends.unpack(raw)
                except MetaDamaged:
                    self.say("the ends of the outbox are damaged: no number is given again")
            elif kind == NAME_PREFIX:
                self.names[int.from_bytes(raw, "big")] = rest
            elif kind == FIGURES_PREFIX:
                number = int.from_bytes(rest, "big")
                try:
                    self.names[number] = Queue.unpack(number, raw).name
                except MetaDamaged:
                    self.say(f"the figures of queue {number} of the outbox are damaged")
        ends.queue = max([ends.queue, *(number + 1 for number in self.names)])

    def _name(self, queue: int) -> bytes:
        if queue not in self.names:
            self.names[queue] = b"queue-%d" % queue
            self.say(f"the name of queue {queue} of the outbox is gone: it is queue-{queue} now")
        self.ends.queue = max(self.ends.queue, queue + 1)
        return self.names[queue]

    def _message(self, message_id: int, raw: bytes) -> None:
        self.ends.message = max(self.ends.message, message_id + 1)
        try:
            row = Row.unpack(message_id, raw)
        except MessageDamaged:
            self.say(f"message {message_id} of the outbox is damaged, left out")
            return
        self.ends.claim = max(self.ends.claim, row.claim + 1)
        body = self.source.get(Space.OUTBOX_BODY, U64.pack(message_id)) if row.has_body else None
        if body is not None:
            try:
                decode_message(body)
            except Damage:
                body = None
        if row.has_body and body is None:
            row = self._without_body(row)
        self.batch.append((row, body or b""))
        self.batch_bytes += len(raw) + len(body or b"")
        if len(self.batch) >= BATCH_ROWS or self.batch_bytes >= BATCH_BYTES:
            self._write_messages()

    def _without_body(self, row: Row) -> Row:
        self.say(f"the body of message {row.id} of the outbox is gone")
        if row.state not in LIVE:
            return row._replace(has_body=0)
        failure, ended_ms = Failure.UNREADABLE, max(row.created_ms, 1)
        return row._replace(
            state=State.DEAD, failure=failure, has_body=0, until_ms=0, ended_ms=ended_ms
        )

    def _write_messages(self) -> None:
        batch, self.batch, self.batch_bytes = self.batch, [], 0

        def work(txn: WriteTxn) -> None:
            books = Books(txn)
            for row, body in batch:
                books.restore(row.queue, self._name(row.queue))
                books.put(row, None)
                if row.has_body:
                    txn.put(Space.OUTBOX_BODY, U64.pack(row.id), body)
            books.close()

        if batch:
            self.target.write(work)

    def _read_audit(self) -> list[tuple[bytes, bytes]]:
        sound: list[tuple[bytes, bytes]] = []
        for key, raw in self.source.rows(Space.AUDIT):
            number = int.from_bytes(key, "big")
            self.ends.audit = max(self.ends.audit, number + 1)
            if decode_audit(number, raw) is None:
                self.say(f"audit record {number} is damaged, left out")
            else:
                sound.append((key, raw))
        return sound

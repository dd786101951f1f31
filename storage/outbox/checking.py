"""Every invariant of the outbox, for storage.check.

Each index is compared with what it stands for both ways: every row by which a message should be
found is looked up (rows.indexes), and there are no more rows than were looked up.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from storage.errors import MessageDamaged
from storage.kv import U64, Space
from storage.meta import MetaDamaged
from storage.outbox.books import body_of, read_ends
from storage.outbox.moves import LIVE, State
from storage.outbox.rows import (
    ENDS_KEY,
    FIGURES_PREFIX,
    NAME_PREFIX,
    NO_KEY,
    Queue,
    Row,
    decode_audit,
    indexes,
)
from storage.sealing import is_sealed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from storage.kv import ReadTxn
    from storage.outbox.rows import Ends

__all__ = ["check_outbox"]

_INDEXES: Final = (
    Space.OUTBOX_DUE,
    Space.OUTBOX_LEASE,
    Space.OUTBOX_EXPIRY,
    Space.OUTBOX_ENDED,
    Space.OUTBOX_KEY,
)


def check_outbox(txn: ReadTxn) -> Iterator[str]:
    """One sentence for each violation."""
    try:
        ends = read_ends(txn)
    except MetaDamaged as damage:
        yield f"the database cannot be told: {damage}"
        return
    walk = _Walk(txn, ends)
    for packed_id, raw in txn.scan(Space.OUTBOX):
        message_id = int.from_bytes(packed_id, "big")
        try:
            row = Row.unpack(message_id, raw)
        except MessageDamaged:
            walk.is_sound = False
            yield f"message {message_id} of the outbox is damaged"
            continue
        for sentence in walk.one(row):
            yield f"message {message_id} of the outbox: {sentence}"
    yield from walk.totals()
    yield from _audit(txn, ends)


class _Walk:
    """All messages. rows: space -> how many rows they account for. counts: by queue and state.
    is_sound: every message could be read, so that totals mean something."""

    def __init__(self, txn: ReadTxn, ends: Ends) -> None:
        self.txn = txn
        self.ends = ends
        self.rows: Counter[Space] = Counter()
        self.counts: Counter[tuple[int, State]] = Counter()
        self.is_sound = True

    def one(self, row: Row) -> Iterator[str]:
        """A message, and all that leads to it."""
        self.counts[row.queue, row.state] += 1
        self.rows[Space.OUTBOX_BODY] += row.has_body
        if row.id >= self.ends.message:
            yield "its id is to be given again"
        if row.claim >= self.ends.claim:
            yield "its claim is to be given again"
        is_live = row.state in LIVE
        if (row.ended_ms == 0) != is_live or (row.until_ms > 0) != (row.state is State.CLAIMED):
            yield f"it is {row.state.name.lower()}, and its times say something else"
        if row.state is State.CLAIMED and row.claim == 0:
            yield "it is claimed under no claim"
        if is_live and not row.has_body:
            yield "it is to be sent and has no body"
        if row.has_body and not is_live and row.state is not State.DEAD:
            yield "it has ended and has a body"
        if row.key != NO_KEY and row.state is State.REISSUED:
            yield "it was reissued and has a key"
        try:
            if not is_sealed(self.txn.get(Space.OUTBOX_BODY, U64.pack(row.id)) or b""):
                body_of(self.txn, row)
        except MessageDamaged:
            yield "its body is damaged"
        for (space, key), value in indexes(row).items():
            self.rows[space] += 1
            if self.txn.get(space, key) != value:
                yield f"its row of kind {space.name.lower()} is missing"

    def totals(self) -> Iterator[str]:
        """What leads to no message, and the figures."""
        if self.is_sound:
            for space in (Space.OUTBOX_BODY, *_INDEXES):
                found = sum(1 for _ in self.txn.scan(space))
                if found != self.rows[space]:
                    name = space.name.lower()
                    yield f"{found} rows of kind {name}, messages have {self.rows[space]}"
        names: dict[int, bytes] = {}
        counted: Counter[tuple[int, State]] = Counter()
        for key, raw in self.txn.scan(Space.OUTBOX_QUEUE):
            kind, rest = key[:1], key[1:]
            if kind == FIGURES_PREFIX:
                yield from self._figures(int.from_bytes(rest, "big"), raw, names, counted)
            elif kind == NAME_PREFIX:
                if self.txn.get(Space.OUTBOX_QUEUE, FIGURES_PREFIX + raw) is None:
                    yield f"a queue of the outbox has the number {raw.hex()}, and no figures"
            elif key != ENDS_KEY:
                yield "a row of kind outbox_queue is none"
        if self.is_sound and +counted != +self.counts:
            yield "the figures of the outbox are not those of its messages"

    def _figures(
        self, number: int, raw: bytes, names: dict[int, bytes], counted: Counter[tuple[int, State]]
    ) -> Iterator[str]:
        try:
            queue = Queue.unpack(number, raw)
        except MetaDamaged as damage:
            self.is_sound = False
            yield str(damage)
            return
        names[number] = queue.name
        for state, count in zip(State, queue.counts, strict=True):
            counted[number, state] = count
        if number >= self.ends.queue:
            yield f"the number of queue {number} is to be given again"
        if self.txn.get(Space.OUTBOX_QUEUE, NAME_PREFIX + queue.name) != U64.pack(number):
            yield f"queue {number} of the outbox is not found by its name"


def _audit(txn: ReadTxn, ends: Ends) -> Iterator[str]:
    for key, raw in txn.scan(Space.AUDIT):
        number = int.from_bytes(key, "big")
        if decode_audit(number, raw) is None:
            yield f"audit record {number} is damaged"
        if number >= ends.audit:
            yield f"the number of audit record {number} is to be given again"

"""Building a sound database out of what is left of a damaged one.

Nothing is mended in place: every row that is as it was written goes into a new file, byte by byte,
and everything that can be derived (indexes, counts, orders) is derived again. The damaged files
are kept as they are. So a repair cannot make damage worse, and whatever was left out is still
there for whoever wants to look at it.

What becomes of damage:

An entry of a block: a *gravestone* takes its offset, and its topic's mark rises to it. Sessions
    that had not had it are told 410.
The table of a block: entries that are sound stay; the others as above, for each topic of the block.
A block, damaged or missing: gravestones; the marks of the topics that the index names for it rise,
    or the coarse floor where it does not know them. At the old end the floor rises instead.
Record, subscription, claim or held message of a session: the session is left out, and is told
    Session Present = 0.
A retained message, a will: it is left out, and the operator is told.
Messages of the outbox: see storage.outbox.rebuilding.
An index, a count, an order: derived again. A mark and its order that differ: the higher one.
Identity or ends: from the sidecar, and above every offset that is known; a new generation, so that
    every session is told 409.
The whole file: a new database that goes on above every offset that the sidecar knows. There are no
    sessions in it: each is told Session Present = 0.

A gravestone is an entry that no filter can match: so offsets stay gapless, and a reader that lost
nothing passes it. The mark it leaves is above the floor, which only a repair does
(storage.retention); it tells every position below it, a session's or another's, that an entry of
this topic is gone, before CONNACK. A delivery that is under way of an entry that is gone is below
the mark too; where the session has no longer a filter that matches, it is told when the entry is
fetched (EntryGone). So no session that is sound by itself is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from storage.api import HELD, RECEIVED, Loss
from storage.blocks import Damage, decode_message
from storage.consumers import loss_of, put_anew
from storage.errors import RecordDamaged
from storage.history import History
from storage.identity import mint, new_identity
from storage.kv import U64, ReadTxn, Space, WriteTxn
from storage.mending import OWN, Blocks, Losses, LostError, Piece, Session, session_of
from storage.meta import Ends, Identity, MetaDamaged, read_ends, read_identity
from storage.names import KEPT_BYTES, key_of
from storage.outbox.rebuilding import rebuild_outbox
from storage.records import (
    Record,
    decode_will,
)
from storage.salvage import Salvage

if TYPE_CHECKING:
    from storage.identity import Sidecar
    from storage.kv import Database

__all__ = ["Repaired", "Reset", "rebuild"]

BATCH_BYTES: Final = 4 << 20
BATCH_CONSUMERS: Final = 200
"""Written in one transaction."""

LISTED_MAX: Final = 1000
"""Sentences of one kind that are told one by one."""


class Reset(NamedTuple):
    """A session that lost something. client_id: b"" = cannot be told; a long one may be cut.

    is_removed: its record was left out; else it is there, and its next CONNECT is told 410.
    """

    client_id: bytes
    reason: str
    is_removed: bool


@dataclass(slots=True)
class Repaired:
    """What a repair did. done: sentences. lost_entries: how many. minted: why a generation was, or
    "". identity, head: of the new database."""

    done: list[str] = field(default_factory=list)
    resets: list[Reset] = field(default_factory=list)
    lost_entries: int = 0
    minted: str = ""
    identity: Identity = field(default_factory=new_identity)
    head: int = 0

    def say(self, sentence: str) -> None:
        """Tell what was done, up to LISTED_MAX times."""
        if len(self.done) < LISTED_MAX:
            self.done.append(sentence)


def rebuild(source: Database | None, target: Database, sidecar: Sidecar | None) -> Repaired:
    """Fill ``target``, which was created and is empty, with what is sound in ``source``.

    source: None = it cannot be opened at all. sidecar: None = there is none that can be read.
    """
    return _Rebuild(Salvage(source), target, sidecar).run(is_lost=source is None)


class _Rebuild:
    """One repair."""

    def __init__(self, source: Salvage, target: Database, sidecar: Sidecar | None) -> None:
        self.source = source
        self.target = target
        self.sidecar = sidecar
        self.report = Repaired()
        self.losses = Losses(self.report.say)
        self.names: dict[bytes, bytes] = {}
        self.ends = Ends()
        self.old: Ends | None = None

    def run(self, *, is_lost: bool) -> Repaired:
        """All steps: what a later one needs to know of what is gone, an earlier one has found."""
        report = self.report
        if is_lost:
            report.say("the file cannot be opened, nothing of it could be read: it begins empty")
        self._identity()
        self.losses.coarse = self.ends.coarse
        self._read_marks()
        self.ends.coarse = self.losses.coarse
        records = self._records()
        history = History(report.identity, self.ends)
        self._write_history(history, records)
        self.ends = history.ends
        self._write_marks()
        self._write_sessions(records)
        self._write_messages()
        rebuild_outbox(self.source, self.target, report.say)
        report.head = self.ends.head
        report.lost_entries = sum(high - low + 1 for low, high in self.losses.gone)
        for gap in () if is_lost else self.source.gaps:
            report.say(f"rows of kind {gap.space.name.lower()} could not be read")
        return report

    # ------------------------------------------------------------------------ identity, marks

    def _identity(self) -> None:
        """Decide identity and ends."""
        report, sidecar = self.report, self.sidecar
        identity = self.source.read(_identity)
        self.old = self.source.read(_ends)
        if identity is None:
            report.minted = "its identity was damaged"
            report.say("the identity is damaged: a new generation")
            if sidecar is not None:
                report.identity = Identity(sidecar.db_id, sidecar.generation, sidecar.boot)
            report.identity = mint(report.identity)
        elif self.old is None:
            report.minted = "its ends were damaged"
            report.say("the ends of the history are damaged: a new generation")
            report.identity = mint(identity)
        else:
            report.identity = identity
        if self.old is not None:  # what is counted here anew begins anew, the rest stays
            self.ends = replace(
                self.old,
                head=0,
                floor=0,
                coarse=min(self.old.coarse, self.old.head),
                indexed=0,
                next_topic=1,
                marks=0,
                blocks=0,
                bytes=0,
            )

    def _read_marks(self) -> None:
        """Marks by name, the higher one where a mark and its place in the order differ."""
        self.names = dict(self.source.rows(Space.TOPIC_NAME))
        found: dict[bytes, int] = {}
        for packed_id, packed in self.source.rows(Space.MARK):
            found[packed_id] = int.from_bytes(packed, "big")
        for key, _ in self.source.rows(Space.MARK_ORDER):
            found[key[8:]] = max(found.get(key[8:], 0), int.from_bytes(key[:8], "big"))
        most = self.old.head if self.old else max(found.values(), default=0)
        for packed_id, mark in found.items():
            self.losses.mark(self.names.get(packed_id) or None, min(mark, most))
        if any(gap.space in {Space.MARK, Space.TOPIC_NAME} for gap in self.source.gaps):
            self.losses.mark(None, self.old.floor if self.old else most)

    def _write_marks(self) -> None:
        ends = self.ends
        marks = {t: m for t, m in self.losses.marks.items() if m > ends.coarse}

        def work(txn: WriteTxn) -> tuple[int, ...]:
            number = ends.next_topic
            for topic, mark in marks.items():
                packed_id = txn.get(Space.TOPIC, key_of(topic))
                if packed_id is None:
                    packed_id = U64.pack(number)
                    number += 1
                    txn.put(Space.TOPIC, key_of(topic), packed_id)
                    txn.put(Space.TOPIC_NAME, packed_id, topic)
                txn.put(Space.MARK, packed_id, U64.pack(mark))
                txn.put(Space.MARK_ORDER, U64.pack(mark) + packed_id, b"")
            done = Ends(*ends.values())
            done.next_topic, done.marks = number, len(marks)
            done.write(txn)
            self.report.identity.write(txn)
            return done.values()

        self.ends = Ends(*self.target.write(work))

    # -------------------------------------------------------------------------------- history

    def _write_history(self, history: History, records: dict[int, Record]) -> None:
        """Write the blocks, as many in a transaction as BATCH_BYTES takes."""
        head = self._least_head(records)
        batch: list[Piece] = []
        size = 0
        blocks = Blocks(self.source, self.old, self.losses, self.names, self.report.say)
        for piece in blocks.pieces(head):
            batch.append(piece)
            size += len(piece.raw)
            if size > BATCH_BYTES:
                self._append(history, batch, blocks.floor)
                batch, size = [], 0
        self._append(history, batch, blocks.floor)

    def _append(self, history: History, batch: list[Piece], floor: int) -> None:
        def work(txn: WriteTxn) -> None:
            history.aborted()
            ends = history.ends
            ends.floor, ends.coarse = floor, self.losses.coarse
            ends.head = max(ends.head, floor)
            for piece in batch:
                txn.put(Space.HISTORY, U64.pack(piece.first), piece.raw)
                ends.head = piece.last
                ends.blocks += 1
                ends.bytes += len(piece.raw)
                history.tail.add(piece.first, piece.topics, len(piece.raw))
                if history.tail.is_long():
                    history.tail.index(txn, ends)
            ends.write(txn)

        self.target.write(work)
        history.committed()

    def _least_head(self, records: dict[int, Record]) -> int:
        """The head, or what it cannot have been below: no offset is ever given again."""
        if self.old is not None:
            return self.old.head
        known = [self.losses.coarse, *self.losses.marks.values()]
        known += [record.cursor for record in records.values()]
        if self.sidecar is not None:
            known.append(self.sidecar.head)
        return max(known)

    # ------------------------------------------------------------------------------- sessions

    def _records(self) -> dict[int, Record]:
        """Sound records by id; those that are not are told as resets."""
        keys = {int.from_bytes(i, "big"): key for key, i in self.source.rows(Space.CLIENT)}
        found: dict[int, Record] = {}
        for packed_id, raw in self.source.rows(Space.CONSUMER):
            number = int.from_bytes(packed_id, "big")
            try:
                found[number] = Record.unpack(number, raw)
            except RecordDamaged:
                self._reset(_client_of(keys.get(number, b"")), "its record was damaged")
        known = {key_of(record.client_id) for record in found.values()}
        reported = {reset.client_id for reset in self.report.resets}
        for number, key in keys.items():
            if number not in found and key not in known and _client_of(key) not in reported:
                self._reset(_client_of(key), "its record was missing")
        owners: dict[bytes, int] = {}
        for number, record in sorted(found.items()):
            other = owners.setdefault(record.client_id, number)
            if other != number:
                named_id = next((i for i in (other, number) if keys.get(i) is not None), number)
                dropped = other if named_id == number else number
                owners[record.client_id] = named_id
                self.report.say(f"consumer {dropped} has a client id twice, and is left out")
                del found[dropped]
        top = max([*found, *keys, 0]) + 1
        self.ends.next_consumer = max(self.ends.next_consumer, top)
        return found

    def _reset(self, client_id: bytes, reason: str, *, is_removed: bool = True) -> None:
        self.report.resets.append(Reset(client_id, reason, is_removed))

    def _write_sessions(self, records: dict[int, Record]) -> None:
        suspects = self._suspects(records)
        batch: list[Session] = []
        for record in records.values():
            if any(low <= record.id <= high for low, high in suspects):
                self._reset(record.client_id, "some of its rows could not be read")
                continue
            try:
                batch.append(session_of(self.source, record))
            except LostError as lost:
                self._reset(record.client_id, str(lost))
            if len(batch) == BATCH_CONSUMERS:
                self._write_batch(batch)
                batch = []
        self._write_batch(batch)

    def _suspects(self, records: dict[int, Record]) -> list[tuple[int, int]]:
        """Ids of consumers that may have lost rows: (low, high). Counts rows of nobody, too."""
        orphans = 0
        for space in OWN:
            for key, _ in self.source.rows(space):
                orphans += int.from_bytes(key[:8], "big") not in records
        if orphans:
            self.report.say(f"{orphans} rows belong to no session that is there, and are left out")
        return [
            (
                int.from_bytes(gap.after[:8], "big"),
                (1 << 64) - 1 if gap.before is None else int.from_bytes(gap.before[:8], "big"),
            )
            for gap in self.source.gaps
            if gap.space in OWN
        ]

    def _write_batch(self, batch: list[Session]) -> None:
        """Tell who lost what is gone, and write those who are there."""
        losses = self.target.read(
            lambda txn: [
                loss_of(txn, self.ends, session.record, session.subscriptions, session.claims)
                for session in batch
            ]
        )
        for session, loss in zip(batch, losses, strict=True):
            self._tell(session, loss)

        def work(txn: WriteTxn) -> None:
            for session in batch:
                for space, key, value in session.rows:
                    txn.put(space, key, value)
                put_anew(txn, session.record, session.subscriptions)

        self.target.write(work)

    def _tell(self, session: Session, loss: Loss | None) -> None:
        """Tell what a session that stays has lost."""
        client_id = session.record.client_id
        if loss is not None:
            reason = f"history it had not had is gone, through {loss.pruned_through}"
            self._reset(client_id, reason, is_removed=False)
            return
        for claim in session.claims:
            for delivery in claim.deliveries:
                if not delivery.state & (HELD | RECEIVED) and self.losses.holds(delivery.offset):
                    reason = f"entry {delivery.offset}, under way to it, is gone"
                    self._reset(client_id, reason, is_removed=False)
                    return

    # ------------------------------------------------------------------------ single messages

    def _write_messages(self) -> None:
        """Retained messages and wills, and the ends once more, which are whole now."""
        rows: list[tuple[Space, bytes, bytes]] = []
        for row, (key, raw) in enumerate(self.source.rows(Space.RETAINED)):
            try:
                message = decode_message(raw)
            except Damage:
                name = _client_of(key).decode(errors="replace")
                self.report.say(f"retained message {row} of topic {name!r} is damaged, left out")
                continue
            if message.payload:
                rows.append((Space.RETAINED, key_of(message.topic), raw))
        for row, (incarnation, raw) in enumerate(self.source.rows(Space.WILL)):
            try:
                decode_will(incarnation, raw)
            except RecordDamaged:
                self.report.say(f"will {row} is damaged, left out")
                continue
            rows.append((Space.WILL, incarnation, raw))

        def work(some: list[tuple[Space, bytes, bytes]], txn: WriteTxn) -> None:
            for space, key, value in some:
                txn.put(space, key, value)
            self.ends.write(txn)

        for at in range(0, len(rows) + 1, 1000):
            self.target.write(partial(work, rows[at : at + 1000]))


def _client_of(key: bytes) -> bytes:
    """The name behind a key; of a long one its beginning."""
    if len(key) > KEPT_BYTES:
        return key[:KEPT_BYTES] + b"..."
    return key.rstrip(b"\x00")


def _identity(txn: ReadTxn) -> Identity | None:
    try:
        return read_identity(txn)
    except MetaDamaged:
        return None


def _ends(txn: ReadTxn) -> Ends | None:
    try:
        return read_ends(txn)
    except MetaDamaged:
        return None

"""Sealing everything that is stored with the current key, a step at a time.

A step is one transaction in the writer's thread: it looks at up to STEP_BYTES of rows, in the order
of spaces and keys, writes those anew that are not sealed as they would be sealed now, and remembers
where it is. So it goes on beside traffic, and after a crash from where it was. Rows that are
written meanwhile are sealed with the current key already, so one pass is enough; when it is over,
in the transaction that says so, the other keys are forgotten: the database opens without them.

    META b"rekey"   u16 number of the key, u8 1 = with names, u8 space, key of the last row

A row that does not open stays as it is, which is damaged with any key, and is counted.

``storage.rewriting.rekey`` does it to a database that nobody serves, by writing a new file: so that
nothing of what was sealed otherwise, or not at all, is left in the free space of the old one.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from storage.kv import U64, Space
from storage.meta import read_ends
from storage.sealing import NAMED, SEALED_NAMES, SEALED_ROWS

if TYPE_CHECKING:
    from storage.kv import Database, ReadTxn, WriteTxn
    from storage.sealing import Seals

__all__ = ["STEP_BYTES", "STEP_ROWS", "Resealed", "Resealing", "finish", "following", "reseal"]

STEP_BYTES: Final = 1 << 20
STEP_ROWS: Final = 500
"""Looked at in one step: a commit beside it waits for some milliseconds."""

_REKEY_ROW: Final = b"rekey"
_POSITION: Final = Struct(">HBB")

_ORDER: Final = tuple(space for space in Space if space in SEALED_ROWS | SEALED_NAMES | NAMED)


@dataclass(frozen=True, slots=True)
class Resealing:
    """One step. looked_at, written, unreadable: rows. space: where it is. through: of that space,
    0.0..1.0, about. is_done: every row was looked at. key_ids: what is needed now."""

    looked_at: int
    written: int
    unreadable: int
    space: str
    through: float
    is_done: bool
    key_ids: tuple[str, ...]


class _Position(NamedTuple):
    """After this row, b"" = at the beginning of the space."""

    space: Space
    key: bytes


def reseal(database: Database, seals: Seals) -> tuple[Resealing, Seals]:
    """Do one step; what is to be sealed with from now on. database: the one that is wrapped."""
    return database.write(lambda txn: _Step(txn, seals).run())


def finish(txn: WriteTxn, seals: Seals) -> Seals:
    """Every row was looked at: what is to be sealed with from now on."""
    txn.delete(Space.META, _REKEY_ROW)
    return seals.finished(txn)


def following(space: Space, key: bytes) -> bytes:
    """The lowest key after ``key``; keys of the history are numbers."""
    if not key:
        return b""
    if space is Space.HISTORY:
        return U64.pack(min(int.from_bytes(key, "big") + 1, (1 << 63) - 1))
    return key + b"\x00"


class _Step:
    """One transaction."""

    def __init__(self, txn: WriteTxn, seals: Seals) -> None:
        self.txn = txn
        self.seals = seals
        self.head = (seals.current.number, int(seals.has_names))
        self.looked_at = self.written = self.unreadable = 0

    def run(self) -> tuple[Resealing, Seals]:
        space, key = self._position()
        rows, is_end = self._rows(space, following(space, key))
        for row_key, raw in rows:
            if self.seals.needs(space, row_key, raw):
                self._write(space, row_key, raw)
        last = rows[-1][0] if rows else key
        through = 1.0 if is_end else _through(self.txn, space, last)
        if not is_end:
            self._save(_Position(space, last))
            return self._told(space, through), self.seals
        later = _ORDER[_ORDER.index(space) + 1 :]
        if later:
            self._save(_Position(later[0], b""))
            return self._told(space, through), self.seals
        done = finish(self.txn, self.seals)
        return self._told(space, through, done), done

    def _told(self, space: Space, through: float, done: Seals | None = None) -> Resealing:
        return Resealing(
            self.looked_at,
            self.written,
            self.unreadable,
            space.name.lower(),
            through,
            is_done=done is not None,
            key_ids=tuple((done or self.seals).key_ids),
        )

    def _position(self) -> _Position:
        """Where the last step ended, if it was with the same key."""
        raw = self.txn.get(Space.META, _REKEY_ROW) or b""
        if len(raw) >= _POSITION.size:
            number, names, space = _POSITION.unpack_from(raw)
            if (number, names) == self.head and space in _ORDER:
                return _Position(Space(space), raw[_POSITION.size :])
        return _Position(_ORDER[0], b"")

    def _save(self, position: _Position) -> None:
        head = _POSITION.pack(*self.head, position.space)
        self.txn.put(Space.META, _REKEY_ROW, head + position.key)

    def _rows(self, space: Space, start: bytes) -> tuple[list[tuple[bytes, bytes]], bool]:
        """The next rows, and whether there are no more."""
        rows: list[tuple[bytes, bytes]] = []
        size = 0
        for row in self.txn.scan(space, start):
            if len(rows) == STEP_ROWS or size > STEP_BYTES:
                self.looked_at = len(rows)
                return rows, False
            rows.append(row)
            size += len(row[1])
        self.looked_at = len(rows)
        return rows, True

    def _write(self, space: Space, key: bytes, raw: bytes) -> None:
        row = _resealed(self.seals, space, key, raw)
        if row is None:
            self.unreadable += 1
            return
        if row[0] != key:
            self.txn.delete(space, key)
        self.txn.put(space, *row)
        self.written += 1


class Resealed:
    """What becomes of each row of a database that is copied. written, unreadable: so far."""

    def __init__(self, seals: Seals) -> None:
        self._seals = seals
        self.written = self.unreadable = 0

    def __call__(self, space: Space, key: bytes, raw: bytes) -> tuple[bytes, bytes]:
        if not self._seals.needs(space, key, raw):
            return key, raw
        row = _resealed(self._seals, space, key, raw)
        if row is None:
            self.unreadable += 1
            return key, raw
        self.written += 1
        return row


def _resealed(seals: Seals, space: Space, key: bytes, raw: bytes) -> tuple[bytes, bytes] | None:
    """A row as it would be written now; None if it does not open."""
    placed = seals.place(space, key)
    if space not in seals.sealed:
        return placed, raw
    value = seals.try_open(space, key, raw)
    return None if value is None else (placed, seals.seal(space, placed, value))


def _through(txn: ReadTxn, space: Space, key: bytes) -> float:
    """About how far a key is through its space. The history is nearly all there is."""
    if space is not Space.HISTORY:
        return 0.5
    ends = read_ends(txn)
    return (int.from_bytes(key, "big") - ends.floor) / max(1, ends.head - ends.floor)

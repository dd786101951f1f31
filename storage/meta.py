"""What a database says about itself: format, identity and the ends of its history.

Three rows in Space.META, each with a checksum of its own:

    b"format"    u32 FORMAT
    b"identity"  16s db_id, 16s generation, u64 boot
    b"ends"      u64 head, floor, coarse, indexed, next_topic, next_consumer, marks, blocks,
                 bytes, seen_ms
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Final
from zlib import crc32

from storage.api import LogState
from storage.kv import Space

if TYPE_CHECKING:
    from storage.kv import ReadTxn, WriteTxn

__all__ = ["FORMAT", "Ends", "Identity", "MetaDamaged", "read_ends", "read_format", "read_identity"]

FORMAT: Final = 3
"""Of what is stored; a database with a higher number was written by a newer version. 2: with an
outbox; one of 1 gets its spaces when it is opened (storage.kv). 3: consumers have ``qos0_after``,
wills a number; older ones are read as they are."""

_FORMAT_KEY: Final = b"format"
_IDENTITY_KEY: Final = b"identity"
_ENDS_KEY: Final = b"ends"
_CRC: Final = Struct(">I")
_FORMAT: Final = Struct(">I")
_IDENTITY: Final = Struct(">16s16sQ")
_ENDS: Final = Struct(">QQQQQQQQQQ")


class MetaDamaged(Exception):
    """A row is missing, or is not what was written."""


def _sealed(packed: bytes) -> bytes:
    return packed + _CRC.pack(crc32(packed))


def _opened(txn: ReadTxn, key: bytes, size: int) -> bytes:
    raw = txn.get(Space.META, key)
    if raw is None:
        raise MetaDamaged(f"its {key.decode()} is missing")
    if len(raw) != size + _CRC.size or raw != _sealed(raw[:size]):
        raise MetaDamaged(f"its {key.decode()} is damaged")
    return raw[:size]


@dataclass(frozen=True, slots=True)
class Identity:
    """db_id: for ever. generation: random, see storage.identity. boot: openings. Hex digits."""

    db_id: str
    generation: str
    boot: int

    def write(self, txn: WriteTxn) -> None:
        """Put the identity, and the format it is written in."""
        packed = _IDENTITY.pack(
            bytes.fromhex(self.db_id), bytes.fromhex(self.generation), self.boot
        )
        txn.put(Space.META, _FORMAT_KEY, _sealed(_FORMAT.pack(FORMAT)))
        txn.put(Space.META, _IDENTITY_KEY, _sealed(packed))


@dataclass(slots=True)
class Ends:
    """The numbers of the history that every commit may change. Unit: entries, 0 = none.

    coarse: nothing at or below it is promised of topics that were forgotten.
    indexed: the index by topic knows every block up to here (storage.topics).
    next_topic, next_consumer: the ids to be given next. marks, blocks: rows there are.
    bytes: of all blocks. seen_ms: the latest time of a batch, to about SEEN_MS.
    """

    head: int = 0
    floor: int = 0
    coarse: int = 0
    indexed: int = 0
    next_topic: int = 1
    next_consumer: int = 1
    marks: int = 0
    blocks: int = 0
    bytes: int = 0
    seen_ms: int = 0

    def values(self) -> tuple[int, ...]:
        """All of them, in the order they are stored in."""
        return (
            self.head,
            self.floor,
            self.coarse,
            self.indexed,
            self.next_topic,
            self.next_consumer,
            self.marks,
            self.blocks,
            self.bytes,
            self.seen_ms,
        )

    def write(self, txn: WriteTxn) -> None:
        """Put the row."""
        txn.put(Space.META, _ENDS_KEY, _sealed(_ENDS.pack(*self.values())))

    def log(self, identity: Identity) -> LogState:
        """As the outside sees it."""
        return LogState(
            identity.db_id, identity.generation, identity.boot, self.head, self.floor, self.bytes
        )


def read_format(txn: ReadTxn) -> int:
    """Raises MetaDamaged."""
    (number,) = _FORMAT.unpack(_opened(txn, _FORMAT_KEY, _FORMAT.size))
    return int(number)


def read_identity(txn: ReadTxn) -> Identity:
    """Raises MetaDamaged."""
    db_id, generation, boot = _IDENTITY.unpack(_opened(txn, _IDENTITY_KEY, _IDENTITY.size))
    return Identity(db_id.hex(), generation.hex(), boot)


def read_ends(txn: ReadTxn) -> Ends:
    """Raises MetaDamaged."""
    return Ends(*_ENDS.unpack(_opened(txn, _ENDS_KEY, _ENDS.size)))

"""What is stored of a message, of a queue, and of an audit record, as bytes. All big-endian.

    OUTBOX        +0    u8 version = 1, u8 state, u8 failure, u8 body = 1 if there is one
                  +4    u16 attempts, u16 attempts_max,
                  +8    u64 queue, created_ms, due_ms, until_ms, ended_ms, expires_ms, offset,
                        claim, reissue_of, reissued_as,
                  +88   16s worker, 16s key, 16s supersede key (zeros = none),
                  +136  destination, u32 crc
    OUTBOX_BODY   a message (storage.blocks); its origin and properties are in it
    OUTBOX_QUEUE  at b"q", number: u8 version = 1, u64 messages in each of the seven states, name,
                  u32 crc; at b"e": u8 version = 1, u64 next message, claim, queue, audit record,
                  u32 crc; at b"n", name: u64 number
    AUDIT         u8 version = 1, u64 at_ms, message id, new id, u8 queue_bytes, queue, actor,
                  u32 crc

Each crc is a CRC-32 of what stands before it, begun with the number in its key. A row has no body,
topic or key in it, so it may stay when they are erased.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from storage.errors import MessageDamaged
from storage.kv import U64, Space
from storage.meta import MetaDamaged
from storage.outbox.moves import LIVE, Failure, State
from storage.outbox.vocabulary import AuditRecord, Backlog, Message

if TYPE_CHECKING:
    from storage.api import Entry

__all__ = [
    "ENDS_KEY",
    "FIGURES_PREFIX",
    "NAME_PREFIX",
    "NO_KEY",
    "Ends",
    "Queue",
    "Row",
    "decode_audit",
    "encode_audit",
    "indexes",
]

_VERSION: Final = 1
_MASK: Final = 0xFFFFFFFF
_CRC: Final = Struct(">I")
_ROW: Final = Struct(">BBBBHHQQQQQQQQQQ16s16s16s")
_QUEUE: Final = Struct(">B7Q")
_ENDS: Final = Struct(">BQQQQ")
_AUDIT: Final = Struct(">BQQQB")
_DUE: Final = Struct(">QQQ")
_ENDED: Final = Struct(">QBQQ")

NO_KEY: Final = bytes(16)
"""Stands for a key or a worker that is not there."""

ENDS_KEY: Final = b"e"
NAME_PREFIX: Final = b"n"
FIGURES_PREFIX: Final = b"q"
"""Of Space.OUTBOX_QUEUE."""


def _sealed(packed: bytes, begun: int) -> bytes:
    return packed + _CRC.pack(crc32(packed, begun & _MASK))


def _opened(raw: bytes, begun: int, size_min: int) -> bytes | None:
    """What a crc stands behind, None if it is damaged."""
    packed = raw[:-4]
    if len(packed) < size_min or packed[0] != _VERSION or _sealed(packed, begun) != raw:
        return None
    return packed


class Row(NamedTuple):
    """A message as the writer works on it: a value, so that a move is a new one.

    queue: its number. has_body: 0 or 1. worker, key, supersede: NO_KEY = none.
    """

    id: int
    state: State
    failure: Failure
    has_body: int
    attempts: int
    attempts_max: int
    queue: int
    created_ms: int
    due_ms: int
    until_ms: int
    ended_ms: int
    expires_ms: int
    offset: int
    claim: int
    reissue_of: int
    reissued_as: int
    worker: bytes
    key: bytes
    supersede: bytes
    destination: bytes

    def pack(self) -> bytes:
        """As stored."""
        return _sealed(_ROW.pack(_VERSION, *self[1:19]) + self.destination, self.id)

    @classmethod
    def unpack(cls, message_id: int, raw: bytes) -> Row:
        """Raises MessageDamaged."""
        packed = _opened(raw, message_id, _ROW.size)
        if packed is None:
            raise MessageDamaged(message_id)
        _, state, failure, *rest = _ROW.unpack_from(packed)
        try:
            moves = State(state), Failure(failure)
        except ValueError:  # of a later version, behind a crc that is right
            raise MessageDamaged(message_id) from None
        return cls._make((message_id, *moves, *rest, packed[_ROW.size :]))

    def message(self, queue: bytes, body: Entry | None) -> Message:
        """As the outside sees it."""
        return Message(
            self.id,
            queue,
            self.state,
            body,
            self.offset,
            self.destination,
            self.attempts,
            self.attempts_max,
            self.created_ms,
            self.due_ms,
            self.until_ms,
            self.ended_ms,
            self.failure,
            self.worker if self.claim else b"",
            self.claim,
            self.reissue_of,
            self.reissued_as,
        )


def indexes(row: Row) -> dict[tuple[Space, bytes], bytes]:
    """Every row by which a message is found, with its value: the one place that says so."""
    packed_id = U64.pack(row.id)
    found: dict[tuple[Space, bytes], bytes] = {}
    if row.state is State.WAITING:
        found[Space.OUTBOX_DUE, _DUE.pack(row.queue, row.due_ms, row.id)] = b""
        if row.expires_ms:
            found[Space.OUTBOX_EXPIRY, U64.pack(row.expires_ms) + packed_id] = b""
    elif row.state is State.CLAIMED:
        found[Space.OUTBOX_LEASE, U64.pack(row.until_ms) + packed_id] = b""
    else:
        key = _ENDED.pack(row.queue, row.state is State.DEAD, row.ended_ms, row.id)
        found[Space.OUTBOX_ENDED, key] = b""
    packed_queue = U64.pack(row.queue)
    if row.key != NO_KEY:
        found[Space.OUTBOX_KEY, packed_queue + b"i" + row.key] = packed_id
    if row.supersede != NO_KEY and row.state in LIVE:
        found[Space.OUTBOX_KEY, packed_queue + b"s" + row.supersede] = packed_id
    return found


class Queue:
    """The figures of a queue. counts: messages in each State."""

    __slots__ = ("counts", "name", "number")

    def __init__(self, name: bytes, number: int, counts: list[int] | None = None) -> None:
        self.name = name
        self.number = number
        self.counts = counts or [0] * len(State)

    def pack(self) -> bytes:
        """As stored."""
        return _sealed(_QUEUE.pack(_VERSION, *self.counts) + self.name, self.number)

    @classmethod
    def unpack(cls, number: int, raw: bytes) -> Queue:
        """Raises MetaDamaged."""
        packed = _opened(raw, number, _QUEUE.size)
        if packed is None:
            raise MetaDamaged(f"the figures of queue {number} of its outbox are damaged")
        _, *counts = _QUEUE.unpack_from(packed)
        return cls(packed[_QUEUE.size :], number, counts)

    def backlog(self, oldest_due_ms: int) -> Backlog:
        """As the outside sees it."""
        return Backlog._make((self.name, *self.counts, oldest_due_ms))


class Ends:
    """The numbers to be given next."""

    __slots__ = ("audit", "claim", "message", "queue")

    def __init__(self, message: int = 1, claim: int = 1, queue: int = 1, audit: int = 1) -> None:
        self.message = message
        self.claim = claim
        self.queue = queue
        self.audit = audit

    def next(self, kind: str) -> int:
        """Take the next number of a kind."""
        number: int = getattr(self, kind)
        setattr(self, kind, number + 1)
        return number

    def pack(self) -> bytes:
        """As stored."""
        return _sealed(_ENDS.pack(_VERSION, self.message, self.claim, self.queue, self.audit), 0)

    @classmethod
    def unpack(cls, raw: bytes) -> Ends:
        """Raises MetaDamaged."""
        packed = _opened(raw, 0, _ENDS.size)
        if packed is None or len(packed) != _ENDS.size:
            raise MetaDamaged("the ends of its outbox are damaged")
        return cls(*_ENDS.unpack(packed)[1:])


def encode_audit(record: AuditRecord) -> bytes:
    """As stored; its number is the key."""
    numbers = record.at_ms, record.message_id, record.new_id
    head = _AUDIT.pack(_VERSION, *numbers, len(record.queue))
    return _sealed(head + record.queue + record.actor, record.number)


def decode_audit(number: int, raw: bytes) -> AuditRecord | None:
    """None if it is damaged."""
    packed = _opened(raw, number, _AUDIT.size)
    if packed is None:
        return None
    _, at_ms, message_id, new_id, queue_bytes = _AUDIT.unpack_from(packed)
    split = _AUDIT.size + queue_bytes
    return AuditRecord(
        number, at_ms, packed[split:], packed[_AUDIT.size : split], message_id, new_id
    )

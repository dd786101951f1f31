"""Ordered key-value transactions: all that a backend has to offer.

Every operation of the store is written once, over these few calls. So a promise has one
implementation and backends differ only in the bytes on their disk.

Rule 1. Keys are not empty and at most KEY_BYTES_MAX long (LMDB keys end at 511 bytes). They sort
        as bytes; numbers in them are big-endian.
Rule 2. A scan is finished or dropped before its space is written to.
Rule 3. A transaction is used in the thread that made it.
"""

from __future__ import annotations

from enum import IntEnum, unique
from struct import Struct
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "FIRST_FORMAT_SPACES",
    "KEY_BYTES_MAX",
    "U64",
    "U64_U16",
    "U64_U64",
    "Database",
    "ReadTxn",
    "Space",
    "WriteTxn",
    "get_u64",
]

T = TypeVar("T")

KEY_BYTES_MAX: Final = 511
"""LMDB's compiled-in maximum; SQLite has none."""

U64: Final = Struct(">Q")
U64_U64: Final = Struct(">QQ")
U64_U16: Final = Struct(">QH")


FIRST_FORMAT_SPACES: Final = 19
"""Spaces from here on came with a later format: an older database gets them when it is opened."""


@unique
class Space(IntEnum):
    """The key spaces, with key -> value of each. Numbers are stored: never give one again.

    Names stand for topics, client ids and filters as ``storage.names.key_of`` shortens them.
    """

    META = 0
    """b"format", b"identity", b"ends" -> see storage.meta"""
    HISTORY = 1
    """first offset u64 -> block (storage.blocks)"""
    TOPIC_INDEX = 2
    """topic id u64, first offset u64 -> positions in the block u16..., empty = all"""
    TOPIC = 3
    """name -> topic id u64"""
    TOPIC_NAME = 4
    """topic id u64 -> topic"""
    MARK = 5
    """topic id u64 -> last pruned offset of the topic u64"""
    MARK_ORDER = 6
    """last pruned offset u64, topic id u64 -> nothing"""
    CLIENT = 7
    """name -> consumer id u64"""
    CONSUMER = 8
    """consumer id u64 -> record (storage.records)"""
    SUBSCRIPTION = 9
    """consumer id u64, hash of the filter -> subscription"""
    FILTER = 10
    """name -> count u64, filter: distinct filters of subscriptions with QoS >= 1"""
    CLAIM = 11
    """consumer id u64, claim number u64 -> deliveries"""
    HELD = 12
    """consumer id u64, number u64 -> message"""
    INBOUND = 13
    """consumer id u64, packet id u16 -> nothing"""
    POSITION = 14
    """position u64, consumer id u64 -> nothing: lower bounds of what consumers need"""
    EXPIRY = 15
    """deadline_ms u64, consumer id u64 -> nothing: detached consumers that expire"""
    ATTACHED = 16
    """consumer id u64 -> nothing: consumers whose owner is there"""
    RETAINED = 17
    """name -> message"""
    WILL = 18
    """incarnation -> will"""
    OUTBOX = 19
    """message id u64 -> row (storage.outbox.rows)"""
    OUTBOX_BODY = 20
    """message id u64 -> message, while it may be sent or reissued"""
    OUTBOX_QUEUE = 21
    """b"n", name of a queue -> its number u64; b"q", number u64 -> its figures; b"e" -> the numbers
    to be given next"""
    OUTBOX_DUE = 22
    """queue u64, due_ms u64, message id u64 -> nothing: waiting"""
    OUTBOX_LEASE = 23
    """until_ms u64, message id u64 -> nothing: claimed"""
    OUTBOX_EXPIRY = 24
    """expires_ms u64, message id u64 -> nothing: waiting, with a deadline"""
    OUTBOX_ENDED = 25
    """queue u64, u8 1 = dead, ended_ms u64, message id u64 -> nothing"""
    OUTBOX_KEY = 26
    """queue u64, b"i" or b"s", hash of the key -> message id u64: who has the idempotency key; the
    live one of a supersede key"""
    AUDIT = 27
    """number u64 -> audit record (storage.outbox.rows)"""


class ReadTxn(Protocol):
    """One state of the database, as it was committed when the transaction began."""

    @property
    def hides_names(self) -> bool:
        """Rows of TOPIC, RETAINED, FILTER and SUBSCRIPTION may not be in the order of the names
        they are found by (storage.sealing)."""
        ...

    def place(self, space: Space, key: bytes) -> bytes:
        """Where the row of ``key`` stands among those that ``scan`` gives; where names are not
        hidden, that is the key itself."""
        ...

    def get(self, space: Space, key: bytes) -> bytes | None:
        """The value at ``key``, or None."""
        ...

    def scan(
        self,
        space: Space,
        start: bytes = b"",
        stop: bytes | None = None,
        *,
        reverse: bool = False,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Rows with start <= key < stop in key order, or from the last one down."""
        ...


class WriteTxn(ReadTxn, Protocol):
    """Changes that are committed together; reads see them at once."""

    def put(self, space: Space, key: bytes, value: bytes) -> None:
        """Insert or replace."""
        ...

    def delete(self, space: Space, key: bytes) -> bool:
        """Delete; whether it was there."""
        ...


class Database(Protocol):
    """An open database file. ``write`` is called in one thread, ``read`` in another."""

    def write(self, work: Callable[[WriteTxn], T], *, frees: bool = False) -> T:
        """Run ``work`` in a transaction and commit it; if anything raises, nothing changed.

        ``work`` may be run again from the start after its transaction was given up (LMDB map
        growth), so it puts its own state back first. frees: it makes room, and may use a reserve.
        Raises StoreFull, StoreUnavailable, and what ``work`` raises.
        """
        ...

    def read(self, work: Callable[[ReadTxn], T]) -> T:
        """Run ``work`` in a read transaction. Raises StoreUnavailable, and what it raises."""
        ...

    def scrub(self) -> None:
        """Leave as little as can be of rows that were replaced or deleted. In the writer's thread;
        nothing depends on it."""
        ...

    def close(self) -> None:
        """Close the file. Nothing may be running."""
        ...


def get_u64(txn: ReadTxn, space: Space, key: bytes) -> int | None:
    """The number at ``key``, or None."""
    value = txn.get(space, key)
    return None if value is None else int.from_bytes(value, "big")

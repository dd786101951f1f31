"""Blocks of history, and single messages, as bytes.

A block is what one commit appended, at most BLOCK_ENTRIES_MAX entries and about BLOCK_BYTES_MAX
bytes; its key is its first offset. All numbers are big-endian.

    +0   u8   version = 1
    +1   u8   flags = 0 (kept for sealed payloads)
    +2   u16  entries, 1..512
    +4   u64  stored_ms
    +12  u32  names_bytes
    +16  u32  names_crc: CRC-32 of bytes 0..15 and the names, begun with the first offset
    +20  u32  table_crc: CRC-32 of the table, begun with the first offset
    +24  names, one after the other: u16 length, bytes. Topics and origins, each once.
    ...  table, one row of 13 bytes for each entry:
         +0   u32  body_bytes
         +4   u32  crc: CRC-32 of the body, begun with offset ^ origin ^ topic << 8 ^ bits << 24
         +8   u8   bits: 0-1 QoS, 2 RETAINED, 4 has expires_ms, 5 has properties
         +9   u16  topic: number of the name
         +11  u16  origin: number of the name, 0xffff = none
    ...  bodies, one after the other:
         u64 expires_ms if bit 4; u32 length and properties if bit 5; payload

Rows stand apart from bodies so that one ``struct`` call packs or unpacks them all.

What a flipped bit does. In a body or its crc: that entry is damaged. In the table: table_crc
tells, and then every entry is checked by its own crc, which covers its row; bodies are found from
both ends, so that a wrong length takes no other entry with it. In the header or the names: the
topics cannot be trusted, so the whole block is damaged. A block that was moved to another offset
fails all of it. A crc is checked just before the entry is handed out, and costs one call.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, islice
from struct import Struct
from struct import error as StructError  # noqa: N812 - it is a class
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias
from zlib import crc32

from storage.api import BLOCK_BYTES_MAX, BLOCK_ENTRIES_MAX, Entry

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "GRAVESTONE",
    "Block",
    "Damage",
    "Encoded",
    "decode_message",
    "encode_block",
    "encode_message",
]

_Row: TypeAlias = tuple[int, int, int, int, int]

_HEAD: Final = Struct(">BBHQI")
_CRCS: Final = Struct(">II")
_ROW: Final = Struct(">IIBHH")
_U16: Final = Struct(">H")
_U32: Final = Struct(">I")
_U64: Final = Struct(">Q")
_NAMES_AT: Final = _HEAD.size + _CRCS.size

_VERSION: Final = 1
_NONE: Final = 0xFFFF
_QOS: Final = 0x03
_FLAGS: Final = 0x04
_HAS_EXPIRY: Final = 0x10
_HAS_PROPERTIES: Final = 0x20
_MASK: Final = 0xFFFFFFFF


GRAVESTONE: Final = b"$\x00gone"
"""Topic of an entry that stands where a damaged one was (storage.repair). It begins with $, so that
no wildcard of the first level matches it, and has a NUL, so that no filter is equal to it
[MQTT-4.7.2-1, MQTT-4.7.3-2]: nobody receives it, and who asks for it by its offset is told."""


class Damage(Exception):
    """What was read is not what was written. offset: of the entry, 0 = the whole block."""

    def __init__(self, offset: int = 0) -> None:
        super().__init__(offset)
        self.offset = offset


@lru_cache(maxsize=BLOCK_ENTRIES_MAX)
def _rows(count: int) -> Struct:
    return Struct(">" + "IIBHH" * count)


class Encoded(NamedTuple):
    """A block that was encoded. taken: how many of the entries are in it."""

    raw: bytes
    taken: int
    topics: list[bytes]


def _body(entry: Entry) -> tuple[bytes, int]:
    """The body of an entry that has more than a payload, and its bits."""
    parts: list[bytes] = []
    bits = entry.qos | entry.flags
    if entry.expires_ms:
        bits |= _HAS_EXPIRY
        parts.append(_U64.pack(entry.expires_ms))
    if entry.properties:
        bits |= _HAS_PROPERTIES
        parts += (_U32.pack(len(entry.properties)), entry.properties)
    return b"".join((*parts, entry.payload)), bits


def encode_block(entries: Sequence[Entry], start: int, stored_ms: int) -> Encoded:
    """Encode a block of entries[start:], as many as it takes, at least one.

    The hot path of an append: one turn of the loop for each entry, with the names of the entry
    before taken over when they are the same objects.
    """
    first = entries[start].offset
    names: dict[bytes, int] = {}
    table: list[int] = []
    bodies: list[bytes] = []
    last_topic = last_origin = None
    last_bits = -1
    topic = mix = 0
    origin = _NONE
    room = BLOCK_BYTES_MAX
    for entry in islice(entries, start, start + BLOCK_ENTRIES_MAX):
        offset, name, body, qos, flags, client, expires_ms, properties = entry
        bits = qos | flags
        if expires_ms or properties:
            body, bits = _body(entry)
        size = len(body)
        room -= size
        if room < 0 and bodies:
            break
        if name is not last_topic or client is not last_origin or bits != last_bits:
            topic = names.setdefault(name, len(names))
            origin = names.setdefault(client, len(names)) if client else _NONE
            mix = origin ^ topic << 8 ^ bits << 24
            last_topic, last_origin, last_bits = name, client, bits
        table += (size, crc32(body, (offset ^ mix) & _MASK), bits, topic, origin)
        bodies.append(body)
    count = len(bodies)
    packed_names = b"".join([_U16.pack(len(name)) + name for name in names])
    packed_table = _rows(count).pack(*table)
    head = _HEAD.pack(_VERSION, 0, count, stored_ms, len(packed_names))
    begun = first & _MASK
    crcs = _CRCS.pack(crc32(packed_names, crc32(head, begun)), crc32(packed_table, begun))
    raw = b"".join((head, crcs, packed_names, packed_table, *bodies))
    known = list(names)
    return Encoded(raw, count, [known[topic] for topic in set(table[3::5])])


class Block:
    """A block that was read. Entries are decoded, and checked, one by one.

    Raises Damage when the header or the names are damaged: nothing in it can be told then.
    """

    __slots__ = (
        "_bodies_at",
        "_ends",
        "_positions",
        "_raw",
        "_rows",
        "count",
        "first",
        "is_sound",
        "names",
        "stored_ms",
    )

    def __init__(self, first: int, raw: bytes) -> None:
        try:
            version, _, count, stored_ms, names_bytes = _HEAD.unpack_from(raw)
            names_crc, table_crc = _CRCS.unpack_from(raw, _HEAD.size)
        except StructError:
            raise Damage from None
        table_at = _NAMES_AT + names_bytes
        bodies_at = table_at + count * _ROW.size
        names = raw[_NAMES_AT:table_at]
        begun = first & _MASK
        if (
            version != _VERSION
            or bodies_at > len(raw)
            or crc32(names, crc32(raw[: _HEAD.size], begun)) != names_crc
        ):
            raise Damage
        self.first = first
        self.count: int = count
        self.stored_ms: int = stored_ms
        self.names = _split(names)
        self.is_sound = crc32(raw[table_at:bodies_at], begun) == table_crc
        """The rows are as written: an entry that is not asked for need not be looked at."""
        self._raw = raw
        self._bodies_at: int = bodies_at
        self._rows: list[_Row] = []
        self._ends: list[int] = []
        self._positions: dict[bytes, list[int]] = {}

    @property
    def last(self) -> int:
        """Offset of the last entry."""
        return self.first + self.count - 1

    def rows(self) -> list[_Row]:
        """The table: (body_bytes, crc, bits, topic, origin) of each entry."""
        if not self._rows:
            table = self._raw[self._bodies_at - self.count * _ROW.size : self._bodies_at]
            self._rows = list(_ROW.iter_unpack(table))
            sizes = (row[0] for row in self._rows)
            self._ends = list(accumulate(sizes, initial=self._bodies_at))
        return self._rows

    def positions(self) -> dict[bytes, list[int]]:
        """Topic -> where its entries are, in order, as the table says. Worth it for a block that
        several look into, each for topics of its own."""
        if not self._positions:
            found: dict[int, list[int]] = {}
            for position, row in enumerate(self.rows()):
                found.setdefault(row[3], []).append(position)
            names = self.names
            self._positions = {names[n]: at for n, at in found.items() if n < len(names)}
        return self._positions

    def entry(self, position: int) -> Entry:
        """Decode an entry. Raises Damage with its offset."""
        size, crc, bits, topic, origin = self.rows()[position]
        offset = self.first + position
        begun = (offset ^ origin ^ topic << 8 ^ bits << 24) & _MASK
        at = self._ends[position]
        body = self._raw[at : at + size]
        if crc32(body, begun) != crc or len(body) != size:
            at += len(self._raw) - self._ends[-1]  # as found from the end
            body = self._raw[at : at + size] if at >= 0 else b""
            if crc32(body, begun) != crc or len(body) != size:
                raise Damage(offset)
        try:
            name = self.names[topic]
            client = b"" if origin == _NONE else self.names[origin]
            if bits <= _QOS | _FLAGS:
                return Entry(offset, name, body, bits & _QOS, bits & _FLAGS, client)
            entry = Entry(offset, name, b"", bits & _QOS, bits & _FLAGS, client)
            return _unpack(body, bits, entry)
        except (IndexError, StructError):
            raise Damage(offset) from None

    def is_promised(self, position: int) -> bool:
        """Whether an entry has QoS >= 1, as a table says that is sound."""
        return self.rows()[position][2] & _QOS > 0

    def topics(self) -> set[bytes]:
        """Topics of its entries; if the table is damaged, all names that may be one."""
        if not self.is_sound:
            return set(self.names)
        return {self.names[row[3]] for row in self.rows()}

    def last_of_topics(self, through: int, now_ms: int = 0) -> dict[bytes, int]:
        """Topic -> its last offset at or below ``through``; never too low, if damage hides it.

        Of entries that somebody was promised: with QoS >= 1, not expired at ``now_ms``. 0 = none.
        """
        if not self.is_sound:
            return dict.fromkeys(self.names, min(through, self.last))
        rows = self.rows()[: max(0, through + 1 - self.first)]
        if all(row[2] & _QOS and not row[2] & (_HAS_EXPIRY if now_ms else 0) for row in rows):
            return {self.names[row[3]]: offset for offset, row in enumerate(rows, start=self.first)}
        found: dict[bytes, int] = {}
        for position, row in enumerate(rows):
            topic = self.names[row[3]]
            is_over = now_ms and row[2] & _HAS_EXPIRY and self._is_over(position, now_ms)
            if is_over or not row[2] & _QOS:
                found.setdefault(topic, 0)
            else:
                found[topic] = self.first + position
        return found

    def _is_over(self, position: int, now_ms: int) -> bool:
        try:
            return self.entry(position).expires_ms <= now_ms
        except Damage:
            return False  # nobody can tell

    @property
    def raw_bytes(self) -> int:
        """As stored."""
        return len(self._raw)

    @property
    def body_bytes(self) -> int:
        """Of all entries."""
        return len(self._raw) - self._bodies_at


def _split(packed: bytes) -> list[bytes]:
    names: list[bytes] = []
    at = 0
    while at < len(packed):
        start = at + 2
        at = start + (packed[at] << 8 | packed[at + 1])
        names.append(packed[start:at])
    return names


def _unpack(body: bytes, bits: int, entry: Entry) -> Entry:
    """Take a body that has more than a payload apart."""
    expires_ms = at = 0
    properties = b""
    if bits & _HAS_EXPIRY:
        (expires_ms,) = _U64.unpack_from(body)
        at = _U64.size
    if bits & _HAS_PROPERTIES:
        (size,) = _U32.unpack_from(body, at)
        at += _U32.size + size
        properties = body[at - size : at]
    return entry._replace(payload=body[at:], expires_ms=expires_ms, properties=properties)


# A message by itself (retained, held, will): a block of one, without the block's key.


def encode_message(message: Entry) -> bytes:
    """A message by itself, as a block of one entry with offset 0."""
    return encode_block((message._replace(offset=0),), 0, 0).raw


def decode_message(raw: bytes) -> Entry:
    """Raises Damage."""
    return Block(0, raw).entry(0)

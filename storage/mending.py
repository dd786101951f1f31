"""What is left of the parts of a damaged database: blocks without a gap, a session that is whole.

``storage.repair`` has the rules. Nothing is written here.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from storage.api import BLOCK_ENTRIES_MAX, GROUP, HELD, Claim, Entry, Subscription
from storage.blocks import GRAVESTONE, Block, Damage, decode_message, encode_block
from storage.consumers import needs, rows_of
from storage.errors import RecordDamaged
from storage.kv import U64, U64_U16, U64_U64, ReadTxn, Space
from storage.records import Record, decode_claim, decode_subscription, encode_claim
from storage.topics import UNKNOWN, named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from storage.meta import Ends
    from storage.salvage import Salvage

__all__ = ["OWN", "Blocks", "Losses", "LostError", "Piece", "Session", "session_of"]

OWN = (Space.SUBSCRIPTION, Space.CLAIM, Space.HELD, Space.INBOUND)
"""Where the rows of a session are, beside its record."""


class Losses:
    """What is gone of the history, as it is found. marks: topic -> last offset of it that is gone.
    coarse: the same of any topic. gone: (low, high) of entries. say: is told each."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.marks: dict[bytes, int] = {}
        self.coarse = 0
        self.gone: list[tuple[int, int]] = []
        self._say = say

    def mark(self, topic: bytes | None, offset: int) -> None:
        """An entry is gone. topic: None = of any topic."""
        if topic is None:
            self.coarse = max(self.coarse, offset)
        else:
            self.marks[topic] = max(self.marks.get(topic, 0), offset)

    def lose(self, low: int, high: int) -> None:
        """Entries are gone."""
        if low == high:
            self._say(f"entry {low} is gone")
        else:
            self._say(f"entries {low} to {high} are gone")
        if self.gone and self.gone[-1][1] == low - 1:
            low = self.gone.pop()[0]
        self.gone.append((low, high))

    def holds(self, offset: int) -> bool:
        """Whether an entry is among those that are gone."""
        at = bisect_right(self.gone, (offset, 1 << 64)) - 1
        return at >= 0 and offset <= self.gone[at][1]


class Piece(NamedTuple):
    """A block to be written."""

    first: int
    last: int
    raw: bytes
    topics: tuple[bytes, ...]


class Blocks:
    """The blocks of a history, without a gap. old: its ends, None = they were damaged. names: topic
    ids -> names. floor: found by ``pieces``."""

    def __init__(
        self,
        source: Salvage,
        old: Ends | None,
        losses: Losses,
        names: Mapping[bytes, bytes],
        say: Callable[[str], None],
    ) -> None:
        self.floor = 0
        self._source = source
        self._old = old
        self._losses = losses
        self._names = names
        self._say = say
        self._stored_ms = 0

    def pieces(self, head: int) -> Iterator[Piece]:
        """Blocks from the floor to the head without a gap. Finds the floor, and what is gone."""
        old = self._old
        self.floor = old.floor if old is not None else 0
        expected = self.floor + 1
        is_first = True
        for key, raw in self._source.rows(Space.HISTORY):
            first = int.from_bytes(key, "big")
            pieces = self._sound(first, raw)
            if pieces is None:
                continue  # its place is a hole
            last = pieces[-1].last
            if last <= self.floor or (first < expected and not is_first):
                self._say(f"the block of {first} is in the way of another, and left out")
                continue
            if first > expected:
                if is_first and old is None:
                    self._losses.mark(None, first - 1)
                    self.floor = first - 1
                else:
                    yield from self._hole(expected, first - 1, is_oldest=is_first)
            is_first = False
            yield from pieces
            expected = last + 1
        if expected <= head:
            yield from self._hole(expected, head, is_oldest=is_first)

    def _sound(self, first: int, raw: bytes) -> list[Piece] | None:
        """A block as it is; or anew, with gravestones; None if nothing of it can be told."""
        try:
            block = Block(first, raw)
        except Damage:
            self._say(f"the block of {first} is damaged")
            return None
        self._stored_ms = block.stored_ms
        entries: list[Entry] = []
        lost = 0
        for position in range(block.count):
            try:
                entries.append(block.entry(position))
            except Damage:
                lost += 1
                entries.append(self._gravestone(block, position))
        if block.is_sound and not lost:
            topics = tuple(block.topics())
            return [Piece(first, block.last, raw, topics)]
        if not lost:
            self._say(f"the table of the block of {first} is damaged, its entries are not")
        return list(self._encoded(entries))

    def _gravestone(self, block: Block, position: int) -> Entry:
        offset = block.first + position
        topics: Iterable[bytes] = set(block.names)
        if block.is_sound:
            topics = [block.names[block.rows()[position][3]]]
        for topic in topics:
            if topic != GRAVESTONE:
                self._losses.mark(topic, offset)
        self._losses.lose(offset, offset)
        return Entry(offset, GRAVESTONE, b"", 1)

    def _hole(self, low: int, high: int, *, is_oldest: bool) -> Iterator[Piece]:
        """Entries that are gone with their blocks."""
        topics = self._topics_of(low, high)
        for topic in topics if topics is not None else (None,):
            self._losses.mark(topic, high)
        self._losses.lose(low, high)
        if is_oldest:
            self.floor = high
            return
        for start in range(low, high + 1, BLOCK_ENTRIES_MAX):
            stop = min(start + BLOCK_ENTRIES_MAX, high + 1)
            yield from self._encoded([Entry(n, GRAVESTONE, b"", 1) for n in range(start, stop)])

    def _encoded(self, entries: list[Entry]) -> Iterator[Piece]:
        at = 0
        while at < len(entries):
            first = entries[at].offset
            raw, count, topics = encode_block(entries, at, self._stored_ms)
            at += count
            yield Piece(first, entries[at - 1].offset, raw, tuple(topics))

    def _topics_of(self, low: int, high: int) -> set[bytes] | None:
        """Topics that the index names for blocks that are gone; None = it cannot tell."""
        if self._old is None or high > self._old.indexed:
            return None

        def work(txn: ReadTxn) -> set[int]:
            return {
                int.from_bytes(key[:8], "big")
                for key, packed in txn.scan(Space.TOPIC_INDEX)
                if any(low <= first <= high for first in named(key, packed))
            }

        numbers = self._source.read(work)
        if not numbers or UNKNOWN in numbers:
            return None
        topics = {self._names.get(U64.pack(number)) for number in numbers}
        known = {topic for topic in topics if topic is not None}
        return known if len(known) == len(topics) else None


class LostError(Exception):
    """Something of a session is gone. Its text says what."""


class Session(NamedTuple):
    """A session to be written. rows: of claims, held messages and inbound ids."""

    record: Record
    subscriptions: list[Subscription]
    claims: list[Claim]
    rows: list[tuple[Space, bytes, bytes]]


def session_of(source: Salvage, record: Record) -> Session:
    """A session with all that it has. Raises LostError."""
    rows = source.read(lambda txn: {space: list(rows_of(txn, space, record.id)) for space in OWN})
    if rows is None:
        raise LostError("its rows could not be read")
    number = record.id
    try:
        subs = [decode_subscription(number, raw) for _, raw in rows[Space.SUBSCRIPTION]]
        claims = [
            decode_claim(number, int.from_bytes(key, "big"), raw) for key, raw in rows[Space.CLAIM]
        ]
    except RecordDamaged:
        raise LostError("a subscription or a claim was damaged") from None
    held: list[tuple[int, bytes]] = []
    for key, raw in rows[Space.HELD]:
        try:
            decode_message(raw)
        except Damage:
            raise LostError("a message held for it was damaged") from None
        held.append((int.from_bytes(key, "big"), raw))
    if len([sub for sub in subs if needs(sub)]) != record.durable:
        raise LostError("a subscription was missing")
    if len({sub.filter for sub in subs}) != len(subs):
        raise LostError("a subscription was there twice")
    _must_fit(claims, {n for n, _ in held}, is_group=record.client_id.startswith(GROUP))
    record.next_claim = max([record.next_claim, *(claim.number + 1 for claim in claims)])
    record.next_held = max([record.next_held, *(n + 1 for n, _ in held)])
    if not 0 <= record.next_packet_id <= 0xFFFF:
        record.next_packet_id = 1
    inbound = [int.from_bytes(key, "big") for key, _ in rows[Space.INBOUND]]
    written = [
        (Space.CLAIM, U64_U64.pack(number, claim.number), encode_claim(number, claim))
        for claim in claims
    ]
    written += [(Space.HELD, U64_U64.pack(number, n), raw) for n, raw in held]
    written += [
        (Space.INBOUND, U64_U16.pack(number, packet_id), b"")
        for packet_id in inbound
        if 1 <= packet_id <= 0xFFFF
    ]
    return Session(record, subs, claims, written)


def _must_fit(claims: list[Claim], held: set[int], *, is_group: bool) -> None:
    """Deliveries that cannot be. Raises LostError."""
    deliveries = [delivery for claim in claims for delivery in claim.deliveries]
    ids = [(claim.member, d.packet_id) for claim in claims for d in claim.deliveries if d.packet_id]
    if len(set(ids)) != len(ids):
        raise LostError("two of its deliveries had one packet id")
    for delivery in deliveries:
        if delivery.state & HELD:
            if delivery.offset not in held:
                raise LostError("a message held for it was missing")
        elif delivery.offset == 0:
            raise LostError("a delivery was of no entry")
        if not 1 <= delivery.qos <= 2:
            raise LostError("a delivery could not be")
    if not is_group and len(ids) != len(deliveries):
        raise LostError("a delivery had no packet id")

"""The history: appending blocks with their index by topic, and reading them back.

A read costs what was missed, not what is stored. It is a walk over blocks in order, and there are
two ways to name the next block: the scan takes each one; the plan by topic takes those that the
index has for a matching topic. Both then do the same work on a block, so that the choice can
only cost time.

Rule 1. An entry that matches is handed out, or EntryDamaged is raised; it is never skipped.
        Where damage hides the topic of an entry, the index is asked whose it was; where that
        does not help it counts as matching.
Rule 2. ``accept`` is asked once for each topic and read.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from storage.api import Chunk, Entry
from storage.blocks import Block, Damage, encode_block, offsets_of
from storage.errors import EntryDamaged, EntryGone
from storage.kv import U64, U64_U64, ReadTxn, Space, WriteTxn
from storage.meta import Ends, read_ends
from storage.names import KEPT_BYTES, key_of, literal_prefix, topic_id
from storage.retention import Marks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from storage.api import Accept
    from storage.meta import Identity

__all__ = ["History", "fetch", "read"]

TOPICS_CACHED_MAX: Final = 65_536
"""Topics whose ids the writer knows without a look: about 10 MB of common topic names. A client
can invent a topic per message, so it is bounded; when it is full it starts again."""

SLICE_BYTES_MAX: Final = 4 << 20
"""Blocks read in one transaction: a longer search goes on in the next one, so that others get
their turn in the reader, and pages and write-ahead log are not held back."""

_INDEX_ROWS_MAX: Final = 4096
"""Rows of the index looked at in one round of the plan by topic."""
_LOOK_MAX: Final = 10_000
"""Topic names looked at under wildcards before the scan is taken to be cheaper."""
_LOOK_MIN: Final = 16


class History:
    """The writer's side of the history: what it knows without reading. One thread.

    Between ``committed`` and the next, everything here can be put back by ``aborted``.
    """

    __slots__ = ("_committed", "ends", "identity", "topics")

    def __init__(self, identity: Identity, ends: Ends) -> None:
        self.identity = identity
        self.ends = ends
        self.topics: dict[bytes, int] = {}
        self._committed = replace(ends)

    def is_changed(self) -> bool:
        """Whether the ends must be written before this transaction is committed."""
        return self.ends != self._committed

    def committed(self) -> None:
        """The transaction is on disk."""
        self._committed = replace(self.ends)

    def aborted(self) -> None:
        """The transaction is gone."""
        self.ends = replace(self._committed)
        self.topics.clear()

    def append(self, txn: WriteTxn, entries: Sequence[Entry], stored_ms: int) -> None:
        """Append entries that follow the head, in as many blocks as they need."""
        ends = self.ends
        at = 0
        while at < len(entries):
            first = entries[at].offset
            if first != ends.head + 1:
                msg = f"entry {first} cannot follow the head {ends.head}"
                raise AssertionError(msg)
            block = encode_block(entries, at, stored_ms)
            at += block.count
            last = entries[at - 1].offset
            if last != ends.head + block.count:
                msg = f"entries {first} to {last} have gaps"
                raise AssertionError(msg)
            txn.put(Space.HISTORY, U64.pack(first), block.raw)
            for topic, positions in block.positions.items():
                key = U64_U64.pack(self.topics.get(topic) or self._id_of(txn, topic), first)
                txn.put(Space.TOPIC_INDEX, key, positions)
            ends.head = last
            ends.blocks += 1

    def _id_of(self, txn: WriteTxn, topic: bytes) -> int:
        """The id of a topic; it gets one if it has none."""
        number = topic_id(txn, topic)
        if number is None:
            number = self.ends.next_topic
            self.ends.next_topic += 1
            packed = U64.pack(number)
            txn.put(Space.TOPIC, key_of(topic), packed)
            txn.put(Space.TOPIC_NAME, packed, topic)
        if len(self.topics) >= TOPICS_CACHED_MAX:
            self.topics.clear()
        self.topics[topic] = number
        return number


# ------------------------------------------------------------------------------------ reading


def first_block(txn: ReadTxn, offset: int) -> int:
    """First offset of the block that holds ``offset``, or of the next one; ``offset`` if none."""
    for key, _ in txn.scan(Space.HISTORY, stop=U64.pack(offset + 1), reverse=True):
        return int.from_bytes(key, "big")
    return offset


def read(
    txn: ReadTxn,
    after: int,
    accept: Accept,
    *,
    filters: Sequence[bytes],
    entries_max: int,
    bytes_max: int,
) -> Chunk:
    """One slice of a read (storage.api.Store.read): stops at SLICE_BYTES_MAX of blocks, too.

    So a chunk may be empty with ``through`` below the head: then the search is not over.
    """
    ends = read_ends(txn)
    granted: dict[bytes, int] = {}

    def grant(topic: bytes) -> int:
        if (qos := granted.get(topic)) is None:
            granted[topic] = qos = accept(topic)
        return qos

    loss = None
    if after < ends.floor:
        loss = Marks(txn, ends).loss(after, filters, lambda topic, _: not topic or grant(topic) > 0)
    start = max(after, ends.floor)
    if start >= ends.head:
        return Chunk([], ends.head, ends.head, loss)
    reading = _Reading(txn, ends, grant, start, entries_max, bytes_max)
    through = reading.run(_plan(txn, ends, start, grant, filters))
    return Chunk(reading.taken, through, ends.head, loss)


class _Reading:
    """The work on each block, whatever the plan.

    start: entries above it are wanted.
    """

    def __init__(
        self,
        txn: ReadTxn,
        ends: Ends,
        grant: Accept,
        start: int,
        entries_max: int,
        bytes_max: int,
    ) -> None:
        self.txn = txn
        self.ends = ends
        self.grant = grant
        self.start = start
        self.entries_max = entries_max
        self.bytes_left = bytes_max
        self.taken: list[tuple[Entry, int]] = []

    def run(self, blocks: Iterator[tuple[int, bytes | None]]) -> int:
        """Take entries; up to where everything was read."""
        read_bytes = 0
        for first, raw in blocks:
            if read_bytes > SLICE_BYTES_MAX:
                return first - 1
            if raw is None:
                self.look_into_damage(first, None)
                continue
            read_bytes += len(raw)
            if (stopped := self.take(first, raw)) is not None:
                return stopped
        return self.ends.head

    def take(self, first: int, raw: bytes) -> int | None:
        """Take what matches in a block. Where to stop, if the chunk is full."""
        try:
            block = Block(first, raw)
        except Damage:
            self.look_into_damage(first, None)
            return None
        qos_of = [self.grant(name) for name in block.names]
        if block.is_sound and not any(qos_of):
            return None
        rows = block.rows()
        for position in range(max(self.start + 1 - first, 0), block.count):
            topic = rows[position][3]
            if block.is_sound and not qos_of[topic]:
                continue
            try:
                entry = block.entry(position)
            except Damage as damage:
                if not block.is_sound:
                    self.look_into_damage(first, damage.offset)
                    continue
                raise EntryDamaged(damage.offset, block.names[topic]) from None
            if qos := self.grant(entry.topic):
                self.bytes_left -= len(entry.topic) + len(entry.payload)
                if self.taken and (len(self.taken) == self.entries_max or self.bytes_left < 0):
                    return entry.offset - 1
                self.taken.append((entry, qos))
        return None

    def look_into_damage(self, first: int, offset: int | None) -> None:
        """Raise EntryDamaged if what is damaged may match.

        offset: of the entry, None = any above ``start`` in the block.
        """
        known = False
        for topic, offsets in topics_in_block(self.txn, self.ends, first):
            hit = [o for o in offsets if (o > self.start if offset is None else o == offset)]
            known = known or bool(hit)
            if hit and self.grant(topic):
                raise EntryDamaged(hit[0], topic)
        if not known:
            raise EntryDamaged(offset or max(first, self.start + 1))


def topics_in_block(
    txn: ReadTxn, ends: Ends, first: int
) -> Iterator[tuple[bytes, list[int] | range]]:
    """What the index says about a damaged block: each topic in it with its offsets. Slow."""
    for key, _ in txn.scan(Space.HISTORY, start=U64.pack(first + 1)):
        last = int.from_bytes(key, "big") - 1
        break
    else:
        last = ends.head
    names = list(txn.scan(Space.TOPIC_NAME))
    for packed_id, topic in names:
        positions = txn.get(Space.TOPIC_INDEX, packed_id + U64.pack(first))
        if positions is not None:
            yield topic, offsets_of(first, last, positions)


# ----------------------------------------------------------------------------------- planning


def _plan(
    txn: ReadTxn, ends: Ends, start: int, grant: Accept, filters: Sequence[bytes]
) -> Iterator[tuple[int, bytes | None]]:
    """The blocks to read, in order: by topic if that is cheaper, else all of them."""
    missed = ends.head - start
    blocks = max(1, ends.blocks * missed // max(1, ends.head - ends.floor))
    if filters and blocks > 1:
        ids = _matching_topics(txn, filters, grant, max(_LOOK_MIN, min(blocks, _LOOK_MAX)))
        if ids is not None:
            return _by_topic(txn, ends, start, ids)
    return _scan(txn, ends, start)


def _matching_topics(
    txn: ReadTxn, filters: Sequence[bytes], grant: Accept, look_max: int
) -> list[int] | None:
    """Ids of the topics that match; None when more than ``look_max`` would have to be looked at."""
    looked = 0
    found: set[int] = set()
    for topic_filter in filters:
        prefix, is_exact = literal_prefix(topic_filter)
        if is_exact:
            looked += 1
            number = topic_id(txn, prefix)
            if number is not None and grant(prefix):
                found.add(number)
        else:
            start = prefix[:KEPT_BYTES]
            rows = txn.scan(Space.TOPIC, start, after_prefix(start))
            for key, packed_id in islice(rows, look_max - looked + 1):
                looked += 1
                name = key if len(key) <= KEPT_BYTES else txn.get(Space.TOPIC_NAME, packed_id)
                if name is not None and grant(name):
                    found.add(int.from_bytes(packed_id, "big"))
        if looked > look_max:
            return None
    return sorted(found)


def after_prefix(prefix: bytes) -> bytes | None:
    """The first key after all those that begin with ``prefix``; None = there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes((stem[-1] + 1,)) if stem else None


def _by_topic(
    txn: ReadTxn, ends: Ends, start: int, ids: Sequence[int]
) -> Iterator[tuple[int, bytes | None]]:
    """Blocks that the index has for any of these topics.

    Goes in rounds, up to where the index was read for each of the topics, so that no more than
    one cursor is open and no more than about _INDEX_ROWS_MAX rows are in memory.
    """
    at = first_block(txn, start + 1)
    rows_max = max(16, _INDEX_ROWS_MAX // max(1, len(ids)))
    while at <= ends.head:
        found: set[int] = set()
        horizon = ends.head
        for number in ids:
            rows = txn.scan(
                Space.TOPIC_INDEX, U64_U64.pack(number, at), U64_U64.pack(number, horizon + 1)
            )
            firsts = [int.from_bytes(key[8:], "big") for key, _ in islice(rows, rows_max)]
            found.update(firsts)
            if len(firsts) == rows_max:
                horizon = firsts[-1]
        for first in sorted(found):
            if first <= horizon:
                yield first, txn.get(Space.HISTORY, U64.pack(first))
        at = horizon + 1


def _scan(txn: ReadTxn, ends: Ends, start: int) -> Iterator[tuple[int, bytes | None]]:
    """Every block from the one that holds start + 1 on; a hole between two is damage."""
    expected = start + 1
    begin = first_block(txn, expected)
    for key, raw in txn.scan(Space.HISTORY, U64.pack(begin), U64.pack(ends.head + 1)):
        first = int.from_bytes(key, "big")
        if first > expected:
            yield expected, None
        yield first, raw
        expected = first + (raw[2] << 8 | raw[3])
    if expected <= ends.head:
        yield expected, None


# ------------------------------------------------------------------------------------ fetching


def fetch(txn: ReadTxn, offsets: Sequence[int]) -> list[Entry]:
    """The entries at these offsets, in the order asked. Raises EntryGone or EntryDamaged."""
    ends = read_ends(txn)
    found: dict[int, Entry] = {}
    block: Block | None = None
    for offset in sorted(set(offsets)):
        if not ends.floor < offset <= ends.head:
            raise EntryGone(offset)
        if block is None or offset > block.last:
            block = _block_with(txn, offset)
        try:
            found[offset] = block.entry(offset - block.first)
        except Damage:
            raise EntryDamaged(offset) from None
    return [found[offset] for offset in offsets]


def _block_with(txn: ReadTxn, offset: int) -> Block:
    first = first_block(txn, offset)
    raw = txn.get(Space.HISTORY, U64.pack(first))
    try:
        block = Block(first, raw or b"")
    except Damage:
        raise EntryDamaged(offset) from None
    if offset > block.last:
        raise EntryDamaged(offset)
    return block

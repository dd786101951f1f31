"""The history: appending blocks with their index by topic, and reading them back.

A read costs what was missed, not what is stored. It is a walk over blocks in order, and there are
two ways to name the next block: the scan takes each one; the plan by topic takes those that the
index has for a matching topic. Both then do the same work on a block, so that the choice can
only cost time.

Rule 1. An entry that matches is handed out, or EntryDamaged is raised; it is never skipped
        (but for one that is known to have QoS 0, which is promised to nobody). Where damage hides
        the topic of an entry, the index is asked whose it was; where that does not help it counts
        as matching.
Rule 2. ``accept`` is asked once for each topic and read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Final

from storage.api import Chunk, Entry
from storage.blocks import GRAVESTONE, Block, Damage, encode_block
from storage.errors import EntryDamaged, EntryGone
from storage.kv import U64, Space
from storage.meta import Ends, read_ends
from storage.names import literal_prefix, topic_id
from storage.retention import Marks
from storage.topics import (
    TAIL_BLOCKS_MAX,
    UNKNOWN,
    Matches,
    Tail,
    candidates,
    density,
    is_in,
    last_block_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from storage.api import Accept, Missed
    from storage.kv import ReadTxn, WriteTxn
    from storage.meta import Identity

__all__ = [
    "SHARED_BLOCKS_MAX",
    "SHARED_BYTES_MAX",
    "SLICE_BYTES_MAX",
    "History",
    "fetch",
    "first_block",
    "newest",
    "read",
    "topics_of",
]

SLICE_BYTES_MAX: Final = 4 << 20
"""Blocks read in one transaction: a longer search goes on in the next one, so that others get
their turn in the reader, and pages and write-ahead log are not held back."""

_DENSITY_MAX: Final = 0.5
"""Matching topics of an average block above which the scan is cheaper (storage.topics.density)."""

SHARED_BLOCKS_MAX: Final = 256
SHARED_BYTES_MAX: Final = 64 << 10
"""Blocks kept taken apart, and the largest of them: at most 16 MiB."""

_NAMES_FEW: Final = 3
"""Names in a block up to which its entries are looked at one by one: all of them match, or most."""

_LOOKS_PER_BLOCK: Final = 50
_LOOK_MAX: Final = 100_000
"""Topic names looked at under wildcards before the scan is taken to be cheaper: a look takes 2 us,
a block that nothing is taken from 100 us or more. A reader holds up the others for 0.2 s at most,
once: what matches is remembered."""
_TOPICS_PER_BLOCK: Final = 10
"""Matching topics for each block beyond which the scan is cheaper: rows of each are looked up."""


class History:
    """The writer's side of the history: what it knows without reading. One thread.

    What changed since ``committed`` is put back by ``aborted``.
    """

    __slots__ = ("_committed", "ends", "identity", "tail")

    def __init__(self, identity: Identity, ends: Ends) -> None:
        self.identity = identity
        self.ends = ends
        self.tail = Tail()
        self._committed = ends.values()

    def is_changed(self) -> bool:
        """Whether the ends must be written before this transaction is committed."""
        return self.ends.values() != self._committed

    def committed(self) -> None:
        """The transaction is on disk."""
        self._committed = self.ends.values()
        self.tail.committed()

    def aborted(self) -> None:
        """The transaction is gone."""
        self.ends = Ends(*self._committed)
        self.tail.aborted()

    def append(self, txn: WriteTxn, entries: Sequence[Entry], stored_ms: int) -> None:
        """Append entries that follow the head, in as many blocks as they need."""
        ends = self.ends
        at = 0
        while at < len(entries):
            first = entries[at].offset
            raw, count, topics = encode_block(entries, at, stored_ms)
            at += count
            last = entries[at - 1].offset
            if first != ends.head + 1 or last != ends.head + count:
                msg = f"entries {first} to {last} cannot follow the head {ends.head}"
                raise AssertionError(msg)
            txn.put(Space.HISTORY, U64.pack(first), raw)
            ends.head = last
            ends.blocks += 1
            ends.bytes += len(raw)
            self.tail.add(first, topics, len(raw))
            if self.tail.is_long():
                self.tail.index(txn, ends)


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
    missed: Missed | None = None,
    matches: Matches | None = None,
) -> Chunk:
    """One slice of a read (storage.api.Store.read): stops at SLICE_BYTES_MAX of blocks, too.

    So a chunk may be empty with ``through`` below the head: then the search is not over.
    matches: of this database, from one slice to the next.
    """
    ends = read_ends(txn)
    granted: dict[bytes, int] = {}

    def grant(topic: bytes) -> int:
        if (qos := granted.get(topic)) is None:
            granted[topic] = qos = accept(topic)
        return qos

    loss = None
    if after < ends.head:
        is_missed = missed or (lambda topic, _: not topic or grant(topic) > 0)
        loss = Marks(txn, ends).loss(after, filters, is_missed)
    start = max(after, ends.floor)
    if start >= ends.head:
        return Chunk([], ends.head, ends.head, loss)
    reading = _Reading(txn, ends, grant, start, entries_max, bytes_max, _exact(filters))
    through = reading.run(_plan(txn, ends, start, grant, filters, matches or Matches()))
    return Chunk(reading.taken, through, ends.head, loss)


def _exact(filters: Sequence[bytes]) -> Sequence[bytes] | None:
    """The topics that can match; None = not known."""
    literals = [literal_prefix(topic_filter) for topic_filter in filters]
    if literals and all(is_exact for _, is_exact in literals):
        return tuple({topic for topic, _ in literals})
    return None


@dataclass(slots=True)
class _Reading:
    """The work on each block, whatever the plan.

    start: entries above it are wanted. exact: the topics that can match, None = not known.
    """

    txn: ReadTxn
    ends: Ends
    grant: Accept
    start: int
    entries_max: int
    bytes_left: int
    exact: Sequence[bytes] | None
    taken: list[tuple[Entry, int]] = field(default_factory=list)

    def run(self, blocks: Iterator[tuple[int, Block | None]]) -> int:
        """Take entries; up to where everything was read."""
        read_bytes = 0
        for first, block in blocks:
            if read_bytes > SLICE_BYTES_MAX:
                return first - 1
            if block is None:
                self.look_into_damage(first)
                continue
            read_bytes += block.raw_bytes
            if (stopped := self.take(block)) is not None:
                return stopped
        return self.ends.head

    def take(self, block: Block) -> int | None:
        """Take what matches in a block. Where to stop, if the chunk is full."""
        if not block.is_sound:
            return self.take_what_is_sound(block)
        for position in self.matching(block):
            try:
                entry = block.entry(position)
            except Damage as damage:
                if not block.is_promised(position):
                    continue
                topic = block.names[block.rows()[position][3]]
                raise EntryDamaged(damage.offset, topic) from None
            if (stopped := self.took(entry, self.grant(entry.topic))) is not None:
                return stopped
        return None

    def matching(self, block: Block) -> Iterable[int]:
        """Where the entries that match are in a block whose table is sound, in order."""
        begin = max(self.start + 1 - block.first, 0)
        if len(block.names) <= _NAMES_FEW:
            qos_of = [self.grant(name) for name in block.names]
            if all(qos_of):
                return range(begin, block.count)
            if not any(qos_of):
                return ()
            rows = block.rows()
            return [at for at in range(begin, block.count) if qos_of[rows[at][3]]]
        positions = block.positions()
        exact = self.exact
        topics = positions if exact is None or len(exact) > len(positions) else exact
        found = [positions[name] for name in topics if name in positions and self.grant(name)]
        some = found[0] if len(found) == 1 else sorted(chain.from_iterable(found))
        return [at for at in some if at >= begin] if begin else some

    def take_what_is_sound(self, block: Block) -> int | None:
        """The same where the table is damaged: each entry says for itself what it is."""
        is_wanted = any(map(self.grant, block.names))
        for position in range(max(self.start + 1 - block.first, 0), block.count):
            try:
                entry = block.entry(position)
            except Damage as damage:
                if is_wanted:
                    raise EntryDamaged(damage.offset) from None
                continue
            qos = self.grant(entry.topic)
            if qos and (stopped := self.took(entry, qos)) is not None:
                return stopped
        return None

    def took(self, entry: Entry, qos: int) -> int | None:
        """Take an entry. Where to stop instead, if the chunk is full."""
        self.bytes_left -= len(entry.topic) + len(entry.payload)
        if self.taken and (len(self.taken) == self.entries_max or self.bytes_left < 0):
            return entry.offset - 1
        self.taken.append((entry, qos))
        return None

    def look_into_damage(self, first: int) -> None:
        """Raise EntryDamaged for a block that tells nothing, if it may have what matches."""
        offset = max(first, self.start + 1)
        if first > self.ends.indexed:
            raise EntryDamaged(offset)
        known = False
        for topic in topics_of(self.txn, first):
            known = True
            if topic == b"" or self.grant(topic):
                raise EntryDamaged(offset, topic)
        if not known:
            raise EntryDamaged(offset)


def topics_of(txn: ReadTxn, first: int) -> Iterator[bytes]:
    """What the index says about a block that tells nothing; b"" = any topic. Slow."""
    if is_in(txn, UNKNOWN, first):
        yield b""
    for packed_id, topic in list(txn.scan(Space.TOPIC_NAME)):
        if is_in(txn, int.from_bytes(packed_id, "big"), first):
            yield topic


# ----------------------------------------------------------------------------------- planning


def _plan(
    txn: ReadTxn,
    ends: Ends,
    start: int,
    grant: Accept,
    filters: Sequence[bytes],
    matches: Matches,
) -> Iterator[tuple[int, Block | None]]:
    """The blocks to read, in order: by topic if that is cheaper, else all of them.

    None stands for a block that is damaged as a whole, or missing.
    """
    missed = ends.head - start
    blocks = ends.blocks * missed // max(1, ends.head - ends.floor)
    if filters and blocks > TAIL_BLOCKS_MAX:
        look_max = min(blocks * _LOOKS_PER_BLOCK, _LOOK_MAX)
        ids = matches.of(txn, ends.next_topic, filters, grant, look_max)
        per_block = max(1.0, missed / blocks)
        if (
            ids is not None
            and len(ids) <= blocks * _TOPICS_PER_BLOCK
            and density(txn, ids, start + 1, per_block) < _DENSITY_MAX
        ):
            return _by_topic(txn, ends, start, ids)
    return _scan(txn, ends, start)


def _by_topic(
    txn: ReadTxn, ends: Ends, start: int, ids: Sequence[int]
) -> Iterator[tuple[int, Block | None]]:
    """Blocks that the index has for any of these topics, then the tail, which it does not know."""
    for first in candidates(txn, ids, first_block(txn, start + 1), ends.indexed):
        yield first, _block(first, txn.get(Space.HISTORY, U64.pack(first)))
    yield from _scan(txn, ends, max(start, ends.indexed))


def _block(first: int, raw: bytes | None) -> Block | None:
    raw = raw or b""
    try:
        return Block(first, raw) if len(raw) > SHARED_BYTES_MAX else _shared(first, raw)
    except Damage:
        return None


@lru_cache(maxsize=SHARED_BLOCKS_MAX)
def _shared(first: int, raw: bytes) -> Block:
    """A block, taken apart once for all who come to read it at the same time: when 500 sessions
    return at once, each looks through the same tail. It is found by its bytes, so it is what is
    on disk."""
    return Block(first, raw)


def _scan(txn: ReadTxn, ends: Ends, start: int) -> Iterator[tuple[int, Block | None]]:
    """Every block from the one that holds start + 1 on; a hole between two is damage."""
    expected = start + 1
    if expected > ends.head:
        return
    begin = first_block(txn, expected)
    for key, raw in txn.scan(Space.HISTORY, U64.pack(begin), U64.pack(ends.head + 1)):
        first = int.from_bytes(key, "big")
        if first > expected and expected:
            yield expected, None
        block = _block(first, raw)
        yield first, block
        expected = block.last + 1 if block else 0  # it cannot tell where it ends
    if 0 < expected <= ends.head:
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
            entry = block.entry(offset - block.first)
        except Damage:
            raise EntryDamaged(offset) from None
        if entry.topic == GRAVESTONE:
            raise EntryGone(offset)
        found[offset] = entry
    return [found[offset] for offset in offsets]


def newest(txn: ReadTxn, topics: Sequence[bytes]) -> list[int]:
    """The offset of the newest entry of each topic with QoS >= 1, 0 = there is none, or damage or a
    newer one with QoS 0 hides it."""
    ends = read_ends(txn)
    found: dict[bytes, int] = {}
    wanted = set(topics)
    for _, block in _scan(txn, ends, max(ends.floor, ends.indexed)):  # the tail has no index
        found.update(_last_of(block, wanted))
    for topic in wanted - found.keys():
        number = topic_id(txn, topic)
        if number is not None and (first := last_block_of(txn, number)):
            block = _block(first, txn.get(Space.HISTORY, U64.pack(first)))
            found.update(_last_of(block, {topic}))
    return [found.get(topic, 0) if found.get(topic, 0) > ends.floor else 0 for topic in topics]


def _last_of(block: Block | None, topics: set[bytes]) -> dict[bytes, int]:
    """Topic -> its last offset in a block; nothing of one that cannot be told for sure."""
    if block is None or not block.is_sound or topics.isdisjoint(block.names):
        return {}
    last = block.last_of_topics(block.last)
    return {topic: offset for topic, offset in last.items() if offset and topic in topics}


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

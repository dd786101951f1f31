"""The index by topic: which blocks have entries of a topic.

A row for each topic of each block would be the simple index. But a hundred devices publish to a
hundred topics, and a commit of one message of each would then touch a hundred pages all over
the tree (measured: four times the work on LMDB, fifteen times on SQLite). So blocks are indexed
some at a time: the newest blocks, the *tail*, have no index and are looked at one by one; when
the tail is long enough, each of its topics gets one row for all of its blocks.

    key    topic id u64, first offset of a block u64
    value  further blocks of this topic in the same stretch: u16 each, the distance of their first
           offsets from the one in the key

Rule 1. ``Ends.indexed``: every block up to this offset is indexed, none above it.
Rule 2. A row may name blocks that were pruned since; it goes with the last block it names.
Rule 3. A block whose topics could not be read is indexed under UNKNOWN, which matches every topic.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING, Final

from storage.blocks import Block, Damage
from storage.kv import U64, U64_U64, Space
from storage.names import KEPT_BYTES, key_of, literal_prefix, topic_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from storage.kv import ReadTxn, WriteTxn
    from storage.meta import Ends

__all__ = [
    "TAIL_BLOCKS_MAX",
    "UNKNOWN",
    "Matches",
    "Tail",
    "blocks_of",
    "candidates",
    "density",
    "forget",
    "is_in",
    "last_block_of",
    "matching",
    "named",
]

MAX_OFFSET: Final = (1 << 63) - 1

UNKNOWN: Final = 0
"""Topic id of blocks that could not tell their topics when they were indexed."""

TAIL_BLOCKS_MAX: Final = 64
TAIL_TOPICS_MAX: Final = 2048
TAIL_BYTES_MAX: Final = 4 << 20
"""The tail is indexed when it has this many blocks, topics (each block's counted) or bytes. More
share the cost of the index better; fewer make a read of the newest entries, the opening and the
commit that indexes them shorter: some 5 ms for 2,048 rows. 64 blocks are at most 32,768 entries,
so that a distance between two of them fits 16 bits."""

TOPICS_CACHED_MAX: Final = 65_536
"""Topics whose ids the writer knows without a look: about 10 MB of common topic names. A client
can invent a topic per message, so it is bounded; when it is full it starts again."""


class Tail:
    """The writer's side: the blocks that are not indexed yet, and ids that it knows."""

    __slots__ = ("_blocks", "_committed", "_ids", "_size")

    def __init__(self) -> None:
        self._blocks: list[tuple[int, Sequence[bytes]]] = []
        self._size = (0, 0)
        self._committed = (self._blocks, 0, self._size)
        self._ids: dict[bytes, int] = {}

    def committed(self) -> None:
        """What was added is on disk."""
        self._committed = (self._blocks, len(self._blocks), self._size)

    def aborted(self) -> None:
        """What was added, or indexed, is not."""
        self._blocks, count, self._size = self._committed
        del self._blocks[count:]
        self._ids.clear()

    def read(self, txn: ReadTxn, ends: Ends) -> None:
        """Take up the tail of a database that is opened."""
        for key, raw in txn.scan(Space.HISTORY, U64.pack(ends.indexed + 1)):
            first = int.from_bytes(key, "big")
            try:
                topics: Sequence[bytes] = tuple(Block(first, raw).topics())
            except Damage:
                topics = ()
            self.add(first, topics, len(raw))
        self.committed()

    def add(self, first: int, topics: Sequence[bytes], raw_bytes: int) -> None:
        """A block was appended."""
        self._blocks.append((first, topics))
        topics_so_far, bytes_so_far = self._size
        self._size = (topics_so_far + len(topics), bytes_so_far + raw_bytes)

    def is_long(self) -> bool:
        """Whether it is to be indexed."""
        topics, raw_bytes = self._size
        return (
            len(self._blocks) >= TAIL_BLOCKS_MAX
            or topics >= TAIL_TOPICS_MAX
            or raw_bytes >= TAIL_BYTES_MAX
        )

    def index(self, txn: WriteTxn, ends: Ends) -> None:
        """Index all of it. Rows go in key order, so that each page is touched once."""
        firsts: dict[bytes, list[int]] = {}
        rows: list[tuple[bytes, bytes]] = []
        for first, topics in self._blocks:
            if not topics:
                rows.append((U64_U64.pack(UNKNOWN, first), b""))
            for topic in topics:
                firsts.setdefault(topic, []).append(first)
        for topic, of_topic in firsts.items():
            begin = of_topic[0]
            further = [first - begin for first in of_topic[1:]]
            packed = Struct(f">{len(further)}H").pack(*further) if further else b""
            rows.append((U64_U64.pack(self._id(txn, topic, ends), begin), packed))
        for key, packed in sorted(rows):
            txn.put(Space.TOPIC_INDEX, key, packed)
        self._blocks = []
        self._size = (0, 0)
        ends.indexed = ends.head

    def _id(self, txn: WriteTxn, topic: bytes, ends: Ends) -> int:
        """The id of a topic; it gets one if it has none."""
        number = self._ids.get(topic) or topic_id(txn, topic)
        if number is None:
            number = ends.next_topic
            ends.next_topic += 1
            packed = U64.pack(number)
            txn.put(Space.TOPIC, key_of(topic), packed)
            txn.put(Space.TOPIC_NAME, packed, topic)
        if len(self._ids) >= TOPICS_CACHED_MAX:
            self._ids.clear()
        self._ids[topic] = number
        return number

    def id_of(self, txn: ReadTxn, topic: bytes) -> int | None:
        """The id of a topic, None if it has none."""
        return self._ids.get(topic) or topic_id(txn, topic)

    def forget(self, topic: bytes) -> None:
        """A topic has no id any more."""
        self._ids.pop(topic, None)


# ------------------------------------------------------------------------------------ rows


def named(key: bytes, packed: bytes) -> list[int]:
    """First offsets of the blocks that a row names, in order."""
    begin = int.from_bytes(key[8:], "big")
    further = Struct(f">{len(packed) // 2}H").unpack(packed) if packed else ()
    return [begin, *[begin + distance for distance in further]]


def blocks_of(
    txn: ReadTxn, number: int, start: int, stop: int
) -> Iterator[tuple[bytes, list[int]]]:
    """Rows of a topic that name blocks from ``start`` on, up to those that begin at ``stop``.

    (key, first offsets) each, in order; a row that begins before ``start`` is the first.
    """
    begin = U64_U64.pack(number, start)
    of_topic = U64.pack(number)
    for key, packed in txn.scan(Space.TOPIC_INDEX, of_topic, begin, reverse=True):
        if (firsts := named(key, packed))[-1] >= start:
            yield key, firsts
        break
    for key, packed in txn.scan(Space.TOPIC_INDEX, begin, U64_U64.pack(number, stop)):
        yield key, named(key, packed)


def last_block_of(txn: ReadTxn, number: int) -> int:
    """First offset of the newest block that the index names for a topic, 0 = none."""
    for key, packed in txn.scan(
        Space.TOPIC_INDEX, U64.pack(number), U64.pack(number + 1), reverse=True
    ):
        return named(key, packed)[-1]
    return 0


def is_in(txn: ReadTxn, number: int, first: int) -> bool:
    """Whether the index names the block for a topic."""
    stop = U64_U64.pack(number, first + 1)
    for key, packed in txn.scan(Space.TOPIC_INDEX, U64.pack(number), stop, reverse=True):
        return first in named(key, packed)
    return False


def forget(txn: WriteTxn, numbers: Iterable[int], through: int) -> None:
    """Blocks up to the one at ``through`` are pruned: delete the rows that name none after it."""
    for number in numbers:
        stop = U64_U64.pack(number, through + 1)
        for key, packed in list(txn.scan(Space.TOPIC_INDEX, U64.pack(number), stop)):
            if named(key, packed)[-1] <= through:
                txn.delete(Space.TOPIC_INDEX, key)


# --------------------------------------------------------------------------------- planning


def matching(
    txn: ReadTxn, filters: Sequence[bytes], accepts: Callable[[bytes], object], look_max: int
) -> list[int] | None:
    """Ids of the topics that match; None when they cannot be told, or not without a look at more
    than ``look_max``."""
    looked = 0
    found: set[int] = set()
    for topic_filter in filters:
        prefix, is_exact = literal_prefix(topic_filter)
        if is_exact:
            looked += 1
            number = topic_id(txn, prefix)
            if number is not None and accepts(prefix):
                found.add(number)
        else:
            for name, packed_id in islice(_begins_with(txn, prefix), look_max - looked + 1):
                looked += 1
                if not name:  # it cannot be read: any topic may be behind it
                    return None
                if accepts(name):
                    found.add(int.from_bytes(packed_id, "big"))
        if looked > look_max:
            return None
    return sorted(found)


_KNOWN_FILTERS_MAX: Final = 256
_KNOWN_TOPICS_MAX: Final = 500_000
"""What is remembered of sets of filters, at most: about 4 MB."""


class Matches:
    """Which topics match which filters, remembered from one chunk of a read to the next.

    For one database, in the thread of its reader. Ids are given once, in order, so what has come
    since is found behind the last one that was known; one that was forgotten has no rows, and costs
    a look.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[bytes, ...], _Known] = OrderedDict()
        self._topics = 0

    def of(
        self,
        txn: ReadTxn,
        next_topic: int,
        filters: Sequence[bytes],
        accepts: Callable[[bytes], object],
        look_max: int,
    ) -> Sequence[int] | None:
        """See ``matching``. next_topic: of this transaction (storage.meta.Ends)."""
        key = tuple(filters)
        known = self._known.pop(key, None)
        if known is not None:
            self._topics -= known.size
            if known.ids is None and look_max < 2 * known.look_max:
                known = _Known(None, next_topic, known.look_max)
            elif known.ids is None or next_topic - known.next_topic > look_max:
                known = None
            else:
                known.follow(txn, next_topic, accepts)
        if known is None:
            ids = matching(txn, filters, accepts, look_max)
            known = _Known(None if ids is None else array("Q", ids), next_topic, look_max)
        self._known[key] = known
        self._topics += known.size
        while len(self._known) > _KNOWN_FILTERS_MAX or self._topics > _KNOWN_TOPICS_MAX:
            _, oldest = self._known.popitem(last=False)
            self._topics -= oldest.size
        return known.ids


class _Known:
    """ids: that match, of all below ``next_topic``; None: they were more than ``look_max``."""

    __slots__ = ("ids", "look_max", "next_topic")

    def __init__(self, ids: array[int] | None, next_topic: int, look_max: int) -> None:
        self.ids = ids
        self.next_topic = next_topic
        self.look_max = look_max

    @property
    def size(self) -> int:
        """Topics that are remembered."""
        return len(self.ids or ())

    def follow(self, txn: ReadTxn, next_topic: int, accepts: Callable[[bytes], object]) -> None:
        """Look at the topics that have come since."""
        if next_topic == self.next_topic or self.ids is None:
            return
        for packed_id, name in txn.scan(
            Space.TOPIC_NAME, U64.pack(self.next_topic), U64.pack(next_topic)
        ):
            if not name:  # it cannot be read: any topic may be behind it
                self.ids = None
                break
            if accepts(name):
                self.ids.append(int.from_bytes(packed_id, "big"))
        self.next_topic = next_topic


def _begins_with(txn: ReadTxn, prefix: bytes) -> Iterator[tuple[bytes | None, bytes]]:
    """(name, id) of the topics that begin so; of all topics, where names are hidden."""
    if txn.hides_names:
        for packed_id, name in txn.scan(Space.TOPIC_NAME):
            yield name, packed_id
        return
    start = prefix[:KEPT_BYTES]
    for key, packed_id in txn.scan(Space.TOPIC, start, _after_prefix(start)):
        yield key if len(key) <= KEPT_BYTES else txn.get(Space.TOPIC_NAME, packed_id), packed_id


def _after_prefix(prefix: bytes) -> bytes | None:
    """The first key after all those that begin with ``prefix``; None = there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes((stem[-1] + 1,)) if stem else None


_SAMPLE: Final = 8
"""Topics whose rows are looked at for an estimate."""


def density(txn: ReadTxn, numbers: Sequence[int], start: int, entries_per_block: float) -> float:
    """Estimate: for how many of these topics the index names a block, on average.

    By the next row of a few of them. Above one half the plan by topic saves nothing: it would
    read most blocks all the same, and look at rows besides.
    """
    sample = numbers[:: max(1, len(numbers) // _SAMPLE)]
    total = 0.0
    for number in sample:
        for _, firsts in blocks_of(txn, number, start, MAX_OFFSET):
            blocks = (firsts[-1] - start) / entries_per_block
            total += sum(first >= start for first in firsts) / max(1.0, blocks)
            break
    return total * len(numbers) / max(1, len(sample))


_ROWS_MAX: Final = 1024
"""Rows of the index looked at in one round."""


def candidates(txn: ReadTxn, numbers: Sequence[int], start: int, through: int) -> Iterator[int]:
    """First offsets of the indexed blocks from ``start`` on that have any of these topics.

    In order. Goes in rounds, up to where the rows of each topic were read, so that no more than
    one cursor is open and no more than about _ROWS_MAX rows are in memory.
    """
    wanted = [UNKNOWN, *numbers]
    rows_max = max(4, _ROWS_MAX // len(wanted))
    while start <= through:
        found: set[int] = set()
        horizon = through
        for number in wanted:
            rows = list(islice(blocks_of(txn, number, start, horizon + 1), rows_max))
            for _, firsts in rows:
                found.update(firsts)
            if len(rows) == rows_max:
                # the next row begins after the last block of this one
                horizon = min(horizon, rows[-1][1][-1])
        yield from sorted(first for first in found if start <= first <= horizon)
        start = horizon + 1

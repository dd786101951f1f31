"""Walk every stored invariant, in one read transaction.

Each index is compared with what it stands for both ways: every row that should be there is looked
up, and there are no more rows than were looked up. Sentences name offsets and ids, never payloads.

What the store lets its callers do is no violation: a cursor or a delivery ahead of the head (the
log lost its tail; the session's verdict tells), a held message that no delivery names yet.

Of a sealed database whose keys are not given, what is in sealed rows is not looked at: blocks but
for their number and size, messages; with sealed topics also topics, filters and subscriptions.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from storage.api import GROUP, HELD, UNRECORDED, Claim
from storage.blocks import Block, Damage, decode_message
from storage.consumers import claims_of, needed_after, needs, rows_of, subscriptions_of
from storage.errors import RecordDamaged
from storage.kv import U64, U64_U64, ReadTxn, Space, get_u64
from storage.meta import Ends, MetaDamaged, read_ends, read_identity
from storage.names import filter_hash, key_of, topic_id
from storage.outbox.checking import check_outbox
from storage.records import NONE, Record, decode_will
from storage.sealing import OVERHEAD_BYTES, is_sealed
from storage.topics import UNKNOWN, is_in, named

if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = ["check"]

_OWN_ROWS: Final = (Space.SUBSCRIPTION, Space.CLAIM, Space.HELD, Space.INBOUND)


def check(txn: ReadTxn) -> list[str]:
    """One sentence for each violation; empty = sound."""
    try:
        read_identity(txn)
        ends = read_ends(txn)
    except MetaDamaged as damage:
        return [f"the database cannot be told: {damage}"]
    return [
        *_ends(ends),
        *_history(txn, ends),
        *_topics(txn, ends),
        *_marks(txn, ends),
        *_consumers(txn, ends),
        *_retained(txn),
        *_wills(txn),
        *check_outbox(txn),
    ]


def _count(txn: ReadTxn, space: Space) -> int:
    return sum(1 for _ in txn.scan(space))


def _ends(ends: Ends) -> Iterator[str]:
    if not max(ends.coarse, ends.floor) <= ends.head:
        yield f"coarse {ends.coarse}, floor {ends.floor} and head {ends.head} are out of order"
    if not ends.indexed <= ends.head:
        yield f"the index goes to {ends.indexed}, the head is {ends.head}"


# ---------------------------------------------------------------------------------- history


def _history(txn: ReadTxn, ends: Ends) -> Iterator[str]:
    walk = _Blocks(txn, ends)
    for key, raw in txn.scan(Space.HISTORY):
        yield from walk.one(int.from_bytes(key, "big"), raw)
    yield from walk.totals()


class _Blocks:
    """All blocks. rows: how many (topic, block) the index should name."""

    def __init__(self, txn: ReadTxn, ends: Ends) -> None:
        self.txn = txn
        self.ends = ends
        self.begin = self.expected = self.blocks = self.rows = self.bytes = 0
        self.is_sound = True

    def one(self, first: int, raw: bytes) -> Iterator[str]:
        """A block, and what the index has of it."""
        self.blocks += 1
        self.bytes += len(raw)
        if self.expected not in (0, first):
            yield f"entries {self.expected} to {first - 1} are missing"
        self.begin = self.begin or first
        self.expected = first + 1
        if is_sealed(raw):  # its key was not given: what is in it cannot be seen
            self.bytes -= OVERHEAD_BYTES
            self.expected = 0
            self.is_sound = False
            return
        try:
            block = Block(first, raw)
        except Damage:
            self.is_sound = False
            yield f"the block of {first} is damaged"
            return
        self.expected = block.last + 1
        if block.last <= self.ends.floor:
            yield f"the block of {first} is below the floor {self.ends.floor}"
        yield from _entries(block)
        if not block.is_sound:
            self.is_sound = False
            yield f"the table of the block of {first} is damaged"
        elif first <= self.ends.indexed:
            yield from self._index(block)

    def _index(self, block: Block) -> Iterator[str]:
        for topic in block.topics():
            self.rows += 1
            number = topic_id(self.txn, topic)
            if number is None:
                yield f"a topic of the block of {block.first} has no id"
            elif not is_in(self.txn, number, block.first):
                yield f"the index of topic {number} does not name the block of {block.first}"

    def totals(self) -> Iterator[str]:
        """The ends, and that the index names no more than there is."""
        ends = self.ends
        if self.blocks == 0 and ends.floor != ends.head:
            yield f"history is empty, the floor is {ends.floor} and the head {ends.head}"
        if self.blocks and not self.begin <= ends.floor + 1:
            yield f"history begins with {self.begin}, above the floor {ends.floor}"
        if self.blocks and self.is_sound and self.expected != ends.head + 1:
            yield f"history ends with {self.expected - 1}, the head is {ends.head}"
        if self.blocks != ends.blocks:
            yield f"there are {self.blocks} blocks, {ends.blocks} are counted"
        if self.bytes != ends.bytes:
            yield f"the blocks have {self.bytes} bytes, {ends.bytes} are counted"
        found = 0
        for key, packed in self.txn.scan(Space.TOPIC_INDEX, U64.pack(UNKNOWN + 1)):
            firsts = named(key, packed)
            found += sum(1 for first in firsts if first >= self.begin)
            if self.blocks == 0 or firsts[-1] < self.begin:
                yield f"the index names the block of {firsts[-1]}, which was pruned"
        if self.is_sound and found != self.rows:
            yield f"the index by topic names {found} blocks for {self.rows}"


def _entries(block: Block) -> Iterator[str]:
    for position in range(block.count):
        try:
            block.entry(position)
        except Damage as damage:
            yield f"entry {damage.offset} is damaged"


def _topics(txn: ReadTxn, ends: Ends) -> Iterator[str]:
    names = 0
    for packed_id, topic in txn.scan(Space.TOPIC_NAME):
        names += 1
        if is_sealed(topic):
            continue
        number = int.from_bytes(packed_id, "big")
        if number >= ends.next_topic:
            yield f"topic {number} is to be given again"
        if txn.get(Space.TOPIC, key_of(topic)) != packed_id:
            yield f"topic {number} is not found by its name"
        rows = txn.scan(Space.TOPIC_INDEX, packed_id, U64.pack(number + 1))
        if next(rows, None) is None and txn.get(Space.MARK, packed_id) is None:
            yield f"topic {number} has neither entries nor a mark"
    if names != (found := _count(txn, Space.TOPIC)):
        yield f"{found} topics are found by name, {names} by id"


def _marks(txn: ReadTxn, ends: Ends) -> Iterator[str]:
    marks = 0
    for packed_id, packed in txn.scan(Space.MARK):
        marks += 1
        number = int.from_bytes(packed_id, "big")
        mark = int.from_bytes(packed, "big")
        if not 0 < mark <= ends.head:
            yield f"topic {number} is gone through {mark}, the head is {ends.head}"
        if txn.get(Space.MARK_ORDER, packed + packed_id) is None:
            yield f"the mark of topic {number} is not in order"
        if txn.get(Space.TOPIC_NAME, packed_id) is None:
            yield f"topic {number} has a mark and no name"
    found = _count(txn, Space.MARK_ORDER)
    if not marks == ends.marks == found:
        yield f"there are {marks} marks, {found} in order, {ends.marks} counted"


# -------------------------------------------------------------------------------- consumers


def _consumers(txn: ReadTxn, ends: Ends) -> Iterator[str]:
    walk = _Walk(txn, ends)
    for packed_id, raw in txn.scan(Space.CONSUMER):
        number = int.from_bytes(packed_id, "big")
        try:
            yield from walk.one(Record.unpack(number, raw))
        except (RecordDamaged, Damage):
            yield f"what is stored for consumer {number} is damaged"
    yield from walk.totals()


class _Walk:
    """All consumers; rows: space -> how many rows they account for. filters: durable ones."""

    def __init__(self, txn: ReadTxn, ends: Ends) -> None:
        self.txn = txn
        self.ends = ends
        self.rows: Counter[Space] = Counter()
        self.filters: Counter[bytes] = Counter()

    def one(self, record: Record) -> Iterator[str]:
        """A consumer with all that it has."""
        self.rows[Space.CONSUMER] += 1
        for space in _OWN_ROWS:
            self.rows[space] += sum(1 for _ in rows_of(self.txn, space, record.id))
        found = [
            *self._record(record),
            *self._subscriptions(record),
            *self._deliveries(record),
            *self._indexes(record),
        ]
        for sentence in found:
            yield f"consumer {record.id}: {sentence}"

    def totals(self) -> Iterator[str]:
        """What belongs to no consumer, and the filters of all of them."""
        self.rows[Space.CLIENT] = self.rows[Space.CONSUMER]
        for space in (
            *_OWN_ROWS,
            Space.CLIENT,
            Space.POSITION,
            Space.EXPIRY,
            Space.ATTACHED,
        ):
            if self.rows[space] != (found := _count(self.txn, space)):
                name = space.name.lower()
                yield f"{found} rows of kind {name}, consumers have {self.rows[space]}"
        counted: Counter[bytes] = Counter()
        for key, row in self.txn.scan(Space.FILTER):
            if is_sealed(row):
                return
            counted[row[8:]] = int.from_bytes(row[:8], "big")
            if key != self.txn.place(Space.FILTER, key_of(row[8:])):
                yield "a filter is counted under another name"
        if counted != self.filters:
            yield f"{len(counted)} filters are counted, consumers have {len(self.filters)}"

    def _record(self, record: Record) -> Iterator[str]:
        if record.id >= self.ends.next_consumer:
            yield "its id is to be given again"
        if get_u64(self.txn, Space.CLIENT, key_of(record.client_id)) != record.id:
            yield "it is not found by its client id"
        if not 0 <= record.next_packet_id <= 0xFFFF:
            yield f"its next packet id is {record.next_packet_id}"
        for packet_id, _ in rows_of(self.txn, Space.INBOUND, record.id):
            if not 1 <= int.from_bytes(packet_id, "big") <= 0xFFFF:
                yield "an inbound packet id cannot be"

    def _subscriptions(self, record: Record) -> Iterator[str]:
        rows = rows_of(self.txn, Space.SUBSCRIPTION, record.id)
        if any(is_sealed(raw) for _, raw in rows):
            return
        subs = subscriptions_of(self.txn, record.id)
        self.filters.update(sub.filter for sub in subs if sub.qos > 0)
        durable = [sub for sub in subs if needs(sub)]
        if record.durable != len(durable):
            yield f"it has {len(durable)} durable subscriptions, {record.durable} are counted"
        if record.needed_from > min((sub.from_offset for sub in durable), default=0):
            yield f"its subscriptions do not begin at {record.needed_from}"
        packed_id = U64.pack(record.id)
        keys = {packed_id + key for key, _ in rows_of(self.txn, Space.SUBSCRIPTION, record.id)}
        place = self.txn.place
        if keys != {place(Space.SUBSCRIPTION, packed_id + filter_hash(sub.filter)) for sub in subs}:
            yield "a subscription is stored under another filter"

    def _deliveries(self, record: Record) -> Iterator[str]:
        claims = claims_of(self.txn, record.id)
        held = {
            int.from_bytes(number, "big"): is_sealed(raw) or decode_message(raw)
            for number, raw in rows_of(self.txn, Space.HELD, record.id)
        }
        if any(number >= record.next_held for number in held):
            yield "the number of a held message is to be given again"
        if any(claim.number >= record.next_claim for claim in claims):
            yield "the number of a claim is to be given again"
        yield from self._ids(record, claims)
        for delivery in (delivery for claim in claims for delivery in claim.deliveries):
            if delivery.state & HELD:
                if delivery.offset not in held:
                    yield f"the held message {delivery.offset} of a delivery is not there"
            elif delivery.offset == 0:
                yield f"delivery {delivery.packet_id} is of no entry"
            if not 1 <= delivery.qos <= 2:
                yield f"delivery {delivery.packet_id} with QoS {delivery.qos} cannot be"

    def _ids(self, record: Record, claims: list[Claim]) -> Iterator[str]:
        """Packet ids of deliveries, and who they are with."""
        is_group = record.client_id.startswith(GROUP)
        keepers: list[tuple[int, int]] = []
        for claim in claims:
            if claim.member and not is_group:
                yield f"claim {claim.number} is with a member, and it is no group"
            keeps_ids = not is_group or claim.member not in {0, UNRECORDED}
            ids = [delivery.packet_id for delivery in claim.deliveries]
            if any(bool(packet_id) != keeps_ids for packet_id in ids):
                yield f"a packet id of claim {claim.number} cannot be"
            keepers += ((claim.member, packet_id) for packet_id in ids if packet_id)
        if len(set(keepers)) != len(keepers):
            yield "two deliveries have one packet id"

    def _indexes(self, record: Record) -> Iterator[str]:
        needed = needed_after(self.txn, record)
        if record.indexed > needed:
            yield f"it needs what is above {needed}, the index says {record.indexed}"
        rows = {
            Space.POSITION: None if record.indexed == NONE else record.indexed,
            Space.EXPIRY: record.deadline_ms,
        }
        for space, number in rows.items():
            if number is None:
                continue
            self.rows[space] += 1
            if self.txn.get(space, U64_U64.pack(number, record.id)) is None:
                yield f"its row of kind {space.name.lower()} at {number} is missing"
        if record.detached_ms == 0:
            self.rows[Space.ATTACHED] += 1
            if self.txn.get(Space.ATTACHED, U64.pack(record.id)) is None:
                yield "its owner is attached, and it is not listed"


# ------------------------------------------------------------------------- single messages


def _retained(txn: ReadTxn) -> Iterator[str]:
    for row, (key, raw) in enumerate(txn.scan(Space.RETAINED)):
        if is_sealed(raw):
            continue
        try:
            message = decode_message(raw)
        except Damage:
            yield f"retained message {row} is damaged"
            continue
        if key != txn.place(Space.RETAINED, key_of(message.topic)):
            yield f"retained message {row} is stored under another topic"
        if not message.payload:
            yield f"retained message {row} is empty"


def _wills(txn: ReadTxn) -> Iterator[str]:
    for row, (incarnation, raw) in enumerate(txn.scan(Space.WILL)):
        if is_sealed(raw):
            continue
        try:
            decode_will(incarnation, raw)
        except RecordDamaged:
            yield f"will {row} is damaged"

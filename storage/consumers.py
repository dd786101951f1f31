"""Operations on consumers: each reads one record, checks its fence, and changes its rows.

Rule 1. A refusal is raised before the first change; so a refused operation changed nothing. What
        may be damaged is read before that, too (``tests/storage/engine/test_refusals.py``).
Rule 2. ``_save`` is the last step: it brings the rows that are found by something else than the
        consumer (position, expiry, attached) in line with the record, then writes the record.
Rule 3. A row in Space.POSITION is at or below what its consumer needs. It may lag, which only
        holds pruning back; so only checkpoints, and what lowers the position, move it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from storage.api import (
    INCARNATION_BYTES,
    UNCLAIMED,
    UNRECORDED,
    Acquire,
    Acquired,
    Advance,
    Bind,
    Claim,
    Detach,
    Discard,
    Expire,
    Expired,
    Snapshot,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from storage.blocks import Damage, decode_message, encode_message
from storage.errors import ClaimNotHeld, Fenced, NotOwner, RecordDamaged
from storage.kv import U64, U64_U16, U64_U64, ReadTxn, Space, WriteTxn, get_u64
from storage.meta import read_ends
from storage.names import filter_hash, is_shared, key_of, levels_match
from storage.outbox import writing as outbox
from storage.records import (
    NONE,
    Record,
    decode_claim,
    decode_subscription,
    encode_claim,
    encode_subscription,
    lowest_unsettled,
)
from storage.retention import Marks

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from storage.api import Loss
    from storage.history import History
    from storage.meta import Ends

__all__ = [
    "acquire",
    "advance",
    "bind",
    "claims_of",
    "detach",
    "detach_all",
    "discard",
    "expire",
    "find",
    "load",
    "loss_of",
    "needed_after",
    "needs",
    "page",
    "put_anew",
    "read_snapshot",
    "rows_of",
    "snapshot",
    "subscribe",
    "subscriptions_of",
    "unsubscribe",
]

_OFFSET: Final = itemgetter(0)
"""Of a Delivery."""


# ----------------------------------------------------------------------------------- reading


def rows_of(txn: ReadTxn, space: Space, consumer_id: int) -> Iterator[tuple[bytes, bytes]]:
    """What a consumer has in a space: (rest of the key, value)."""
    for key, value in txn.scan(space, U64.pack(consumer_id), U64.pack(consumer_id + 1)):
        yield key[8:], value


def load(txn: ReadTxn, consumer_id: int) -> Record | None:
    """Raises RecordDamaged."""
    raw = txn.get(Space.CONSUMER, U64.pack(consumer_id))
    return None if raw is None else Record.unpack(consumer_id, raw)


def find(txn: ReadTxn, client_id: bytes) -> Record | None:
    """The record of a client id, or None. Raises RecordDamaged."""
    number = get_u64(txn, Space.CLIENT, key_of(client_id))
    if number is None:
        return None
    record = load(txn, number)
    if record is None or record.client_id != client_id:
        raise RecordDamaged(number)
    return record


def page(txn: ReadTxn, after: bytes | None, limit: int) -> list[Record]:
    """Records in the order of their keys; those that are damaged are left to ``check``."""
    start = b"" if after is None else key_of(after) + b"\x00"
    found: list[Record] = []
    for _, packed_id in txn.scan(Space.CLIENT, start):
        if len(found) == limit:
            break
        try:
            record = load(txn, int.from_bytes(packed_id, "big"))
        except RecordDamaged:
            continue
        if record is not None:
            found.append(record)
    return found


def claims_of(txn: ReadTxn, consumer_id: int, but: Container[int] = ()) -> list[Claim]:
    """In the order they were made. but: numbers of claims that are not looked at."""
    return [
        decode_claim(consumer_id, number, raw)
        for packed, raw in rows_of(txn, Space.CLAIM, consumer_id)
        if (number := int.from_bytes(packed, "big")) not in but
    ]


def subscriptions_of(txn: ReadTxn, consumer_id: int) -> list[Subscription]:
    """In the order of their filters."""
    rows = rows_of(txn, Space.SUBSCRIPTION, consumer_id)
    return sorted(decode_subscription(consumer_id, raw) for _, raw in rows)


def read_snapshot(txn: ReadTxn, ends: Ends, record: Record) -> Snapshot:
    """A consumer with all that is stored for it."""
    subscriptions = subscriptions_of(txn, record.id)
    claims = claims_of(txn, record.id)
    try:
        held = {
            int.from_bytes(number, "big"): decode_message(raw)
            for number, raw in rows_of(txn, Space.HELD, record.id)
        }
    except Damage:
        raise RecordDamaged(record.id) from None
    return Snapshot(
        record.consumer,
        tuple(subscriptions),
        tuple(claims),
        held,
        frozenset(
            int.from_bytes(packet_id, "big")
            for packet_id, _ in rows_of(txn, Space.INBOUND, record.id)
        ),
        loss_of(txn, ends, record, subscriptions, claims),
        _gone(txn, claims),
    )


def _gone(txn: ReadTxn, claims: list[Claim]) -> frozenset[int]:
    """Members that claims are with and whose record is not there any more."""
    members = {claim.member for claim in claims} - {0, UNRECORDED}
    return frozenset(n for n in members if txn.get(Space.CONSUMER, U64.pack(n)) is None)


def loss_of(
    txn: ReadTxn,
    ends: Ends,
    record: Record,
    subscriptions: list[Subscription],
    claims: list[Claim],
) -> Loss | None:
    """What a consumer would have received, and what is gone; see storage.api.Snapshot."""
    durable = [sub for sub in subscriptions if needs(sub)]
    if not durable:
        return None
    position = min(record.cursor, lowest_unsettled(claims) - 1)
    filters = [sub.filter for sub in durable]
    return Marks(txn, ends).loss(position, filters, partial(_is_missed, durable))


def needs(sub: Subscription) -> bool:
    """Whether a subscription makes its own consumer need entries of the history."""
    return sub.qos > 0 and not is_shared(sub.filter)


def _is_missed(durable: list[Subscription], topic: bytes, pruned: int) -> bool:
    return any(
        pruned > sub.from_offset and (not topic or levels_match(sub.filter, topic))
        for sub in durable
    )


def snapshot(txn: ReadTxn, client_id: bytes) -> Snapshot | None:
    """Read a consumer without owning it."""
    record = find(txn, client_id)
    return None if record is None else read_snapshot(txn, read_ends(txn), record)


# ----------------------------------------------------------------------------------- writing


def _owned(txn: ReadTxn, consumer_id: int, incarnation: bytes) -> Record:
    """The record, if ``incarnation`` is on it. Raises Fenced, RecordDamaged."""
    raw = txn.get(Space.CONSUMER, U64.pack(consumer_id))
    if raw is None:
        raise Fenced(consumer_id)
    record = Record.unpack(consumer_id, raw)
    if record.incarnation != incarnation:
        raise Fenced(consumer_id)
    return record


def _save(txn: WriteTxn, record: Record) -> None:
    txn.put(Space.CONSUMER, U64.pack(record.id), record.pack())


def needed_after(txn: ReadTxn, record: Record) -> int:
    """What is above this offset is needed; NONE = nothing is."""
    return _needed(record, _unsettled(txn, record))


def _unsettled(txn: ReadTxn, record: Record) -> int:
    return lowest_unsettled(claims_of(txn, record.id))


def _needed(record: Record, unsettled: int) -> int:
    before = NONE if unsettled == NONE else unsettled - 1
    if record.durable:
        return min(before, max(record.cursor, record.needed_from))
    return before


def _checkpoint(txn: WriteTxn, record: Record, unsettled: int) -> None:
    """Bring the retention index up to the record. The record is saved afterwards.

    unsettled: lowest offset of its deliveries, NONE = there are none.
    """
    position = _needed(record, unsettled)
    if position == record.indexed:
        return
    if record.indexed != NONE:
        txn.delete(Space.POSITION, U64_U64.pack(record.indexed, record.id))
    if position != NONE:
        txn.put(Space.POSITION, U64_U64.pack(position, record.id), b"")
    record.indexed = position


def _set_presence(txn: WriteTxn, record: Record, *, detached_ms: int, expiry_s: int | None) -> None:
    """An owner is there (detached_ms = 0) or left. The record is saved afterwards."""
    packed_id = U64.pack(record.id)
    if (before := record.deadline_ms) is not None:
        txn.delete(Space.EXPIRY, U64_U64.pack(before, record.id))
    record.detached_ms = detached_ms
    record.expiry_s = NONE if expiry_s is None else expiry_s
    if (deadline_ms := record.deadline_ms) is not None:
        txn.put(Space.EXPIRY, U64_U64.pack(deadline_ms, record.id), b"")
    if detached_ms == 0:
        txn.put(Space.ATTACHED, packed_id, b"")
    else:
        txn.delete(Space.ATTACHED, packed_id)


def acquire(txn: WriteTxn, history: History, op: Acquire) -> Acquired:
    """See storage.api.Acquire."""
    assert len(op.incarnation) == INCARNATION_BYTES, "an incarnation has 16 bytes"
    record = find(txn, op.client_id)
    deadline_ms = record.deadline_ms if record is not None else None
    is_over = deadline_ms is not None and deadline_ms <= op.now_ms
    if record is not None and not is_over and record.user not in (op.user, UNCLAIMED):
        raise NotOwner(record.id)
    dropped: tuple[bytes, ...] = ()
    dropped_id = 0
    if record is not None and (op.clean or is_over):
        dropped, dropped_id = _delete(txn, record), record.id
        record = None
    existed = record is not None
    log = history.ends.log(history.identity)
    if record is None:
        if not op.create:
            return Acquired(False, None, log, dropped, dropped_id)
        record = _new(txn, history, op)
    found = read_snapshot(txn, history.ends, record)
    if record.detached_ms == 0:  # as after a death: the owner before did not say where it was
        record.qos0_after = history.ends.head
    record.user = op.user
    record.incarnation = op.incarnation
    record.version = op.version
    _set_presence(txn, record, detached_ms=0, expiry_s=op.expiry_s)
    _checkpoint(txn, record, lowest_unsettled(found.claims))
    _save(txn, record)
    found = replace(found, consumer=record.consumer)
    return Acquired(existed, found, log, dropped, dropped_id)


def _new(txn: WriteTxn, history: History, op: Acquire) -> Record:
    number = history.ends.next_consumer
    history.ends.next_consumer += 1
    txn.put(Space.CLIENT, key_of(op.client_id), U64.pack(number))
    return Record(
        id=number,
        client_id=op.client_id,
        user=op.user,
        incarnation=op.incarnation,
        generation=bytes.fromhex(history.identity.generation),
        cursor=history.ends.head,
        next_packet_id=0,
        created_ms=op.now_ms,
    )


def advance(txn: WriteTxn, _: History, op: Advance) -> None:
    """See storage.api.Advance. The common case (a claim made, one settled) is three writes."""
    number = op.consumer_id
    record = _owned(txn, number, op.incarnation)
    _must_hold(txn, record, op)
    lowest = record.cursor if op.cursor is None else op.cursor
    for claim in op.claims:
        lowest = min(lowest, min(map(_OFFSET, claim.deliveries), default=NONE) - 1)
    unsettled = None
    if op.checkpoint or lowest < record.indexed:
        changed = {*op.settled, *(claim.number for claim in op.claims)}
        unsettled = lowest_unsettled([*claims_of(txn, number, changed), *op.claims])
    for claim in op.claims:
        txn.put(Space.CLAIM, U64_U64.pack(number, claim.number), encode_claim(number, claim))
        record.next_claim = max(record.next_claim, claim.number + 1)
    for settled in op.settled:
        txn.delete(Space.CLAIM, U64_U64.pack(number, settled))
    if op.held or op.unheld:
        _hold(txn, record, op)
    for packet_id in op.received:
        txn.put(Space.INBOUND, U64_U16.pack(number, packet_id), b"")
    for packet_id in op.released:
        txn.delete(Space.INBOUND, U64_U16.pack(number, packet_id))
    if op.cursor is not None:
        record.cursor = op.cursor
    if op.next_packet_id is not None:
        record.next_packet_id = op.next_packet_id
    if op.enqueue or op.dead:
        outbox.add(txn, op.enqueue, op.dead, record.client_id)
    if unsettled is not None:
        _checkpoint(txn, record, unsettled)
    _save(txn, record)


def _must_hold(txn: ReadTxn, record: Record, op: Advance) -> None:
    """Raise ClaimNotHeld unless each claim that is not new is there."""
    old = [claim.number for claim in op.claims if claim.number < record.next_claim]
    for number in (*old, *op.settled):
        if txn.get(Space.CLAIM, U64_U64.pack(record.id, number)) is None:
            raise ClaimNotHeld(record.id, number)


def _hold(txn: WriteTxn, record: Record, op: Advance) -> None:
    for number, message in op.held:
        txn.put(Space.HELD, U64_U64.pack(record.id, number), encode_message(message))
        record.next_held = max(record.next_held, number + 1)
    for number in op.unheld:
        txn.delete(Space.HELD, U64_U64.pack(record.id, number))


def subscribe(txn: WriteTxn, _: History, op: Subscribe) -> None:
    """See storage.api.Subscribe. Costs what it changes, not what is subscribed to already."""
    record = _owned(txn, op.consumer_id, op.incarnation)
    subs = {wanted.filter: _subscription(txn, record, wanted.filter) for wanted in op.subscriptions}
    unsettled = _unsettled(txn, record)
    lost = [before for s in op.subscriptions if (before := subs[s.filter]) and not needs(s)]
    needed_from = _needed_without(txn, record, lost)
    for wanted in op.subscriptions:
        before = subs[wanted.filter]
        from_offset = wanted.from_offset
        if before is not None and before.qos > 0:
            from_offset = min(before.from_offset, from_offset)
        subs[wanted.filter] = sub = wanted._replace(from_offset=from_offset)
        txn.put(
            Space.SUBSCRIPTION,
            U64.pack(record.id) + filter_hash(sub.filter),
            encode_subscription(record.id, sub),
        )
        _count(txn, record, before, -1)
        _count(txn, record, sub, +1)
        if needs(sub):
            needed_from = min(needed_from, from_offset)
    record.needed_from = needed_from if record.durable else 0
    _checkpoint(txn, record, unsettled)
    _save(txn, record)


def unsubscribe(txn: WriteTxn, _: History, op: Unsubscribe) -> tuple[bool, ...]:
    """See storage.api.Unsubscribe."""
    record = _owned(txn, op.consumer_id, op.incarnation)
    subs = {unwanted: _subscription(txn, record, unwanted) for unwanted in op.filters}
    unsettled = _unsettled(txn, record)
    needed_from = _needed_without(txn, record, [sub for sub in subs.values() if sub is not None])
    was_there: list[bool] = []
    for unwanted in op.filters:
        before = subs.pop(unwanted, None)
        was_there.append(before is not None)
        if before is not None:
            txn.delete(Space.SUBSCRIPTION, U64.pack(record.id) + filter_hash(unwanted))
            _count(txn, record, before, -1)
    record.needed_from = needed_from if record.durable else 0
    _checkpoint(txn, record, unsettled)
    _save(txn, record)
    return tuple(was_there)


def _subscription(txn: ReadTxn, record: Record, topic_filter: bytes) -> Subscription | None:
    raw = txn.get(Space.SUBSCRIPTION, U64.pack(record.id) + filter_hash(topic_filter))
    return None if raw is None else decode_subscription(record.id, raw)


def _needed_without(txn: ReadTxn, record: Record, lost: Sequence[Subscription]) -> int:
    """Lowest from_offset of a consumer's subscriptions but for some; NONE = none needs anything.

    It says what is needed where the cursor is lower. So it stays too low, which only holds pruning
    back, as long as another one is not above the cursor: then only the first of them is looked at.
    """
    if not any(needs(sub) and sub.from_offset <= record.needed_from for sub in lost):
        return record.needed_from if record.durable else NONE
    gone = {sub.filter for sub in lost}
    lowest = NONE
    for _, raw in rows_of(txn, Space.SUBSCRIPTION, record.id):
        sub = decode_subscription(record.id, raw)
        if needs(sub) and sub.filter not in gone:
            if sub.from_offset <= record.cursor:
                return record.needed_from
            lowest = min(lowest, sub.from_offset)
    return lowest


def _count(txn: WriteTxn, record: Record, sub: Subscription | None, by: int) -> None:
    """Count a durable filter up or down: for the database, and for the consumer if that needs what
    matches."""
    if sub is None or sub.qos == 0:
        return
    record.durable += by * needs(sub)
    key = key_of(sub.filter)
    row = txn.get(Space.FILTER, key)
    count = (0 if row is None else int.from_bytes(row[:8], "big")) + by
    if count > 0:
        txn.put(Space.FILTER, key, U64.pack(count) + sub.filter)
    else:
        txn.delete(Space.FILTER, key)


def _needed_from(subs: Iterable[Subscription]) -> int:
    return min((sub.from_offset for sub in subs if needs(sub)), default=0)


def bind(txn: WriteTxn, history: History, op: Bind) -> None:
    """See storage.api.Bind."""
    record = _owned(txn, op.consumer_id, op.incarnation)
    record.generation = bytes.fromhex(history.identity.generation)
    record.cursor = op.cursor
    _checkpoint(txn, record, _unsettled(txn, record))
    _save(txn, record)


def detach(txn: WriteTxn, _: History, op: Detach) -> None:
    """See storage.api.Detach."""
    record = _owned(txn, op.consumer_id, op.incarnation)
    unsettled = _unsettled(txn, record)
    if op.qos0_after is not None:
        record.qos0_after = op.qos0_after
    keep = op.keep_expiry and op.expiry_s is None
    expiry_s = record.consumer.expiry_s if keep else op.expiry_s
    _set_presence(txn, record, detached_ms=op.now_ms, expiry_s=expiry_s)
    _checkpoint(txn, record, unsettled)
    _save(txn, record)


def put_anew(txn: WriteTxn, record: Record, subscriptions: list[Subscription]) -> None:
    """Write a consumer into a database that is built anew, with every row that is found by
    something else than the consumer. Its claims are there already."""
    txn.put(Space.CLIENT, key_of(record.client_id), U64.pack(record.id))
    record.durable = 0
    record.indexed = NONE
    for sub in subscriptions:
        key = U64.pack(record.id) + filter_hash(sub.filter)
        txn.put(Space.SUBSCRIPTION, key, encode_subscription(record.id, sub))
        _count(txn, record, sub, +1)
    record.needed_from = _needed_from(subscriptions)
    expiry_s = record.consumer.expiry_s
    _set_presence(txn, record, detached_ms=record.detached_ms, expiry_s=expiry_s)
    _checkpoint(txn, record, _unsettled(txn, record))
    _save(txn, record)


def detach_all(txn: WriteTxn, head: int, now_ms: int) -> None:
    """Whoever is attached when the database is opened died with the last process. head: what they
    were given with QoS 0 up to there nobody knows."""
    for packed_id, _ in list(txn.scan(Space.ATTACHED)):
        try:
            record = load(txn, int.from_bytes(packed_id, "big"))
        except RecordDamaged:
            continue  # check() tells; a device that comes back is refused by name
        if record is not None:
            expiry_s = record.consumer.expiry_s
            _set_presence(txn, record, detached_ms=now_ms, expiry_s=expiry_s)
            record.qos0_after = head
            _save(txn, record)


def discard(txn: WriteTxn, _: History, op: Discard) -> None:
    """See storage.api.Discard."""
    _delete(txn, _owned(txn, op.consumer_id, op.incarnation))


def expire(txn: WriteTxn, _: History, op: Expire) -> tuple[Expired, ...]:
    """See storage.api.Expire."""
    over = islice(txn.scan(Space.EXPIRY, stop=U64.pack(op.now_ms + 1)), op.limit)
    gone: list[Expired] = []
    for key, _value in list(over):
        try:
            record = load(txn, int.from_bytes(key[8:], "big"))
            filters = None if record is None else _delete(txn, record)
        except RecordDamaged:
            record = None  # check() tells; its row goes, so that it does not hold up the others
        if record is None or filters is None:
            txn.delete(Space.EXPIRY, key)
        else:
            gone.append(Expired(record.client_id, filters, record.id))
    return tuple(gone)


def _delete(txn: WriteTxn, record: Record) -> tuple[bytes, ...]:
    """Delete a consumer with everything that only it holds; its durable filters."""
    subscriptions = subscriptions_of(txn, record.id)
    for sub in subscriptions:
        _count(txn, record, sub, -1)
    packed_id = U64.pack(record.id)
    for space in (Space.SUBSCRIPTION, Space.CLAIM, Space.HELD, Space.INBOUND):
        for rest, _ in list(rows_of(txn, space, record.id)):
            txn.delete(space, packed_id + rest)
    if record.indexed != NONE:
        txn.delete(Space.POSITION, U64_U64.pack(record.indexed, record.id))
    if (deadline_ms := record.deadline_ms) is not None:
        txn.delete(Space.EXPIRY, U64_U64.pack(deadline_ms, record.id))
    txn.delete(Space.ATTACHED, packed_id)
    txn.delete(Space.CLIENT, key_of(record.client_id))
    txn.delete(Space.CONSUMER, packed_id)
    return tuple(sub.filter for sub in subscriptions if sub.qos > 0)

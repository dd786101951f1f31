"""The store in memory: the model that the other backends are tested against.

Written to be read, not to be fast. The whole database is a handful of dicts whose values are
never changed in place: an operation puts a new value, and ``_put`` remembers the old one, so that
a batch that fails is undone by putting everything back. An entry is a block of its own.

Nothing survives the process. ``close`` and ``open`` on the same object are the restart of a
broker whose disk is this object.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from functools import singledispatchmethod
from typing import TYPE_CHECKING, TypeVar

from storage.api import (
    GROUP,
    HELD,
    UNCLAIMED,
    UNRECORDED,
    Accept,
    Acquire,
    Acquired,
    Advance,
    Batch,
    Bind,
    Chunk,
    Consumer,
    Detach,
    Discard,
    DropWill,
    Entry,
    Expire,
    Expired,
    FilterCount,
    LogState,
    Loss,
    Missed,
    Op,
    Opened,
    Outcome,
    Prune,
    Pruned,
    Retain,
    Snapshot,
    StoreWill,
    Subscribe,
    Subscription,
    Unsubscribe,
    Will,
)
from storage.errors import (
    ClaimNotHeld,
    EntryGone,
    Fenced,
    NotOwner,
    StoreLocked,
    StoreRefusal,
    StoreUnavailable,
)
from storage.outbox import (
    ClaimNext,
    Enqueue,
    ExpireMessages,
    Extend,
    Purge,
    Reap,
    Reissue,
    Release,
    Settle,
)
from storage.outbox.model import OutboxModel, OutboxTables
from storage.outbox.rights import refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from storage.outbox import AuditRecord, Backlog, Message, OutboxReads

__all__ = ["MemoryStore"]

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class _Stored:
    """An entry in the history, and when it was stored."""

    entry: Entry
    stored_ms: int


@dataclass(frozen=True, slots=True)
class _Ends:
    """The numbers of the database. coarse: highest mark that was forgotten."""

    head: int = 0
    floor: int = 0
    coarse: int = 0
    next_consumer: int = 1


@dataclass(slots=True)
class _Tables:
    """The database. Values are replaced, never changed.

    history: offset -> entry, gapless from floor + 1 to head.
    marks: topic -> pruned_through, the last offset of that topic that was deleted.
    consumers: client id -> everything that is stored for it (its loss is computed when asked).
    names: consumer id -> client id. wills: by incarnation.
    """

    history: dict[int, _Stored] = field(default_factory=dict)
    marks: dict[bytes, int] = field(default_factory=dict)
    consumers: dict[bytes, Snapshot] = field(default_factory=dict)
    names: dict[int, bytes] = field(default_factory=dict)
    retained: dict[bytes, Entry] = field(default_factory=dict)
    wills: dict[bytes, Will] = field(default_factory=dict)
    outbox: OutboxTables = field(default_factory=OutboxTables)
    ends: _Ends = field(default_factory=_Ends)


class MemoryStore:
    """A Store in plain dicts; see storage.api.Store for what it guarantees.

    generation: the one to give this database; None = a random one, as every database has.
    """

    name = "memory"

    def __init__(self, *, generation: str | None = None) -> None:
        self._db_id = uuid.uuid4().hex
        self._generation = generation or uuid.uuid4().hex
        self._minted = "created"
        self._seen_ms = 0
        self._boot = 0
        self._tables = _Tables()
        self._outbox = OutboxModel(lambda: self._tables.outbox, self._put)
        self.outbox: OutboxReads = _OutboxReads(self)
        self._undo: list[Callable[[], None]] = []
        self._is_open = False
        self._pending: deque[asyncio.Handle] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    # ---------------------------------------------------------------------------- life cycle

    async def open(self, *, now_ms: int) -> Opened:
        """Count a boot, and detach owners that did not leave before the last ``close``."""
        if self._is_open:
            raise StoreLocked(path="memory", reason="it is open already", pid=os.getpid())
        self._is_open = True
        self._boot += 1
        minted, self._minted = self._minted, ""
        now_ms = self._seen_ms = max(now_ms, self._seen_ms)
        for snapshot in list(self._tables.consumers.values()):
            if snapshot.consumer.detached_ms == 0:
                head = self._tables.ends.head
                left = replace(snapshot.consumer, detached_ms=now_ms, qos0_after=head)
                self._save(replace(snapshot, consumer=left))
        self._undo.clear()
        return Opened(
            log=self._log(),
            filters=self._filter_counts(),
            wills=tuple(self._tables.wills.values()),
            minted=minted,
            seen_ms=now_ms,
        )

    async def close(self) -> None:
        """Finish what was submitted, then close. Idempotent."""
        self._is_open = False
        await self._idle.wait()

    def _must_be_open(self) -> None:
        if not self._is_open:
            raise StoreUnavailable("the store is not open")

    # -------------------------------------------------------------------------------- writes

    def submit(self, batch: Batch, done: Callable[[list[Outcome] | BaseException], None]) -> None:
        """Apply the batch at a later turn of the loop, and call back in that turn."""
        loop = asyncio.get_running_loop()
        if not self._is_open:
            loop.call_soon(done, StoreUnavailable("the store is not open"))
            return
        if (refused := refusal(batch)) is not None:
            loop.call_soon(done, refused)
            return
        self._seen_ms = max(self._seen_ms, batch.stored_ms)
        self._pending.append(loop.call_soon(self._commit, batch, done))
        self._idle.clear()

    def _commit(self, batch: Batch, done: Callable[[list[Outcome] | BaseException], None]) -> None:
        result: list[Outcome] | BaseException
        try:
            result = self._apply_whole(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, the submitter is told
            result = error
        self._pending.popleft()
        if not self._pending:
            self._idle.set()
        done(result)

    def _apply_whole(self, batch: Batch) -> list[Outcome]:
        """Apply a batch, or put back all that it changed and raise."""
        ends = self._tables.ends
        try:
            self._append(batch)
            return [self._outcome(op) for op in batch.ops]
        except BaseException:
            for put_back in reversed(self._undo):
                put_back()
            self._tables.ends = ends
            raise
        finally:
            self._undo.clear()

    def _put(self, table: dict[K, V], key: K, value: V | None) -> None:
        """Set table[key], or delete it (None), and remember how to undo that."""
        old = table.get(key)

        def put_back() -> None:
            if old is None:
                table.pop(key, None)
            else:
                table[key] = old

        self._undo.append(put_back)
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value

    def _append(self, batch: Batch) -> None:
        head = self._tables.ends.head
        for entry in batch.entries:
            if entry.offset != head + 1:
                msg = f"entry {entry.offset} cannot follow the head {head}"
                raise AssertionError(msg)
            head = entry.offset
            self._put(self._tables.history, head, _Stored(entry, batch.stored_ms))
        self._tables.ends = replace(self._tables.ends, head=head)

    def _outcome(self, op: Op) -> Outcome:
        try:
            return self._apply(op)
        except StoreRefusal as refusal:
            return refusal

    # Each operation checks everything it may be refused for before it changes anything.

    @singledispatchmethod
    def _apply(self, op: Op) -> Outcome:
        msg = f"{type(op).__name__} is not an operation"
        raise TypeError(msg)

    @_apply.register
    def _acquire(self, op: Acquire) -> Acquired:
        found = self._tables.consumers.get(op.client_id)
        deadline_ms = _deadline_ms(found.consumer) if found is not None else None
        is_over = deadline_ms is not None and deadline_ms <= op.now_ms
        if found is not None and not is_over and found.consumer.user not in (op.user, UNCLAIMED):
            raise NotOwner(found.consumer.id)
        dropped: tuple[bytes, ...] = ()
        dropped_id = 0
        if found is not None and (op.clean or is_over):
            dropped, dropped_id = _durable_filters(found), found.consumer.id
            self._delete(found)
            found = None
        existed = found is not None
        if found is None and op.create:
            found = self._create(op)
        if found is None:
            return Acquired(False, None, self._log(), dropped, dropped_id)
        left = found.consumer.detached_ms > 0
        owned = replace(
            found.consumer,
            user=op.user,
            incarnation=op.incarnation,
            expiry_s=op.expiry_s,
            version=op.version,
            detached_ms=0,
            qos0_after=found.consumer.qos0_after if left else self._tables.ends.head,
        )
        self._save(replace(found, consumer=owned))
        snapshot = self._snapshot(op.client_id)
        return Acquired(existed, snapshot, self._log(), dropped, dropped_id)

    def _create(self, op: Acquire) -> Snapshot:
        ends = self._tables.ends
        self._tables.ends = replace(ends, next_consumer=ends.next_consumer + 1)
        self._put(self._tables.names, ends.next_consumer, op.client_id)
        consumer = Consumer(
            id=ends.next_consumer,
            client_id=op.client_id,
            user=op.user,
            incarnation=op.incarnation,
            generation=self._generation,
            cursor=ends.head,
            next_packet_id=0,
            created_ms=op.now_ms,
        )
        return Snapshot(consumer, (), (), {}, frozenset())

    @_apply.register
    def _advance(self, op: Advance) -> None:
        snapshot = self._owned(op.consumer_id, op.incarnation)
        consumer = snapshot.consumer
        claims = {claim.number: claim for claim in snapshot.claims}
        for number in (*(claim.number for claim in op.claims), *op.settled):
            is_new = number >= consumer.next_claim and number not in op.settled
            if not is_new and number not in claims:
                raise ClaimNotHeld(consumer.id, number)
        claims.update((claim.number, claim) for claim in op.claims)
        for number in op.settled:
            claims.pop(number, None)
        held = {**snapshot.held, **dict(op.held)}
        for number in op.unheld:
            held.pop(number, None)
        moved = replace(
            consumer,
            cursor=consumer.cursor if op.cursor is None else op.cursor,
            next_claim=max(consumer.next_claim, *(c.number + 1 for c in op.claims), 0),
            next_held=max(consumer.next_held, *(number + 1 for number, _ in op.held), 0),
            next_packet_id=op.next_packet_id or consumer.next_packet_id,
        )
        self._save(
            replace(
                snapshot,
                consumer=moved,
                claims=tuple(claims[number] for number in sorted(claims)),
                held=held,
                inbound=(snapshot.inbound | set(op.received)) - set(op.released),
            )
        )
        for message in op.enqueue:
            self._outbox.enqueue(message)
        for letter in op.dead:
            self._outbox.bury(letter, consumer.client_id)

    @_apply.register
    def _subscribe(self, op: Subscribe) -> None:
        snapshot = self._owned(op.consumer_id, op.incarnation)
        subscriptions = {sub.filter: sub for sub in snapshot.subscriptions}
        for wanted in op.subscriptions:
            before = subscriptions.get(wanted.filter)
            from_offset = wanted.from_offset
            if before is not None and before.qos > 0:
                from_offset = min(before.from_offset, from_offset)
            subscriptions[wanted.filter] = wanted._replace(from_offset=from_offset)
        self._save(replace(snapshot, subscriptions=tuple(sorted(subscriptions.values()))))

    @_apply.register
    def _unsubscribe(self, op: Unsubscribe) -> tuple[bool, ...]:
        snapshot = self._owned(op.consumer_id, op.incarnation)
        subscriptions = {sub.filter: sub for sub in snapshot.subscriptions}
        was_there = tuple(subscriptions.pop(unwanted, None) is not None for unwanted in op.filters)
        self._save(replace(snapshot, subscriptions=tuple(sorted(subscriptions.values()))))
        return was_there

    @_apply.register
    def _bind(self, op: Bind) -> None:
        snapshot = self._owned(op.consumer_id, op.incarnation)
        consumer = replace(snapshot.consumer, generation=self._generation, cursor=op.cursor)
        self._save(replace(snapshot, consumer=consumer))

    @_apply.register
    def _detach(self, op: Detach) -> None:
        snapshot = self._owned(op.consumer_id, op.incarnation)
        keep = op.keep_expiry and op.expiry_s is None
        expiry_s = snapshot.consumer.expiry_s if keep else op.expiry_s
        qos0_after = snapshot.consumer.qos0_after if op.qos0_after is None else op.qos0_after
        left = replace(
            snapshot.consumer,
            detached_ms=op.now_ms,
            expiry_s=expiry_s,
            qos0_after=qos0_after,
        )
        self._save(replace(snapshot, consumer=left))

    @_apply.register
    def _discard(self, op: Discard) -> None:
        self._delete(self._owned(op.consumer_id, op.incarnation))

    @_apply.register
    def _expire(self, op: Expire) -> tuple[Expired, ...]:
        over = sorted(
            (
                (deadline_ms, snapshot.consumer.id, snapshot)
                for snapshot in self._tables.consumers.values()
                if (deadline_ms := _deadline_ms(snapshot.consumer)) is not None
                and deadline_ms <= op.now_ms
            ),
            key=lambda found: found[:2],
        )[: op.limit]
        for _, _, snapshot in over:
            self._delete(snapshot)
        return tuple(
            Expired(snapshot.consumer.client_id, _durable_filters(snapshot), snapshot.consumer.id)
            for _, _, snapshot in over
        )

    @_apply.register
    def _retain(self, op: Retain) -> None:
        message = op.message
        self._put(self._tables.retained, message.topic, message if message.payload else None)

    @_apply.register
    def _store_will(self, op: StoreWill) -> None:
        self._put(self._tables.wills, op.will.incarnation, op.will)

    @_apply.register
    def _drop_will(self, op: DropWill) -> bool:
        was_there = op.incarnation in self._tables.wills
        self._put(self._tables.wills, op.incarnation, None)
        return was_there

    @_apply.register
    def _prune(self, op: Prune) -> Pruned:
        tables = self._tables
        needed_after = self._needed_after()
        floor = tables.ends.floor
        blocks = payload_bytes = 0
        more = False
        stored_bytes = self._log().bytes
        while (stored := tables.history.get(floor + 1)) is not None:
            is_too_old = stored.stored_ms < op.older_than_ms
            is_too_large = 0 < op.bytes_max < stored_bytes - payload_bytes
            is_forced = floor + 1 <= op.through or is_too_old or is_too_large
            is_needed = floor + 1 > needed_after
            if not is_forced and (is_needed or stored.stored_ms >= op.before_ms):
                break
            if blocks == op.blocks_max or blocks > op.topics_max:
                more = True
                break
            floor += 1
            blocks += 1
            payload_bytes += len(stored.entry.payload)
            if stored.entry.qos and not 0 < stored.entry.expires_ms <= op.now_ms:
                self._put(tables.marks, stored.entry.topic, floor)
            self._put(tables.history, floor, None)
        tables.ends = replace(tables.ends, floor=floor)
        self._fold_marks(op.marks_max)
        return Pruned(floor, blocks, payload_bytes, more)

    @_apply.register
    def _enqueue(self, op: Enqueue) -> Outcome:
        return self._outbox.enqueue(op)

    @_apply.register
    def _claim_next(self, op: ClaimNext) -> Outcome:
        return self._outbox.claim_next(op)

    @_apply.register
    def _extend(self, op: Extend) -> Outcome:
        self._outbox.extend(op)
        return None

    @_apply.register
    def _settle(self, op: Settle) -> Outcome:
        return self._outbox.settle(op)

    @_apply.register
    def _release(self, op: Release) -> Outcome:
        self._outbox.release(op)
        return None

    @_apply.register
    def _reap(self, op: Reap) -> Outcome:
        return self._outbox.reap(op)

    @_apply.register
    def _expire_messages(self, op: ExpireMessages) -> Outcome:
        return self._outbox.expire_messages(op)

    @_apply.register
    def _reissue(self, op: Reissue) -> Outcome:
        return self._outbox.reissue(op)

    @_apply.register
    def _purge(self, op: Purge) -> Outcome:
        return self._outbox.purge(op)

    def _fold_marks(self, marks_max: int) -> None:
        """Forget the lowest marks: one at or below the coarse floor says nothing more."""
        marks = sorted((mark, topic) for topic, mark in self._tables.marks.items())
        for mark, topic in marks[: max(0, len(marks) - marks_max)]:
            self._put(self._tables.marks, topic, None)
            ends = self._tables.ends
            self._tables.ends = replace(ends, coarse=max(ends.coarse, mark))

    # ------------------------------------------------------------------------------- records

    def _owned(self, consumer_id: int, incarnation: bytes) -> Snapshot:
        """The record of a consumer, if ``incarnation`` is on it; raises Fenced."""
        client_id = self._tables.names.get(consumer_id)
        if client_id is not None:
            snapshot = self._tables.consumers[client_id]
            if snapshot.consumer.incarnation == incarnation:
                return snapshot
        raise Fenced(consumer_id)

    def _save(self, snapshot: Snapshot) -> None:
        self._put(self._tables.consumers, snapshot.consumer.client_id, snapshot)

    def _delete(self, snapshot: Snapshot) -> None:
        self._put(self._tables.names, snapshot.consumer.id, None)
        self._put(self._tables.consumers, snapshot.consumer.client_id, None)

    def _filter_counts(self) -> tuple[FilterCount, ...]:
        counts = Counter(
            name
            for snapshot in self._tables.consumers.values()
            for name in _durable_filters(snapshot)
        )
        return tuple(FilterCount(name, counts[name]) for name in sorted(counts))

    def _needed_after(self) -> int:
        """Every consumer has, or does not want, what is at or below this offset."""
        return min(
            (
                position
                for snapshot in self._tables.consumers.values()
                for position in _needs(snapshot)
            ),
            default=self._tables.ends.head,
        )

    def _loss(self, snapshot: Snapshot) -> Loss | None:
        position = min((snapshot.consumer.cursor, *_before_unsettled(snapshot)))
        lost = [
            Loss(topic, pruned_through)
            for topic, pruned_through in self._marks()
            for sub in _needing(snapshot)
            if pruned_through > max(position, sub.from_offset)
            if topic == b"" or _matches(sub.filter, topic)
        ]
        return max(lost, key=lambda loss: loss.pruned_through, default=None)

    def _marks(self) -> Iterator[tuple[bytes, int]]:
        """Every topic's pruned_through.

        b"" stands for the marks that were forgotten: any filter may have matched one of them.
        """
        yield from self._tables.marks.items()
        if self._tables.ends.coarse:
            yield b"", self._tables.ends.coarse

    # --------------------------------------------------------------------------------- reads

    async def read(
        self,
        after: int,
        accept: Accept,
        *,
        filters: Sequence[bytes] = (),  # noqa: ARG002 - a dict of entries needs no plan
        entries_max: int,
        bytes_max: int,
        missed: Missed | None = None,
    ) -> Chunk:
        """Scan from ``after`` on; entry bytes are counted as topic and payload."""
        self._must_be_open()
        ends = self._tables.ends
        lost = [
            Loss(topic, pruned_through)
            for topic, pruned_through in self._marks()
            if pruned_through > after
            and (
                missed(topic, pruned_through)
                if missed is not None
                else topic == b"" or accept(topic) > 0
            )
        ]
        loss = max(lost, key=lambda loss: loss.pruned_through, default=None)
        accepted: dict[bytes, int] = {}
        taken: list[tuple[Entry, int]] = []
        taken_bytes = 0
        for offset in range(max(after, ends.floor) + 1, ends.head + 1):
            entry = self._tables.history[offset].entry
            if entry.topic not in accepted:
                accepted[entry.topic] = accept(entry.topic)
            if not accepted[entry.topic]:
                continue
            entry_bytes = len(entry.topic) + len(entry.payload)
            if taken and (len(taken) == entries_max or taken_bytes + entry_bytes > bytes_max):
                return Chunk(taken, offset - 1, ends.head, loss)
            taken.append((entry, accepted[entry.topic]))
            taken_bytes += entry_bytes
        return Chunk(taken, ends.head, ends.head, loss)

    async def fetch(self, offsets: Sequence[int]) -> list[Entry]:
        """The entries at these offsets, in the order asked. Raises EntryGone."""
        self._must_be_open()
        for offset in offsets:
            if offset not in self._tables.history:
                raise EntryGone(offset)
        return [self._tables.history[offset].entry for offset in offsets]

    async def newest(self, topics: Sequence[bytes]) -> list[int]:
        """Walk all there is."""
        self._must_be_open()
        last: dict[bytes, int] = {}
        for offset, stored in self._tables.history.items():
            if stored.entry.qos:
                last[stored.entry.topic] = max(offset, last.get(stored.entry.topic, 0))
        return [last.get(topic, 0) for topic in topics]

    async def snapshot(self, client_id: bytes) -> Snapshot | None:
        """Read a consumer without owning it. None if there is none."""
        self._must_be_open()
        return self._snapshot(client_id)

    def _snapshot(self, client_id: bytes) -> Snapshot | None:
        found = self._tables.consumers.get(client_id)
        if found is None:
            return None
        members = {claim.member for claim in found.claims} - {0, UNRECORDED}
        gone = frozenset(members - self._tables.names.keys())
        return replace(found, held=dict(found.held), loss=self._loss(found), gone=gone)

    async def consumers(self, after: bytes | None = None, limit: int = 1000) -> list[Consumer]:
        """Records in the order of their client ids."""
        self._must_be_open()
        ids = sorted(self._tables.consumers)
        page = [client_id for client_id in ids if after is None or client_id > after][:limit]
        return [self._tables.consumers[client_id].consumer for client_id in page]

    async def retained(self, after: bytes | None = None, limit: int = 1000) -> list[Entry]:
        """Retained messages in topic order."""
        self._must_be_open()
        topics = sorted(self._tables.retained)
        page = [topic for topic in topics if after is None or topic > after][:limit]
        return [self._tables.retained[topic] for topic in page]

    async def log(self) -> LogState:
        """Identity and ends of the history."""
        self._must_be_open()
        return self._log()

    def _log(self) -> LogState:
        ends = self._tables.ends
        stored_bytes = sum(len(s.entry.payload) for s in self._tables.history.values())
        return LogState(
            self._db_id, self._generation, self._boot, ends.head, ends.floor, stored_bytes
        )

    async def check(self) -> list[str]:
        """Walk every invariant of the tables; one sentence for each violation."""
        self._must_be_open()
        tables = self._tables
        ends = tables.ends
        wrong: list[str] = []
        if sorted(tables.history) != list(range(ends.floor + 1, ends.head + 1)):
            wrong.append(f"history is not gapless from {ends.floor + 1} to {ends.head}")
        wrong += [
            f"the entry at {offset} says it is {stored.entry.offset}"
            for offset, stored in tables.history.items()
            if stored.entry.offset != offset
        ]
        wrong += [
            f"a topic is pruned through {mark}, above the floor {ends.floor}"
            for _, mark in self._marks()
            if mark > ends.floor
        ]
        if tables.names != {s.consumer.id: name for name, s in tables.consumers.items()}:
            wrong.append("names and records of consumers differ")
        for snapshot in tables.consumers.values():
            wrong += _wrong_in(snapshot, ends.next_consumer)
        if any(not message.payload for message in tables.retained.values()):
            wrong.append("a retained message is empty")
        return [*wrong, *self._outbox.wrong()]


class _OutboxReads:
    """storage.outbox.OutboxReads over the model."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def _model(self) -> OutboxModel:
        self._store._must_be_open()  # noqa: SLF001 - it is the store's own half
        return self._store._outbox  # noqa: SLF001

    async def backlog(self) -> list[Backlog]:
        return self._model().backlog()

    async def dead_letters(
        self, queue: bytes, after: tuple[int, int] = (0, 0), limit: int = 100
    ) -> list[Message]:
        return self._model().dead_letters(queue, after, limit)

    async def show(self, message_id: int) -> Message | None:
        return self._model().show(message_id)

    async def audit(self, after: int = 0, limit: int = 100) -> list[AuditRecord]:
        return self._model().audit(after, limit)


def _wrong_in(snapshot: Snapshot, next_consumer: int) -> Iterator[str]:
    """Violations within one record."""
    consumer = snapshot.consumer
    who = f"consumer {consumer.id}"
    if consumer.id >= next_consumer:
        yield f"{who}: its id is to be given again"
    numbers = [claim.number for claim in snapshot.claims]
    if numbers != sorted(set(numbers)):
        yield f"{who}: claims are out of order"
    if any(number >= consumer.next_claim for number in numbers):
        yield f"{who}: a claim's number is to be given again"
    if any(number >= consumer.next_held for number in snapshot.held):
        yield f"{who}: a held message's number is to be given again"
    is_group = consumer.client_id.startswith(GROUP)
    if not is_group and any(claim.member for claim in snapshot.claims):
        yield f"{who}: a claim is with a member, and it is no group"
    deliveries = [delivery for claim in snapshot.claims for delivery in claim.deliveries]
    ids = [(c.member, d.packet_id) for c in snapshot.claims for d in c.deliveries]
    if is_group:
        ids = [(member, number) for member, number in ids if member not in {0, UNRECORDED}]
    if len(set(ids)) != len(ids):
        yield f"{who}: two deliveries have one packet id"
    for delivery in deliveries:
        if delivery.state & HELD and delivery.offset not in snapshot.held:
            yield f"{who}: the held message {delivery.offset} of a delivery is not there"


def _durable(snapshot: Snapshot) -> list[Subscription]:
    return [sub for sub in snapshot.subscriptions if sub.qos > 0]


def _durable_filters(snapshot: Snapshot) -> tuple[bytes, ...]:
    return tuple(sub.filter for sub in _durable(snapshot))


def _needing(snapshot: Snapshot) -> list[Subscription]:
    """Durable subscriptions of its own: what matches a shared one, the group needs."""
    return [sub for sub in _durable(snapshot) if not sub.filter.startswith(b"$share/")]


def _before_unsettled(snapshot: Snapshot) -> list[int]:
    """The positions just before each unsettled delivery from the history."""
    return [
        delivery.offset - 1
        for claim in snapshot.claims
        for delivery in claim.deliveries
        if not delivery.state & HELD
    ]


def _needs(snapshot: Snapshot) -> list[int]:
    """Positions above which this consumer still wants entries; empty = it wants none.

    Nothing at or below the lowest from_offset of its durable filters is ever delivered to it,
    whatever its cursor says.
    """
    positions = _before_unsettled(snapshot)
    if durable := _needing(snapshot):
        lowest = min(sub.from_offset for sub in durable)
        positions.append(max(snapshot.consumer.cursor, lowest))
    return positions


def _deadline_ms(consumer: Consumer) -> int | None:
    """When the record expires; None = not while it is attached, or never."""
    if consumer.detached_ms == 0 or consumer.expiry_s is None:
        return None
    return consumer.detached_ms + consumer.expiry_s * 1000


def _matches(topic_filter: bytes, topic: bytes) -> bool:
    """Whether an MQTT topic filter matches a topic [MQTT-4.7.1-1 to 4.7.2-1]."""
    if topic.startswith(b"$") and topic_filter.startswith((b"+", b"#")):
        return False
    levels = topic.split(b"/")
    wanted = topic_filter.split(b"/")
    for depth, level in enumerate(wanted):
        if level == b"#":
            return True
        if depth == len(levels) or level not in (b"+", levels[depth]):
            return False
    return len(wanted) == len(levels)

"""Random histories: every backend does what the model in memory does, step by step.

A rule-based machine submits the same batches to each store and compares outcomes, snapshots,
reads, filters, wills and the ends of the log. What may differ is said here, once: db_id and
generation are random; a backend may prune less than the model would (its blocks are larger and
its retention index may lag), so after a Prune the model follows the backends to their floor.

The seed is printed when the machine fails (``--hypothesis-seed=N`` replays it). ``--long`` runs
for minutes and begins with another seed each time.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from storage.api import (
    GROUP,
    HELD,
    RECEIVED,
    SENT,
    UNCLAIMED,
    UNRECORDED,
    Acquire,
    Acquired,
    Advance,
    Batch,
    Bind,
    Claim,
    Consumer,
    Delivery,
    Detach,
    Discard,
    DropWill,
    Entry,
    Expire,
    Expired,
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
from storage.memory import MemoryStore
from tests.storage.harness import (
    BACKENDS,
    NOW_MS,
    SEALED,
    Database,
    Memory,
    counts,
    in_order,
    matching,
    message,
    scratch,
    wills,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from storage.api import LogState, Op, Outcome

OTHERS: Final = {name: make for name, make in BACKENDS.items() if name != "memory"} | {
    name: SEALED[name] for name in ("lmdb, topics sealed", "sqlite, sealed")
}

LONG: Final = b"n" * 600
TEAM: Final = GROUP + b"team/a/#"
CLIENTS: Final = (b"one", b"two", TEAM, b"One", LONG, LONG + b"x")
USERS: Final = (b"", b"ann", UNCLAIMED)
TOPICS: Final = (b"a", b"a/b", b"a/c", b"b", b"b/c/d", b"$x/a", LONG, LONG + b"x", b"\xc3\xa4")
FILTERS: Final = (
    *TOPICS,
    b"#",
    b"+",
    b"a/#",
    b"+/b",
    b"b/+/d",
    b"$x/#",
    b"nobody/+",
    b"$share/team/a/#",
)
INCARNATIONS: Final = tuple(bytes([n]) * 16 for n in range(1, 9))

entries = st.builds(
    message,
    st.sampled_from(TOPICS),
    st.sampled_from([b"", b"x", b"\x00\xff", bytes(2000)]),
    qos=st.sampled_from([0, 1, 2]),
    flags=st.sampled_from([0, 0x04]),
    origin=st.sampled_from([b"", *CLIENTS]),
    expires_ms=st.sampled_from([0, NOW_MS]),
    properties=st.sampled_from([b"", b"\x01\x00"]),
)
subscriptions = st.builds(
    Subscription,
    st.sampled_from(FILTERS),
    st.integers(0, 2),
    st.integers(0, 12),
    st.sampled_from([0, 0x2C]),
    st.sampled_from([0, 1, 268_435_455]),
)
packet_ids = st.sampled_from([1, 2, 3, 255, 256, 65_535])


class Machine(RuleBasedStateMachine):
    """Each rule adds an operation to the open batch, or submits it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.disk = ExitStack()
        path = self.disk.enter_context(scratch())
        self.model = Database(Memory(path))
        self.others = {name: Database(make(path)) for name, make in OTHERS.items()}
        self.now_ms = NOW_MS
        self.appended = 0
        self.batch = Batch()
        self.known: dict[bytes, Snapshot] = {}
        self.packet_id = 0
        self.submitted = 0

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @initialize(
        history=st.lists(entries, max_size=12),
        wanted=st.lists(st.lists(subscriptions, min_size=1, max_size=3), min_size=1, max_size=3),
    )
    def open(self, history: list[Entry], wanted: list[list[Subscription]]) -> None:
        """Begin with a few consumers, and with entries that may match what they want."""
        self.reopen()
        for number, subs in enumerate(wanted, 1):
            incarnation = INCARNATIONS[number]
            self.batch.ops += (
                Acquire(CLIENTS[number - 1], incarnation, b"", self.now_ms, expiry_s=number),
                Subscribe(number, incarnation, tuple(sub._replace(from_offset=0) for sub in subs)),
            )
        self.submit()
        for entry in history:
            self.append([entry])
            self.submit()

    def teardown(self) -> None:
        with self.disk:
            self.disk.callback(self.loop.close)
            for database in (self.model, *self.others.values()):
                self.disk.callback(self.run_stop, database)

    def run_stop(self, database: Database) -> None:
        if hasattr(database, "opened"):
            self.run(database.stop())

    # ------------------------------------------------------------------- filling a batch

    def add(self, op: Op) -> None:
        """Add to the open batch; batches are of one, two, three, ... operations in turn."""
        self.batch.ops.append(op)
        if len(self.batch.ops) > self.submitted % 5:
            self.submit()

    def someone(self, data: st.DataObject, incarnations: Any = None) -> tuple[Snapshot, bytes]:
        """A consumer, and its incarnation or, sometimes, one that is not."""
        snapshot = self.known[data.draw(st.sampled_from(sorted(self.known)), "client")]
        is_stale = data.draw(st.integers(0, 5), "stale if 0") == 0
        stale = data.draw(incarnations or st.sampled_from(INCARNATIONS), "incarnation")
        return snapshot, stale if is_stale else snapshot.consumer.incarnation

    @rule(messages=st.lists(entries, min_size=1, max_size=4))
    def append(self, messages: list[Entry]) -> None:
        for entry in messages:
            self.appended += 1
            self.batch.entries.append(entry._replace(offset=self.appended))

    @rule(
        client_id=st.sampled_from(CLIENTS),
        incarnation=st.sampled_from(INCARNATIONS),
        user=st.sampled_from(USERS),
        clean=st.sampled_from([False, False, False, True]),
        create=st.sampled_from([True, True, True, False]),
        expiry_s=st.sampled_from([None, 0, 1, 5, 4_294_967_295]),
        version=st.sampled_from([3, 4, 5]),
    )
    def acquire(self, client_id: bytes, incarnation: bytes, user: bytes, **rest: Any) -> None:
        self.add(Acquire(client_id, incarnation, user, self.now_ms, **rest))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), wanted=st.lists(subscriptions, max_size=4))
    def subscribe(self, data: st.DataObject, wanted: list[Subscription]) -> None:
        snapshot, incarnation = self.someone(data)
        self.add(Subscribe(snapshot.consumer.id, incarnation, tuple(wanted)))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), unwanted=st.lists(st.sampled_from(FILTERS), max_size=4))
    def unsubscribe(self, data: st.DataObject, unwanted: list[bytes]) -> None:
        snapshot, incarnation = self.someone(data)
        names = [sub.filter for sub in snapshot.subscriptions][:1] + unwanted
        self.add(Unsubscribe(snapshot.consumer.id, incarnation, tuple(names)))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), size=st.integers(1, 4), checkpoint=st.booleans())
    def claim(self, data: st.DataObject, size: int, *, checkpoint: bool) -> None:
        """The next window of the backlog."""
        snapshot, incarnation = self.someone(data)
        consumer = snapshot.consumer
        offsets = range(consumer.cursor + 1, min(consumer.cursor + size, self.appended) + 1)
        if not offsets:
            return
        made = self.claimed(data, consumer, [(at, SENT) for at in offsets])
        self.add(
            Advance(
                consumer.id,
                incarnation,
                cursor=offsets[-1],
                claims=[made],
                next_packet_id=self.packet_id % 65_535 + 1,
                checkpoint=checkpoint,
            )
        )

    def claimed(
        self, data: st.DataObject, consumer: Consumer, offsets: list[tuple[int, int]]
    ) -> Claim:
        """Deliveries of a consumer; those of a group are with somebody, who may be gone."""
        member = 0
        if consumer.client_id == TEAM:
            member = data.draw(st.sampled_from([0, 1, 2, 9, UNRECORDED]), "member")
        keeps_ids = consumer.client_id != TEAM or member not in {0, UNRECORDED}
        deliveries: list[Delivery] = []
        for offset, state in offsets:
            self.packet_id = self.packet_id % 65_535 + 1
            qos = data.draw(st.integers(1, 2), "qos")
            deliveries.append(Delivery(offset, self.packet_id * keeps_ids, qos, state))
        return Claim(consumer.next_claim, tuple(deliveries), member)

    @precondition(lambda self: any(s.claims for s in self.known.values()))
    @rule(data=st.data(), checkpoint=st.booleans())
    def settle(self, data: st.DataObject, *, checkpoint: bool) -> None:
        """Settle some claims whole and others in part, and now and then one that is not held."""
        snapshot, incarnation = self.someone(data)
        settled: list[int] = []
        claims: list[Claim] = []
        for claim in snapshot.claims:
            how = data.draw(st.sampled_from(["keep", "settle", "part", "received"]), "how")
            left = claim.deliveries[1:]
            if how == "settle" or (how == "part" and not left):
                settled.append(claim.number)
            elif how == "part":
                claims.append(claim._replace(deliveries=left))
            elif how == "received":
                received = (d._replace(state=d.state | RECEIVED) for d in claim.deliveries)
                claims.append(claim._replace(deliveries=tuple(received)))
        if data.draw(st.integers(0, 7), "not held if 0") == 0:
            settled.append(data.draw(st.integers(0, snapshot.consumer.next_claim + 2), "number"))
        unheld = [
            delivery.offset
            for claim in snapshot.claims
            if claim.number in settled
            for delivery in claim.deliveries
            if delivery.state & HELD
        ]
        self.add(
            Advance(
                snapshot.consumer.id,
                incarnation,
                claims=[claim for claim in claims if claim.number not in settled],
                settled=sorted(set(settled)),
                unheld=unheld,
                checkpoint=checkpoint,
            )
        )

    @precondition(lambda self: self.known)
    @rule(data=st.data(), entry=entries)
    def hold(self, data: st.DataObject, entry: Entry) -> None:
        snapshot, incarnation = self.someone(data)
        consumer = snapshot.consumer
        number = consumer.next_held
        made = self.claimed(data, consumer, [(number, HELD)])
        self.add(Advance(consumer.id, incarnation, claims=[made], held=[(number, entry)]))

    @precondition(lambda self: self.known)
    @rule(
        data=st.data(),
        received=st.sets(packet_ids, max_size=3),
        released=st.sets(packet_ids, max_size=3),
        checkpoint=st.booleans(),
    )
    def inbound(
        self, data: st.DataObject, received: set[int], released: set[int], *, checkpoint: bool
    ) -> None:
        snapshot, incarnation = self.someone(data)
        self.add(
            Advance(
                snapshot.consumer.id,
                incarnation,
                received=sorted(received),
                released=sorted(released - received),
                checkpoint=checkpoint,
            )
        )

    @precondition(lambda self: self.known)
    @rule(data=st.data(), checkpoint=st.booleans())
    def move(self, data: st.DataObject, *, checkpoint: bool) -> None:
        """The cursor, forwards or back."""
        snapshot, incarnation = self.someone(data)
        cursors = st.just(self.appended) | st.integers(0, self.appended)
        cursor = data.draw(cursors, "cursor")
        op = Advance(snapshot.consumer.id, incarnation, cursor=cursor, checkpoint=checkpoint)
        self.add(op)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def bind(self, data: st.DataObject) -> None:
        snapshot, incarnation = self.someone(data)
        cursor = data.draw(st.integers(0, self.appended), "cursor")
        self.add(Bind(snapshot.consumer.id, incarnation, cursor))

    @precondition(lambda self: self.known)
    @rule(
        data=st.data(),
        expiry_s=st.sampled_from([None, 0, 3]),
        keep_expiry=st.booleans(),
        qos0_after=st.none() | st.integers(0, 12),
    )
    def detach(
        self,
        data: st.DataObject,
        expiry_s: int | None,
        qos0_after: int | None,
        *,
        keep_expiry: bool,
    ) -> None:
        snapshot, incarnation = self.someone(data)
        self.add(
            Detach(
                snapshot.consumer.id,
                incarnation,
                self.now_ms,
                expiry_s=None if keep_expiry else expiry_s,
                keep_expiry=keep_expiry,
                qos0_after=qos0_after,
            )
        )

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        snapshot, incarnation = self.someone(data)
        self.add(Discard(snapshot.consumer.id, incarnation))

    @rule(limit=st.integers(1, 3))
    def expire(self, limit: int) -> None:
        self.add(Expire(self.now_ms, limit))

    @rule(
        op=st.one_of(
            st.builds(Retain, entries),
            st.builds(DropWill, st.sampled_from(INCARNATIONS)),
            st.builds(
                lambda client_id, incarnation, entry, delay_s: StoreWill(
                    Will(client_id, incarnation, b"ann", entry, delay_s)
                ),
                st.sampled_from(CLIENTS),
                st.sampled_from(INCARNATIONS),
                entries,
                st.sampled_from([0, 4_294_967_295]),
            ),
        )
    )
    def aside(self, op: Op) -> None:
        """What has nothing to do with consumers."""
        self.add(op)

    @rule(ms=st.sampled_from([1, 999, 1000, 5000]))
    def wait(self, ms: int) -> None:
        self.now_ms += ms

    # ------------------------------------------------------------------------ submitting

    @rule()
    def submit(self) -> None:
        """Every store applies the batch, and says the same of each operation."""
        batch, self.batch = replace(self.batch, stored_ms=self.now_ms), Batch()
        self.submitted += 1
        expected = [_told(outcome) for outcome in self.run(self.model.commit(batch))]
        for name, database in self.others.items():
            told = [_told(outcome) for outcome in self.run(database.commit(batch))]
            assert told == expected, name
        self.compare()

    @rule()
    def poison(self) -> None:
        """A batch that cannot be applied to its end leaves nothing, and is submitted without."""
        ops = [*self.batch.ops, object()]
        bad = Batch(list(self.batch.entries), ops, self.now_ms)  # type: ignore[arg-type]
        for database in (self.model, *self.others.values()):
            with pytest.raises(Exception, match=r".*"):
                self.run(database.commit(bad))
        self.compare()

    @rule(
        through=st.sampled_from([1, 0, 2, 3, 5, 8, 12, 20, 1000]),
        age_ms=st.sampled_from([-1, 0, 1000, 5000]),
        blocks_max=st.sampled_from([1, 2, 100]),
        marks_max=st.sampled_from([0, 1, 3, 100]),
        forced_age_ms=st.sampled_from([None, None, -1, 5000]),
    )
    def prune(
        self, through: int, age_ms: int, blocks_max: int, marks_max: int, forced_age_ms: int | None
    ) -> None:
        """The backends prune alike, within what the model allows, and the model follows."""
        self.submit()
        older_than_ms = 0 if forced_age_ms is None else self.now_ms - forced_age_ms
        op = Prune(
            through,
            self.now_ms - age_ms,
            blocks_max,
            marks_max,
            older_than_ms,
            now_ms=self.now_ms,
        )
        floor = self.run(self.model.store.log()).floor
        allowed = self.allowed(op)
        pruned = {name: self.run(db.do(op)) for name, db in self.others.items()}
        assert len(set(pruned.values())) <= 1
        for outcome in pruned.values():
            assert isinstance(outcome, Pruned)
            assert floor <= outcome.floor <= allowed
            assert outcome.blocks <= blocks_max
            assert outcome.more or outcome.floor >= min(op.through, self.appended)
            floor = outcome.floor
        if not pruned:
            floor = allowed
        follow = Prune(floor, 0, 1 << 30, marks_max, now_ms=self.now_ms)
        assert self.run(self.model.do(follow)).floor == floor
        self.compare()

    def allowed(self, op: Prune) -> int:
        """How far the model would prune, had it no bound."""
        store = self.model.store
        assert isinstance(store, MemoryStore)
        floor = max(store._tables.ends.floor, min(op.through, self.appended))
        while (stored := store._tables.history.get(floor + 1)) is not None:
            is_needed = floor + 1 > store._needed_after() or stored.stored_ms >= op.before_ms
            if is_needed and stored.stored_ms >= op.older_than_ms:
                break
            floor += 1
        return floor

    @rule()
    def reopen(self) -> None:
        """Everybody starts again; what was not submitted is lost."""
        self.batch = Batch()
        openings = self.open_or_reopen(self.model)
        for name, database in self.others.items():
            told = self.open_or_reopen(database)
            assert told == openings, name
        self.compare()

    def open_or_reopen(self, database: Database) -> Any:
        is_new = not hasattr(database, "opened")
        opened = self.run((database.open if is_new else database.reopen)(self.now_ms))
        return _ends(opened.log), opened.log.boot, counts(opened), wills(opened)

    # ------------------------------------------------------------------------- comparing

    def compare(self) -> None:
        """Everything that can be read without reopening."""
        expected = self.run(_state(self.model))
        for name, database in self.others.items():
            assert self.run(_state(database)) == expected, name
        self.known = {snapshot.consumer.client_id: snapshot for snapshot in expected[1]}
        self.appended = expected[0][0] + len(self.batch.entries)

    @precondition(lambda self: hasattr(self.model, "opened"))
    @rule(
        after=st.integers(0, 20),
        wanted=st.lists(st.sampled_from(FILTERS), min_size=1, max_size=3),
        qos=st.integers(1, 2),
        entries_max=st.sampled_from([1, 3, 100]),
        bytes_max=st.sampled_from([1, 3000, 1 << 20]),
    )
    def read(
        self, after: int, wanted: list[bytes], qos: int, entries_max: int, bytes_max: int
    ) -> None:
        """Reading by topic and by scan gives what the model gives."""
        accept = matching(*wanted, qos=qos)
        limits: dict[str, Any] = {"entries_max": entries_max, "bytes_max": bytes_max}
        whole = self.run(self.model.read_all(after, accept, **limits))
        first = self.run(self.model.read(after, accept, **limits))
        for name, database in self.others.items():
            for filters in ([], wanted):
                entries = self.run(database.read_all(after, accept, filters=filters, **limits))
                assert entries == whole, name
                chunk = self.run(database.read(after, accept, filters=filters, **limits))
                assert (chunk.head, chunk.loss) == (first.head, first.loss), name
                taken = len(chunk.entries)  # a chunk may be shorter, but not empty
                assert chunk.entries == first.entries[:taken], name
                assert taken or not first.entries, name
        topics = [*wanted, *TOPICS]
        newest = self.run(self.model.store.newest(topics))
        last = {entry.topic: entry.qos for entry in self.run(self.model.history())}
        for name, database in self.others.items():
            for topic, told, right in zip(
                topics, self.run(database.store.newest(topics)), newest, strict=True
            ):  # one with QoS 0 may hide it
                assert told == right or (told == 0 and last[topic] == 0), name

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self.model, "opened"):
            for name, database in (("memory", self.model), *self.others.items()):
                assert self.run(database.store.check()) == [], name


async def _state(database: Database) -> tuple[tuple[int, int], list[Snapshot], list[Entry], Any]:
    consumers, retained = await database.pages(100)
    ids = sorted(consumer.client_id for consumer in consumers)
    snapshots = [_anonymous(await database.snapshot(client_id)) for client_id in ids]
    history = await database.history()
    assert await database.store.fetch([entry.offset for entry in history]) == history
    return _ends(await database.store.log()), snapshots, sorted(retained), history


def _ends(log: LogState) -> tuple[int, int]:
    return log.head, log.floor


def _anonymous(snapshot: Snapshot) -> Snapshot:
    """Without the generation, which is random."""
    return replace(in_order(snapshot), consumer=replace(snapshot.consumer, generation=""))


def _told(outcome: Outcome) -> object:
    """An outcome in a form that compares."""
    if isinstance(outcome, Acquired):
        snapshot = outcome.snapshot
        return (
            outcome.existed,
            snapshot and _anonymous(snapshot),
            _ends(outcome.log),
            sorted(outcome.dropped),
            outcome.dropped_id,
        )
    if isinstance(outcome, tuple) and outcome and isinstance(outcome[0], Expired):
        return [(gone.client_id, sorted(gone.filters), gone.consumer_id) for gone in outcome]
    return outcome


SMALL: Final = {
    "storage.blocks.BLOCK_ENTRIES_MAX": 2,
    "storage.history.SLICE_BYTES_MAX": 200,
    "storage.history.TAIL_BLOCKS_MAX": 3,
    "storage.topics.TAIL_BLOCKS_MAX": 3,
    "storage.topics.TOPICS_CACHED_MAX": 3,
    "storage.topics._ROWS_MAX": 2,
    "storage.lmdb_store.MAP_BYTES": 1 << 17,
}
"""Limits of the engine, so small that a history of some ten entries goes beyond each of them."""


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("limits", [{}, SMALL], ids=["as shipped", "with small limits"])
def test_backends_do_what_the_model_does(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], *, long: bool
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(name, value)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=2000 if long else 40,
            stateful_step_count=80 if long else 40,
            deadline=None,
            derandomize=not long,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )

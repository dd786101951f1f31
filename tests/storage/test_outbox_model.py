"""Random outboxes: every backend does what the model in memory does, operation by operation.

The same machine as tests.storage.test_model, for the operations of the outbox: messages are
enqueued (alone, with a fenced Advance, as dead letters of sessions), claimed, extended, settled in
each way, released, reaped, expired, reissued and purged, with credentials that hold and with ones
that do not. After each batch figures, every message, dead letters and the audit are compared.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
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

from storage.api import Advance, Batch
from storage.outbox import (
    ClaimNext,
    Credential,
    DeadLetter,
    Enqueue,
    ExpireMessages,
    Extend,
    Failure,
    Purge,
    Reap,
    Reissue,
    Release,
    Settle,
    Verdict,
)
from tests.storage.harness import BACKENDS, NOW_MS, A, B, Database, Memory, message, scratch

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from storage.api import Entry, Op
    from storage.outbox import AuditRecord, Backlog, Message

OTHERS: Final = {name: make for name, make in BACKENDS.items() if name != "memory"}
QUEUES: Final = (b"hook", b"hoo", b"bridge", b"q" * 255)
WORKERS: Final = (b"1" * 16, b"2" * 16)
KEYS: Final = (b"", b"", b"a", b"b", b"k" * 5000)
TIMES: Final = (-1, 0, 1, 1000, 5000, 30_000)

bodies = st.builds(
    message,
    st.sampled_from([b"t", b"a/b", b"n" * 600]),
    st.sampled_from([b"", b"x", bytes(2000)]),
    qos=st.integers(1, 2),
    expires_ms=st.sampled_from([0, 0, NOW_MS + 1, NOW_MS + 4000, NOW_MS + 60_000]),
    properties=st.sampled_from([b"", b"\x01\x00"]),
)
failures = st.sampled_from([f for f in Failure if f is not Failure.NONE])


class Machine(RuleBasedStateMachine):
    """Each rule adds an operation to the open batch, or submits it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.disk = ExitStack()
        path = self.disk.enter_context(scratch())
        self.all = {name: Database(make(path)) for name, make in OTHERS.items()}
        self.all["memory"] = Database(Memory(path))
        self.now_ms = NOW_MS
        self.batch: list[Op] = []
        self.submitted = 0
        self.messages: list[Message] = []
        self.credentials: list[Credential] = []
        self.consumer_id = 0

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @initialize()
    def open(self) -> None:
        for database in self.all.values():
            self.run(database.open(self.now_ms))
            self.consumer_id = self.run(database.acquire()).consumer.id

    def teardown(self) -> None:
        with self.disk:
            self.disk.callback(self.loop.close)
            for database in self.all.values():
                self.disk.callback(self.run_stop, database)

    def run_stop(self, database: Database) -> None:
        self.run(database.stop())

    # ------------------------------------------------------------------- filling a batch

    def add(self, op: Op) -> None:
        """Add to the open batch; batches are of one, two, three, ... operations in turn."""
        self.batch.append(op)
        if len(self.batch) > self.submitted % 4:
            self.submit()

    def message_to(self, data: st.DataObject, body: Entry) -> Enqueue:
        return Enqueue(
            data.draw(st.sampled_from(QUEUES), "queue"),
            body,
            self.now_ms,
            not_before_ms=data.draw(st.sampled_from([0, self.now_ms + 1000]), "not before"),
            key=data.draw(st.sampled_from(KEYS), "key"),
            supersede_key=data.draw(st.sampled_from(KEYS), "supersede"),
            destination=data.draw(st.sampled_from([b"", b"dev"]), "destination"),
            attempts_max=data.draw(st.sampled_from([0, 1, 2, 6]), "attempts"),
            bound=data.draw(st.sampled_from([b"", b"\x01" * 16]), "bound"),
        )

    @rule(data=st.data(), some=st.lists(bodies, min_size=1, max_size=4))
    def enqueue(self, data: st.DataObject, some: list[Entry]) -> None:
        for body in some:
            self.batch.append(self.message_to(data, body._replace(offset=7)))
        self.submit()

    @rule(data=st.data(), some=st.lists(bodies, max_size=3), dead=st.lists(bodies, max_size=2))
    def advance(self, data: st.DataObject, some: list[Entry], dead: list[Entry]) -> None:
        """A consumer that enqueues what it passed, and gives deliveries up; fenced now and then."""
        erase = data.draw(st.booleans(), "erase")
        self.add(
            Advance(
                self.consumer_id,
                data.draw(st.sampled_from([A, A, B]), "incarnation"),
                settled=data.draw(st.sampled_from([(), (), (7,)]), "settled"),
                enqueue=[self.message_to(data, body) for body in some],
                dead=[
                    DeadLetter(body, Failure.TOO_LARGE, self.now_ms, attempts=3, erase=erase)
                    for body in dead
                ],
            )
        )

    @rule(
        queue=st.sampled_from(QUEUES),
        worker=st.sampled_from([*WORKERS, *WORKERS, *WORKERS, b"", bytes(16)]),
        lease_ms=st.sampled_from([1, 1000, 60_000]),
        limit=st.sampled_from([1, 2, 3, 256]),
        bytes_max=st.sampled_from([1, 2500, 1 << 20]),
    )
    def claim(self, queue: bytes, worker: bytes, lease_ms: int, limit: int, bytes_max: int) -> None:
        until_ms = self.now_ms + lease_ms
        self.add(ClaimNext(queue, worker, self.now_ms, until_ms, limit, bytes_max))

    def credential(self, data: st.DataObject) -> Credential:
        """One that was given once; now and then with a part that is missing or another's."""
        given = data.draw(st.sampled_from(self.credentials[-12:]), "credential")
        worker = data.draw(st.sampled_from([given.worker] * 6 + [b"", WORKERS[0]]), "worker")
        claim = data.draw(st.sampled_from([given.claim] * 6 + [0, 1]), "claim")
        number = data.draw(st.sampled_from([given.message_id] * 6 + [0, 1, 999]), "id")
        return Credential(number, worker, claim)

    @precondition(lambda self: self.credentials)
    @rule(data=st.data(), verdict=st.sampled_from(Verdict), failure=failures, erase=st.booleans())
    def settle(
        self, data: st.DataObject, verdict: Verdict, failure: Failure, *, erase: bool
    ) -> None:
        due_ms = self.now_ms + data.draw(st.sampled_from(TIMES), "due")
        failure = Failure.NONE if verdict is Verdict.DONE else failure
        self.add(Settle(self.credential(data), self.now_ms, verdict, failure, due_ms, erase))

    @precondition(lambda self: self.credentials)
    @rule(data=st.data(), by_ms=st.sampled_from(TIMES))
    def extend(self, data: st.DataObject, by_ms: int) -> None:
        self.add(Extend(self.credential(data), self.now_ms, self.now_ms + by_ms))

    @precondition(lambda self: self.credentials)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.add(Release(self.credential(data), self.now_ms))

    @rule(limit=st.sampled_from([1, 2, 100]), delays_ms=st.sampled_from([(1,), (5, 1000)]))
    def reap(self, limit: int, delays_ms: tuple[int, ...]) -> None:
        self.add(Reap(self.now_ms, limit, delays_ms))

    @rule(limit=st.sampled_from([1, 100]))
    def expire(self, limit: int) -> None:
        self.add(ExpireMessages(self.now_ms, limit))

    @precondition(lambda self: self.messages)
    @rule(data=st.data(), attempts_max=st.sampled_from([None, 0, 1]))
    def reissue(self, data: st.DataObject, attempts_max: int | None) -> None:
        dead = [m.id for m in self.messages if m.failure] or [1]
        message_id = data.draw(st.sampled_from([*dead * 3, 1, 999]), "id")
        self.add(Reissue(message_id, self.now_ms, b"ann", attempts_max))

    @rule(
        data=st.data(),
        limit=st.sampled_from([1, 3, 1000]),
        queue=st.sampled_from([b"", b"", b"never", *QUEUES]),
    )
    def purge(self, data: st.DataObject, limit: int, queue: bytes) -> None:
        times = st.sampled_from([0, self.now_ms - 1000, self.now_ms, self.now_ms + 1])
        done_ms, dead_ms, audit_ms = (data.draw(times, name) for name in ("done", "dead", "audit"))
        self.add(Purge(done_ms, dead_ms, limit, queue, audit_ms))

    @rule(ms=st.sampled_from([1, 999, 1000, 5000, -1000]))
    def wait(self, ms: int) -> None:
        """Also backwards: a wall clock that was set back over a restart."""
        self.now_ms += ms

    # ------------------------------------------------------------------------ submitting

    @rule()
    def submit(self) -> None:
        """Every store applies the batch, and says the same of each operation."""
        ops, self.batch = self.batch, []
        self.submitted += 1
        told = {}
        for name, database in self.all.items():
            told[name] = self.run(database.write(*ops, stored_ms=self.now_ms))
        assert all(outcomes == told["memory"] for outcomes in told.values()), told
        self.compare()

    @rule()
    def poison(self) -> None:
        """A batch that cannot be applied to its end leaves nothing, and is submitted without."""
        for database in self.all.values():
            bad = Batch([], [*self.batch, object()], self.now_ms)  # type: ignore[list-item]
            with pytest.raises(Exception, match=r".*"):
                self.run(database.commit(bad))
        self.compare()

    @rule()
    def reopen(self) -> None:
        """Claims survive their worker; what was not submitted is lost."""
        self.batch = []
        for database in self.all.values():
            self.run(database.reopen(self.now_ms))
            self.run(database.acquire())
        self.compare()

    def compare(self) -> None:
        states = {name: self.run(_state(database)) for name, database in self.all.items()}
        assert all(state == states["memory"] for state in states.values()), states
        self.messages = states["memory"][1]
        for one in self.messages:
            if one.claim and one.credential not in self.credentials:
                self.credentials.append(one.credential)

    @invariant()
    def is_sound(self) -> None:
        for name, database in self.all.items():
            if hasattr(database, "opened"):
                assert self.run(database.store.check()) == [], name


State = tuple[
    list["Backlog"], list["Message"], list[list["Message"]], list["AuditRecord"], list[int]
]


async def _state(database: Database) -> State:
    """Everything that can be read."""
    outbox = database.store.outbox
    figures = await outbox.backlog()
    shown = [await outbox.show(number) for number in range(1, 200)]
    dead = [await _pages(database, one.queue) for one in figures]
    snapshot = await database.snapshot()
    return (
        figures,
        [one for one in shown if one is not None],
        dead,
        await outbox.audit(),
        [snapshot.consumer.cursor, len(snapshot.claims)],
    )


async def _pages(database: Database, queue: bytes) -> list[Message]:
    found: list[Message] = []
    after = (0, 0)
    while page := await database.store.outbox.dead_letters(queue, after, 2):
        found += page
        after = page[-1].ended_ms, page[-1].id
    return found


@pytest.mark.timeout(7200)
def test_backends_do_what_the_model_does(*, long: bool) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=2000 if long else 60,
            stateful_step_count=80 if long else 50,
            deadline=None,
            derandomize=not long,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )

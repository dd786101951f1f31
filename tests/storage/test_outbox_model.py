"""Random outboxes: every backend does what the model in memory does, operation by operation.

Messages are enqueued (alone, with a fenced Advance, as dead letters of sessions), claimed, extended
and settled in each way, released, reaped, expired, reissued and purged, with credentials that hold
and with ones that do not; the database is reopened in between. After each batch outcomes, figures,
every message, dead letters and the audit are compared. ``Walk.step`` is driven twice: by a seeded
walk, which is dense (it must have seen every outcome there is), and by Hypothesis, which shrinks.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from storage.api import Advance, Batch
from storage.errors import ClaimNotHeld, ReissueRefused
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
    State,
    Verdict,
)
from storage.outbox.rights import OPERATIONS, Role
from tests.storage.harness import BACKENDS, NOW_MS, A, B, Database, message, scratch

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from storage.api import Entry, Op, Outcome
    from storage.outbox import Message

QUEUES: Final = (b"hook", b"hook", b"hook", b"hoo", b"q" * 255)
WORKERS: Final = (b"1" * 16, b"2" * 16)
KEYS: Final = (b"", b"", b"a", b"k" * 5000)
FAILURES: Final = [failure for failure in Failure if failure is not Failure.NONE]
TIMES_MS: Final = (0, 1, 999, 1000, 5000, 30_000)

Pick = Callable[[Sequence[Any]], Any]
"""Chooses one of some."""


class Walk:
    """One database of each backend, and what is done to all of them alike.

    as_roles: each operation is submitted by itself, in the name of the role whose it is; else in
        batches of one, two, three, ... operations. kinds: of backends; memory is one of them.
    """

    def __init__(self, *, as_roles: bool, kinds: Sequence[str] = tuple(BACKENDS)) -> None:
        self.as_roles = as_roles
        self.loop = asyncio.new_event_loop()
        self.disk = ExitStack()
        path = self.disk.enter_context(scratch())
        self.all = {name: Database(BACKENDS[name](path)) for name in kinds}
        self.now_ms = NOW_MS
        self.batch: list[Op] = []
        self.submitted = 0
        self.messages: list[Message] = []
        self.given: list[Credential] = []
        self.consumer_id = 0
        self.seen: Counter[tuple[str, str]] = Counter()
        for database in self.all.values():
            self.run(database.open(self.now_ms))
            self.consumer_id = self.run(database.acquire()).consumer.id

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def stop(self) -> None:
        with self.disk:
            self.disk.callback(self.loop.close)
            for database in self.all.values():
                self.disk.callback(self.run_stop, database)

    def run_stop(self, database: Database) -> None:
        self.run(database.stop())

    # -------------------------------------------------------------------------------- steps

    def step(self, pick: Pick) -> None:
        """Do something."""
        steps: list[Callable[[Pick], Any]] = [
            *[self.enqueue] * 4,
            *[self.settle_all] * 3,
            *[self.settle_one] * 3,
            *[self.claim] * 3,
            *[self.wait] * 3,
            *[self.sweep] * 3,
            *[self.reissue] * 2,
            self.advance,
            self.poison,
            self.reopen,
        ]
        pick(steps)(pick)

    def add(self, op: Op) -> None:
        self.batch.append(op)
        if len(self.batch) > self.submitted % 4:
            self.submit()

    def body(self, pick: Pick) -> Entry:
        return message(
            pick([b"t", b"a/b", b"n" * 600]),
            pick([b"", b"x", bytes(2000)]),
            qos=pick([1, 2]),
            expires_ms=pick([0, 0, 0, *(self.now_ms + ms for ms in (1, 4000, 10**6))]),
            properties=pick([b"", b"\x01\x00"]),
        )._replace(offset=pick([0, 7]))

    def to_enqueue(self, pick: Pick) -> Enqueue:
        return Enqueue(
            pick(QUEUES),
            self.body(pick),
            self.now_ms,
            not_before_ms=pick([0, 0, self.now_ms + 1000]),
            key=pick(KEYS),
            supersede_key=pick(KEYS),
            destination=pick([b"", b"dev"]),
            attempts_max=pick([0, 1, 2, 2]),
        )

    def enqueue(self, pick: Pick) -> None:
        for _ in range(pick([1, 2, 5])):
            self.add(self.to_enqueue(pick))

    def advance(self, pick: Pick) -> None:
        """A consumer that enqueues what it passed, and gives deliveries up; fenced now and then."""
        erase = pick([False, True])
        self.add(
            Advance(
                self.consumer_id,
                pick([A, A, B]),
                settled=pick([(), (), (7,)]),
                enqueue=[self.to_enqueue(pick) for _ in range(pick([0, 1, 3]))],
                dead=[
                    DeadLetter(self.body(pick), Failure.TOO_LARGE, self.now_ms, 3, erase)
                    for _ in range(pick([0, 1, 2]))
                ],
            )
        )

    def claim(self, pick: Pick) -> None:
        worker = pick([*WORKERS, *WORKERS, *WORKERS, b"", bytes(16)])
        until_ms = self.now_ms + pick([1, 1000, 60_000])
        limit, bytes_max = pick([1, 2, 3, 256]), pick([1, 2500, 1 << 20])
        self.add(ClaimNext(pick(QUEUES), worker, self.now_ms, until_ms, limit, bytes_max))

    def settle_all(self, pick: Pick) -> None:
        """All that is claimed, in time or not, each in its way; some in more ways than one."""
        self.now_ms += pick([0, 0, 0, 1, 1000])
        for one in self.messages:
            if one.state is State.CLAIMED:
                for _ in range(pick([1, 1, 2])):
                    self.add(self.fate(pick, one.credential))

    def settle_one(self, pick: Pick) -> None:
        """One that is claimed or was; now and then with a part that is missing or another's."""
        if not self.given:
            return
        held = [one.credential for one in self.messages if one.until_ms > self.now_ms]
        credential = pick([*held * 3, *self.given[-5:], pick(self.given)])
        message_id = pick([credential.message_id] * 6 + [0, 1, 999])
        worker = pick([credential.worker] * 6 + [b"", WORKERS[0]])
        claim = pick([credential.claim] * 6 + [0, 1])
        self.add(self.fate(pick, Credential(message_id, worker, claim)))

    def fate(self, pick: Pick, held: Credential) -> Op:
        now_ms, failure = self.now_ms, pick(FAILURES)
        later_ms = now_ms + pick([-1, *TIMES_MS])
        fates: list[Op] = [
            Settle(held, now_ms, Verdict.DONE),
            *[Settle(held, now_ms, Verdict.RETRY, failure, later_ms)] * 2,
            Settle(held, now_ms, Verdict.DEAD, failure),
            Settle(held, now_ms, Verdict.DEAD, failure, erase=True),
            Settle(held, now_ms, Verdict.EXPIRED, Failure.EXPIRED),
            Extend(held, now_ms, later_ms),
            Release(held, now_ms),
        ]
        chosen: Op = pick(fates)
        return chosen

    def sweep(self, pick: Pick) -> None:
        past_ms = [0, 0, 0, self.now_ms - 5000, self.now_ms, self.now_ms + 1]
        done_ms, dead_ms, audit_ms = pick(past_ms), pick(past_ms), pick(past_ms)
        limit = pick([1, 2, 1000])
        queue = pick([b"", b"", b"never", *QUEUES])
        delays_ms: tuple[int, ...] = pick([(1,), (5, 1000), ()])
        ops: list[Op] = [
            *[Reap(self.now_ms, limit, delays_ms, all_leases=pick([False, False, True]))] * 2,
            ExpireMessages(self.now_ms, limit),
            Purge(done_ms, dead_ms, limit, queue, audit_ms),
        ]
        self.add(pick(ops))

    def reissue(self, pick: Pick) -> None:
        dead = [one.id for one in self.messages if one.state is State.DEAD]
        ended = [one.id for one in self.messages if one.ended_ms]
        message_id = pick([*dead * 3, *ended, 1, 999])
        self.add(Reissue(message_id, self.now_ms, b"ann", pick([None, 0, 1])))

    def wait(self, pick: Pick) -> None:
        """Also backwards: a wall clock that was set back over a restart."""
        self.now_ms += pick([*TIMES_MS, -1000])

    def poison(self, _: Pick) -> None:
        """A batch that cannot be applied to its end leaves nothing, and is submitted without."""
        for database in self.all.values():
            bad = Batch([], [*self.batch, object()], self.now_ms)  # type: ignore[list-item]
            with pytest.raises(Exception, match=r".*"):
                self.run(database.commit(bad))
        self.compare()

    def reopen(self, _: Pick) -> None:
        """Claims survive their worker; what was not submitted is lost."""
        self.batch = []
        for database in self.all.values():
            self.run(database.reopen(self.now_ms))
            self.run(database.acquire())
        self.compare()

    # ------------------------------------------------------------------------ comparing

    def submit(self) -> None:
        """Every store applies the batch, and says the same of each operation."""
        ops, self.batch = self.batch, []
        self.submitted += 1
        told = {name: self.run(self.write(db, ops)) for name, db in self.all.items()}
        assert all(outcomes == told["memory"] for outcomes in told.values()), told
        for op, outcome in zip(ops, told["memory"], strict=True):
            self.seen[kind(op, outcome)] += 1
        self.compare()

    async def write(self, database: Database, ops: list[Op]) -> list[Outcome]:
        if not self.as_roles:
            return await database.write(*ops, stored_ms=self.now_ms)
        outcomes: list[Outcome] = []
        for op in ops:
            role = next((r for r, own in OPERATIONS.items() if type(op) in own), Role.BROKER)
            outcomes += await database.commit(Batch([], [op], self.now_ms, role))
        return outcomes

    def compare(self) -> None:
        states = {name: self.run(state(database)) for name, database in self.all.items()}
        for name, one in states.items():
            assert one == states["memory"], name
            assert self.run(self.all[name].store.check()) == [], name
        self.messages = states["memory"][1]
        for shown in self.messages:
            if shown.claim and shown.credential not in self.given:
                self.given.append(shown.credential)


async def state(database: Database) -> tuple[Any, list[Message], Any, Any, Any]:
    """Everything that can be read."""
    outbox = database.store.outbox
    figures = await outbox.backlog()
    shown: list[Message] = []
    number = missing = 0
    while missing < 200:  # purged ones leave gaps
        number += 1
        one = await outbox.show(number)
        missing = missing + 1 if one is None else 0
        shown += [] if one is None else [one]
    dead = [await dead_letters(database, one.queue) for one in figures]
    cursor = (await database.snapshot()).consumer.cursor
    return figures, shown, dead, await outbox.audit(), cursor


async def dead_letters(database: Database, queue: bytes) -> list[Message]:
    """Two at a time."""
    found: list[Message] = []
    after = (0, 0)
    while page := await database.store.outbox.dead_letters(queue, after, 2):
        found += page
        after = page[-1].ended_ms, page[-1].id
    return found


# ------------------------------------------------------------------------- what was seen


def kind(op: Op, outcome: Outcome) -> tuple[str, str]:
    """An operation, and what became of it."""
    if isinstance(outcome, ClaimNotHeld | ReissueRefused):
        return type(op).__name__, outcome.found
    if isinstance(op, Settle) and isinstance(outcome, State):
        return type(op).__name__, f"{op.verdict.name} {outcome.name}"
    if isinstance(outcome, tuple):
        return type(op).__name__, "".join("01"[bool(value)] for value in outcome)
    return type(op).__name__, type(outcome).__name__


ENDED: Final = ("done", "dead", "superseded", "expired")
EXPECTED: Final = {
    *(("Settle", f) for f in ("waiting", "claimed", "lapsed", "gone", "incomplete", *ENDED)),
    *(("Settle", f) for f in ("DONE DONE", "RETRY WAITING", "RETRY DEAD", "DEAD DEAD")),
    *(("Extend", f) for f in ("NoneType", "lapsed", "waiting", "incomplete")),
    *(("Release", f) for f in ("NoneType", "lapsed", "waiting", "incomplete")),
    *(("Advance", f) for f in ("NoneType", "Fenced")),
    *(("ClaimNext", f) for f in ("incomplete", "0000", "1000", "1001", "1100")),
    *(("Enqueue", f) for f in ("110", "111", "100")),
    *(("Reap", f) for f in ("000", "100")),
    *(("Purge", f) for f in ("000", "100", "010")),
    *(("Reissue", f) for f in ("11", "live", "erased", "reissued", "done", "gone")),
    ("Settle", "EXPIRED EXPIRED"),
    ("ExpireMessages", "1"),
}


# -------------------------------------------------------------------------------- drivers


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("as_roles", [False, True], ids=["in batches", "as roles"])
def test_backends_do_what_the_model_does(*, as_roles: bool, long: bool) -> None:
    seed = random.SystemRandom().randrange(1 << 32) if long else 0
    print(f"seed {seed}")  # noqa: T201 - shown when it fails, and put there to replay it
    seen: Counter[tuple[str, str]] = Counter()
    for number in range(100 if long else 20):
        if not long and not EXPECTED - set(seen):
            break
        walk = Walk(as_roles=as_roles)
        choose = random.Random(f"{seed} {number}").choice  # noqa: S311 - not for secrets
        try:
            for _ in range(300):
                walk.step(choose)
        finally:
            walk.stop()
        seen += walk.seen
    missing = sorted(EXPECTED - set(seen))
    assert not missing


class Machine(RuleBasedStateMachine):
    """The same steps, chosen by Hypothesis."""

    def __init__(self) -> None:
        super().__init__()
        self.walk = Walk(as_roles=False)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.walk.step(lambda options: data.draw(st.sampled_from(list(options))))

    def teardown(self) -> None:
        self.walk.stop()


@pytest.mark.timeout(7200)
def test_hypothesis_finds_no_difference(*, long: bool) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=2000 if long else 20,
            stateful_step_count=80 if long else 30,
            deadline=None,
            derandomize=not long,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )

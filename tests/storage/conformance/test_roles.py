"""Least privilege: what a role may not do is refused, whichever backend it is."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from storage.api import Acquire, Advance, Batch, Op, Retain
from storage.clock import ManualClock
from storage.errors import ReissueRefused, RoleRefused
from storage.outbox import (
    ClaimNext,
    Credential,
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
from storage.roles import Handles, Janitor, Operator, Producer, Worker
from tests.storage.harness import NOW_MS, A, Database, message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HELD = Credential(1, b"w" * 16, 1)
OPS: list[Op] = [
    Enqueue(b"hook", message(), NOW_MS),
    ClaimNext(b"hook", b"w" * 16, NOW_MS, NOW_MS + 1000),
    Extend(HELD, NOW_MS, NOW_MS + 1),
    Settle(HELD, NOW_MS, Verdict.DONE),
    Release(HELD, NOW_MS),
    Reap(NOW_MS, 10),
    ExpireMessages(NOW_MS, 10),
    Reissue(1, NOW_MS, b"ann"),
    Purge(NOW_MS, NOW_MS, 10),
    Acquire(b"dev", A, b"", NOW_MS),
    Advance(1, A),
    Retain(message()),
]


@pytest.fixture
def clock() -> ManualClock:
    """Begins where the database was opened."""
    return ManualClock(NOW_MS)


@pytest.fixture
async def handles(db: Database, clock: ManualClock) -> AsyncIterator[Handles]:
    """All roles over one store."""
    made = Handles(db.store, clock)
    yield made
    await made.drain()
    made.close()


@pytest.mark.parametrize("role", [r for r in Role if r is not Role.BROKER], ids=lambda r: r.value)
@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
async def test_a_role_may_do_its_own_operations_and_no_others(
    db: Database, role: Role, op: Op
) -> None:
    await db.do(Enqueue(b"hook", message(), NOW_MS))
    before = await db.dump()
    batch = Batch([], [op], NOW_MS, role)
    if type(op) in OPERATIONS[role]:
        await db.commit(batch)
        return
    with pytest.raises(RoleRefused) as refused:
        await db.commit(batch)
    assert refused.value == RoleRefused(role.value, type(op).__name__)
    assert await db.dump() == before
    assert [one.waiting for one in await db.store.outbox.backlog()] == [1]


async def test_a_batch_with_one_foreign_operation_is_refused_whole(db: Database) -> None:
    mine, foreign = Enqueue(b"hook", message(), NOW_MS), Reap(NOW_MS, 1)
    with pytest.raises(RoleRefused):
        await db.commit(Batch([], [mine, foreign], NOW_MS, Role.PRODUCER))
    with pytest.raises(RoleRefused):
        await db.commit(Batch([message()._replace(offset=1)], [mine], NOW_MS, Role.PRODUCER))
    assert await db.store.outbox.backlog() == []


def test_a_handle_has_the_methods_of_its_role_and_no_others() -> None:
    methods = {
        kind: {name for name in vars(kind) if not name.startswith("_")}
        for kind in (Producer, Worker, Operator, Janitor)
    }
    assert methods == {
        Producer: {"enqueue"},
        Worker: {"claim", "extend", "done", "failed", "release"},
        Operator: {"backlog", "dead_letters", "show", "audit", "reissue"},
        Janitor: {"reap", "reap_all", "expire", "purge", "sweep"},
    }


async def test_handles_carry_a_message_from_enqueue_to_reissue(
    handles: Handles, clock: ManualClock
) -> None:
    producer, operator = handles.producer(b"hook"), handles.operator()
    worker, janitor = handles.worker(b"hook", chance=lambda: 0.5), handles.janitor()
    ids = [(await producer.enqueue(message(payload=b"%d" % n))).id for n in range(3)]
    first, second, third = (await worker.claim()).messages
    assert [first.id, second.id, third.id] == ids
    assert await worker.done(first)
    assert await worker.failed(second, Failure.REJECTED) is State.DEAD
    assert await worker.extend(third)
    assert await worker.failed(third, Failure.THROTTLED, retry_at_ms=NOW_MS + 7) is State.WAITING
    (figures,) = await operator.backlog()
    assert (figures.waiting, figures.done, figures.dead, figures.oldest_due_ms) == (
        1,
        1,
        1,
        NOW_MS + 7,
    )
    (letter,) = await operator.dead_letters(b"hook")
    fresh = await operator.reissue(letter.id, b"ann")
    with pytest.raises(ReissueRefused):
        await operator.reissue(letter.id, b"ann")
    clock.advance(ms=10)
    assert [one.id for one in (await worker.claim()).messages] == [fresh.id, third.id]
    clock.advance(ms=worker.lease_ms)
    assert (await janitor.reap()).waiting == (third.id, fresh.id)
    assert await janitor.purge(done_kept_ms=0, dead_kept_ms=0) == (2, 0, False)
    assert not await janitor.sweep()
    assert [record.actor for record in await operator.audit()] == [b"ann"]


@pytest.mark.case("HK-02")
@pytest.mark.case("HK-07")
async def test_a_refused_ack_is_counted_and_logged_once_and_the_batch_goes_on(
    handles: Handles, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    producer, worker = handles.producer(b"hook"), handles.worker(b"hook")
    for _ in range(2):
        await producer.enqueue(message())
    lost, kept = (await worker.claim()).messages
    clock.advance(ms=worker.lease_ms - 1)
    assert await worker.extend(kept)
    clock.advance(ms=1)
    with caplog.at_level(logging.WARNING, "amqtt_durable.outbox"):
        assert not await worker.done(lost)
        assert await worker.failed(lost, Failure.UNAVAILABLE) is None
        assert not await worker.extend(lost)
        assert not await worker.release(lost)
        assert await worker.done(kept)
    assert worker.refused == 4
    assert [record.getMessage() for record in caplog.records] == [
        f"ack refused, claim no longer held: message {lost.id} of b'hook' (lapsed)"
    ]


@pytest.mark.parametrize("turns", range(6))
async def test_a_claim_whose_caller_is_cancelled_is_given_back(
    handles: Handles, turns: int
) -> None:
    producer, worker = handles.producer(b"hook"), handles.worker(b"hook")
    sent = await producer.enqueue(message())
    claiming = asyncio.ensure_future(worker.claim())
    for _ in range(turns):
        await asyncio.sleep(0)
    claiming.cancel()
    result = await asyncio.gather(claiming, return_exceptions=True)
    await handles.drain()
    if isinstance(result[0], BaseException):
        (message_again,) = (await worker.claim()).messages
        assert (message_again.id, message_again.attempts) == (sent.id, 0)

"""What is there after a restart: everything, under the same identity, with owners detached."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from storage.api import Bind, Detach, LogState, Retain, StoreWill, Will
from storage.errors import StoreUnavailable, StoreUnusable
from tests.storage.conformance.test_fences import someone
from tests.storage.harness import NOW_MS, A, Database, message

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def test_a_new_database_opens_empty(db: Database) -> None:
    opened = db.opened
    assert opened.filters == ()
    assert opened.wills == ()
    assert (opened.log.boot, opened.log.head, opened.log.floor) == (1, 0, 0)
    assert len(opened.log.generation) == len(opened.log.db_id) == 32
    int(opened.log.generation + opened.log.db_id, 16)
    assert opened.log == await db.store.log()


async def test_identity_stays_and_boots_are_counted(db: Database) -> None:
    first = db.opened.log
    for boot in (2, 3, 4):
        opened = await db.reopen()
        assert opened.log == LogState(first.db_id, first.generation, boot, 0, 0)
        assert opened.log == await db.store.log()
        assert opened.minted == ""


async def test_two_databases_are_not_the_same(db: Database) -> None:
    log = await db.store.log()
    assert log.db_id != log.generation


async def test_everything_is_there_again(db: Database) -> None:
    await someone(db)
    await db.subscriber(b"other", b"t", b"u/#", b"v", qos=2)
    await db.write(
        Retain(message(b"r/1", b"1")),
        Retain(message(b"r/2", b"2")),
        StoreWill(Will(b"dev", A, b"", message(b"w"), delay_s=5)),
    )
    await db.prune(through=1)
    before = await db.dump()
    assert set(before.consumers) == {b"dev", b"other"}
    assert before.filters == {b"t": 2, b"u/#": 1, b"v": 1}
    assert len(before.retained) == 2
    assert set(before.wills) == {A}
    for _ in range(3):
        assert await db.dump() == before


async def test_an_owner_that_was_attached_is_detached_now_and_one_that_had_left_then(
    db: Database,
) -> None:
    left = await db.subscriber(b"left", b"t")
    await db.subscriber(b"here", b"t")
    await db.do(Detach(left.id, A, NOW_MS + 1))
    await db.reopen(NOW_MS + 1000)
    assert (await db.snapshot(b"left")).consumer.detached_ms == NOW_MS + 1
    here = (await db.snapshot(b"here")).consumer
    assert (here.detached_ms, here.incarnation) == (NOW_MS + 1000, A)
    await db.reopen(NOW_MS + 2000)
    assert (await db.snapshot(b"here")).consumer.detached_ms == NOW_MS + 1000


async def test_appending_goes_on_where_it_ended(db: Database) -> None:
    await db.append(message(), message())
    await db.reopen()
    (third,) = await db.append(message())
    assert third.offset == 3
    with pytest.raises(AssertionError):
        await db.write(entries=[third])


async def test_the_head_is_remembered_when_nothing_is_left(db: Database) -> None:
    await db.append_each(message(), message(), message())
    await db.prune(through=3)
    opened = await db.reopen()
    assert (opened.log.head, opened.log.floor) == (3, 3)
    (fourth,) = await db.append(message())
    assert fourth.offset == 4


# ------------------------------------------------------------------------- a swapped database


@pytest.mark.case("HK-16")
async def test_a_backup_that_was_put_back_is_another_generation(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await db.append(message(), message())
    await db.move(consumer, 2)
    await db.store.close()
    db.backend.back_up()
    first = (await db.reopen()).log
    await db.append(message(), message())
    consumer = (await db.acquire()).consumer
    await db.move(consumer, 4)
    await db.store.close()
    db.backend.restore()
    opened = await db.reopen()
    assert opened.minted
    assert opened.log.db_id == first.db_id
    assert opened.log.generation != first.generation
    assert opened.log.head == 2
    stored = (await db.snapshot()).consumer
    assert (stored.generation, stored.cursor) == (first.generation, 2)
    await db.reopen()
    log = await db.store.log()
    assert log.generation == opened.log.generation, "once is enough"
    assert db.opened.minted == ""
    assert (await db.snapshot()).consumer.generation == first.generation


async def test_acquire_and_detach_leave_a_consumer_at_the_generation_it_has(db: Database) -> None:
    consumer = await db.subscriber(b"dev", b"t")
    await db.store.close()
    db.backend.back_up()
    db.backend.restore()
    opened = await db.reopen()
    assert consumer.generation != opened.log.generation
    assert (await db.acquire()).consumer.generation == consumer.generation
    await db.do(Detach(consumer.id, A, NOW_MS))
    assert (await db.snapshot()).consumer.generation == consumer.generation
    await db.do(Bind(consumer.id, A, 0))
    assert (await db.snapshot()).consumer.generation == opened.log.generation
    assert (await db.acquire(b"new")).consumer.generation == opened.log.generation


# ------------------------------------------------------------------------------ open and shut


async def test_a_store_that_is_open_is_not_opened_again(db: Database) -> None:
    for store in (db.store, db.backend.start()):
        with pytest.raises(StoreUnusable):
            await store.open(now_ms=NOW_MS)
    await db.append(message())
    assert (await db.store.log()).boot == 1


async def test_a_store_that_is_closed_says_so(db: Database) -> None:
    await db.store.close()
    with pytest.raises(StoreUnavailable):
        await db.write(entries=[message()._replace(offset=1)])
    reads: list[Callable[[], Awaitable[object]]] = [
        db.read,
        db.history,
        db.store.log,
        db.store.consumers,
        db.store.retained,
        lambda: db.store.snapshot(b"dev"),
        lambda: db.store.fetch([1]),
    ]
    for read in reads:
        with pytest.raises(StoreUnavailable):
            await read()
    await db.reopen()
    assert (await db.store.log()).head == 0

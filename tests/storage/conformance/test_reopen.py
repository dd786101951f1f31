"""What is there after a restart: everything, under the same identity, with owners detached."""

from __future__ import annotations

import pytest

from storage.api import Detach, LogState, Retain, StoreWill, Will
from tests.storage.conformance.test_fences import someone
from tests.storage.harness import NOW_MS, A, Database, message


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

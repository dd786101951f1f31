"""The faults do what they say: the tests of the broker stand on them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from storage.api import Batch, Store
from storage.errors import StoreFull, StoreUnavailable
from storage.memory import MemoryStore
from tests.storage.faults import FaultyStore, crash, lose_tail, restore
from tests.storage.harness import NOW_MS, A, Database, Memory, message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from storage.api import Outcome


@pytest.fixture
async def store() -> AsyncIterator[FaultyStore]:
    """An open store in memory that fails when it is told to."""
    faulty = FaultyStore(MemoryStore())
    await faulty.open(now_ms=NOW_MS)
    yield faulty
    assert await faulty.check() == []
    await faulty.close()


def submit(store: Store, *offsets: int) -> asyncio.Future[object]:
    """Submit a batch; the future gets its outcomes or its error, as a result."""
    future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    entries = [message()._replace(offset=offset) for offset in offsets]
    store.submit(Batch(entries), future.set_result)
    return future


async def test_without_faults_it_is_the_store_it_wraps(store: FaultyStore) -> None:
    assert isinstance(store, Store)
    assert await submit(store, 1, 2) == []
    assert (await store.log()).head == 2
    assert store.applied == store.batches
    assert len(store.batches) == 1


async def test_the_nth_submit_fails_before_anything_is_applied(store: FaultyStore) -> None:
    error = StoreFull("no space")
    store.fail_submit(error, nth=2, times=2)
    results = [submit(store, 1), submit(store, 2), submit(store, 2), submit(store, 2)]
    assert await asyncio.gather(*results) == [[], error, error, []]
    assert (await store.log()).head == 2
    assert len(store.batches) == 4
    assert [batch.entries[0].offset for batch in store.applied] == [1, 2]


async def test_answers_keep_the_order_of_the_batches(store: FaultyStore) -> None:
    answered: list[int] = []

    def done(number: int, _: list[Outcome] | BaseException) -> None:
        answered.append(number)

    store.fail_submit(StoreFull("no space"), nth=2)
    for number in range(4):
        store.submit(Batch(), lambda result, number=number: done(number, result))  # type: ignore[misc]
    await submit(store)
    assert answered == [0, 1, 2, 3]


async def test_a_submit_that_hangs_holds_up_those_behind_it(store: FaultyStore) -> None:
    gate = store.hang_submit(nth=2)
    first, second, third = submit(store, 1), submit(store, 2), submit(store, 3)
    await gate.reached.wait()
    assert await first == []
    for _ in range(5):
        await asyncio.sleep(0)
    assert not second.done()
    assert not third.done()
    assert (await store.log()).head == 1
    gate.release()
    assert [await second, await third] == [[], []]
    assert (await store.log()).head == 3
    assert await submit(store, 4) == []


async def test_a_submit_that_hangs_may_end_in_an_error(store: FaultyStore) -> None:
    gate = store.hang_submit()
    result = submit(store, 1)
    await gate.reached.wait()
    error = StoreUnavailable("gone")
    gate.release(error)
    assert await result == error
    assert (await store.log()).head == 0


async def test_each_batch_may_be_delayed(store: FaultyStore) -> None:
    store.delay_s = 0.001
    results = [submit(store, 1), submit(store, 2)]
    assert (await store.log()).head == 0
    assert await asyncio.gather(*results) == [[], []]


async def test_reads_fail_or_hang_by_number(store: FaultyStore) -> None:
    store.fail_read(StoreUnavailable("disk"), nth=2)
    assert (await store.log()).head == 0
    with pytest.raises(StoreUnavailable):
        await store.snapshot(b"dev")
    assert await store.snapshot(b"dev") is None
    gate = store.hang_read()
    task = asyncio.create_task(store.retained())
    await gate.reached.wait()
    assert not task.done()
    gate.release()
    assert await task == []


async def test_healing_forgets_what_has_not_happened_yet(store: FaultyStore) -> None:
    store.fail_submit(StoreFull("no space"), times=100)
    store.fail_read(StoreUnavailable("disk"), times=100)
    assert isinstance(await submit(store, 1), StoreFull)
    store.heal()
    assert await submit(store, 1) == []
    assert (await store.log()).head == 1


# ------------------------------------------------------------------ damage to a MemoryStore


def in_memory() -> tuple[Database, MemoryStore]:
    database = Database(Memory(Path()))
    assert isinstance(database.store, MemoryStore)
    return database, database.store


async def test_a_crash_loses_what_was_not_committed() -> None:
    database, disk = in_memory()
    await database.open()
    await database.append(message())
    lost = submit(disk, 2)
    crash(disk)
    opened = await database.open()
    assert opened.log.head == 1
    assert not lost.done()
    await database.stop()


async def test_a_restored_database_has_another_generation() -> None:
    database, disk = in_memory()
    generation = (await database.open()).log.generation
    await database.subscriber(b"dev", b"t")
    await disk.close()
    restore(disk)
    opened = await database.open()
    assert opened.minted
    assert opened.log.generation != generation
    assert (await database.snapshot()).consumer.generation == generation
    assert (await database.reopen()).minted == ""
    await database.stop()


async def test_a_database_that_lost_its_tail_has_positions_ahead_of_its_head() -> None:
    database, disk = in_memory()
    await database.open()
    consumer = await database.subscriber(b"dev", b"t")
    await database.append(*(message() for _ in range(5)))
    await database.move(consumer, 5)
    await disk.close()
    lose_tail(disk, 2)
    assert (await database.open()).log.head == 2
    assert (await database.snapshot()).consumer.cursor == 5
    assert consumer.incarnation == A
    await database.stop()

"""A worker whose store does not answer: nothing is settled twice or lost, the loser learns it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from storage.clock import ManualClock
from storage.errors import StoreFull, StoreUnavailable
from storage.memory import MemoryStore
from storage.outbox import Failure, State
from storage.roles import Handles
from tests.storage.faults import FaultyStore
from tests.storage.harness import NOW_MS, message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Place:
    """A store that fails when it is told to, and handles over it."""

    def __init__(self) -> None:
        self.store = FaultyStore(MemoryStore())
        self.clock = ManualClock(NOW_MS)
        self.handles = Handles(self.store, self.clock)
        self.producer = self.handles.producer(b"hook")
        self.worker = self.handles.worker(b"hook", chance=lambda: 0.5)


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    """Open, with one message in it."""
    made = Place()
    await made.store.open(now_ms=NOW_MS)
    await made.producer.enqueue(message())
    yield made
    await made.handles.drain()
    made.handles.close()
    assert await made.store.check() == []
    await made.store.close()


async def state(place: Place) -> State:
    shown = await place.store.outbox.show(1)
    assert shown is not None
    return shown.state


async def test_a_settlement_waits_until_the_disk_takes_it(place: Place) -> None:
    (one,) = (await place.worker.claim()).messages
    place.store.fail_submit(StoreFull("full"), times=2)
    settling = asyncio.ensure_future(place.worker.done(one))
    await asyncio.sleep(0.01)
    assert not settling.done()
    assert await state(place) is State.CLAIMED
    assert await settling
    assert await state(place) is State.DONE


async def test_a_claim_that_cannot_be_written_is_told_at_once_and_took_nothing(
    place: Place,
) -> None:
    place.store.fail_submit(StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable):
        await place.worker.claim()
    assert await state(place) is State.WAITING
    await place.handles.drain()  # until the disk answers again, everybody is told at once
    assert len((await place.worker.claim()).messages) == 1


async def test_an_enqueue_that_cannot_be_written_is_told_and_left_nothing(place: Place) -> None:
    place.store.fail_submit(StoreUnavailable("gone"))
    with pytest.raises(StoreUnavailable):
        await place.producer.enqueue(message())
    assert (await place.store.outbox.backlog())[0].waiting == 1


@pytest.mark.parametrize("first", ["extend", "reap"])
async def test_after_an_outage_longer_than_the_lease_the_first_that_commits_wins(
    place: Place, first: str
) -> None:
    """The extension was on its way before the lease lapsed, and the store hung until after it."""
    (one,) = (await place.worker.claim()).messages
    janitor = place.handles.janitor()
    gate = place.store.hang_submit()
    place.clock.advance(ms=place.worker.lease_ms - 1)
    if first == "extend":
        extending = asyncio.ensure_future(place.worker.extend(one))
        await gate.reached.wait()
        place.clock.advance(ms=1)
        reaping = asyncio.ensure_future(janitor.reap(delays_ms=(1,)))
    else:
        place.clock.advance(ms=1)
        reaping = asyncio.ensure_future(janitor.reap(delays_ms=(1,)))
        await gate.reached.wait()
        extending = asyncio.ensure_future(place.worker.extend(one))
    await asyncio.sleep(0)
    gate.release()
    is_extended, reaped = await extending, await reaping
    assert is_extended == (first == "extend")
    assert reaped.waiting == (() if is_extended else (one.id,))
    assert await place.worker.done(one) == is_extended
    place.clock.advance(ms=1)
    again = (await place.worker.claim()).messages
    assert len(again) == (0 if is_extended else 1)
    if again:
        assert await place.worker.failed(again[0], Failure.REJECTED) is State.DEAD

"""``plugin.history`` is held to what sessions are: what it hands out is complete, or it refuses.

Its own behaviour is in ``tests/broker/test_history.py``; here are stores, crashes and damage.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from broker_ext import history as history_module
from broker_ext import replay
from storage.api import Prune
from storage.errors import (
    DatabaseGenerationChanged,
    EntryDamaged,
    ResumeHistoryUnavailable,
    StoreUnavailable,
)
from tests.broker.mqtt import running
from tests.storage.harness import BACKENDS, scratch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from broker_ext.history import HistorySubscription
    from tests.broker.mqtt import Broker
    from tests.storage.harness import Backend

KEPT: dict[str, Any] = {"history_filters": ("a/#",), "retain_for_s": 1e6}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with scratch() as path:
        yield BACKENDS[request.param](path)


@asynccontextmanager
async def keeper(backend: Backend) -> AsyncIterator[Broker]:
    async with running(backend, **KEPT) as broker:
        yield broker


async def publish(broker: Broker, first: int, last: int, topic: bytes = b"a/1") -> None:
    client = await broker.connect(b"p", clean=True)
    await client.deliver(topic, *[b"%d" % n for n in range(first, last + 1)])


async def take(messages: HistorySubscription, count: int) -> list[int]:
    async with asyncio.timeout(10):
        return [int((await anext(messages)).payload) for _ in range(count)]


async def test_it_reads_on_over_crashes_and_chunks(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position kept after each message: each message is handed out once, in order."""
    monkeypatch.setattr(replay, "READ_ENTRIES_MAX", 3)
    monkeypatch.setattr(history_module, "READ_ENTRIES_MAX", 2)
    async with keeper(backend) as broker:
        position = broker.hub.history.position
        got: list[int] = []
        for round_ in range(6):
            await publish(broker, 10 * round_ + 1, 10 * round_ + 10)
            await publish(broker, 1, 3, b"b")
            await broker.crash_and_restart(**KEPT)
            async with broker.hub.history.subscribe(["a/+"], resume=position) as messages:
                got += await take(messages, 7 if round_ < 5 else 25)
                position = messages.progress()
                assert position.generation == broker.hub.history.generation
        assert got == list(range(1, 61))


async def test_a_position_is_never_one_that_was_not_committed(backend: Backend) -> None:
    """Its offset would be given to another message after a crash, which would then be missed."""
    async with keeper(backend) as broker:
        await publish(broker, 1, 1)
        publisher = await broker.connect(b"p", clean=True)
        gate = broker.store.hang_submit()
        publisher.publish(b"a/1", b"2")
        await gate.reached.wait()
        async with broker.hub.history.subscribe(["a/1"]) as messages:
            position = messages.progress()
        await broker.crash()
        gate.release()
        await broker.start()
        await publish(broker, 3, 4)
        async with broker.hub.history.subscribe(["a/1"], resume=position) as messages:
            assert await take(messages, 2) == [3, 4]


async def test_previous_beside_a_commit_that_hangs_waits_for_nothing(backend: Backend) -> None:
    async with keeper(backend) as broker:
        await publish(broker, 1, 5)
        publisher = await broker.connect(b"p", clean=True)
        gate = broker.store.hang_submit()
        publisher.publish(b"a/1", b"6")
        await gate.reached.wait()
        async with broker.hub.history.subscribe(["a/1"], previous=2) as messages:
            assert messages.progress().offset == 0
            assert not messages.verified.done()
            assert await take(messages, 2) == [4, 5]
            assert messages.progress().offset == 5
            gate.release()
            assert await take(messages, 1) == [6]


async def test_verified_needs_no_message_after_the_last(backend: Backend) -> None:
    async with keeper(backend) as broker:
        start = broker.hub.history.position
        async with broker.hub.history.subscribe(["a/1"], resume=start) as messages:
            assert (await asyncio.wait_for(messages.verified, 5)).offset == 0
        await publish(broker, 1, 5)
        await broker.restart()
        async with broker.hub.history.subscribe(["a/1"], resume=start) as messages:
            assert not messages.verified.done()
            assert await take(messages, 5) == [1, 2, 3, 4, 5]
            assert (await asyncio.wait_for(messages.verified, 5)).offset == 5


async def test_two_readers_keep_positions_of_their_own(backend: Backend) -> None:
    async with keeper(backend) as broker:
        history = broker.hub.history
        async with history.subscribe(["a/#"]) as one, history.subscribe(["a/2", "a/+"]) as two:
            await publish(broker, 1, 3)
            assert await take(one, 3) == [1, 2, 3]
            assert await take(two, 1) == [1]
            assert (one.progress().offset, two.progress().offset) == (3, 1)
            await one.aclose()
            await publish(broker, 4, 4)
            assert await take(two, 3) == [2, 3, 4]
            with pytest.raises(StopAsyncIteration):
                await take(one, 1)


async def test_a_prune_that_overtakes_a_reader_is_refused_with_fields(backend: Backend) -> None:
    async with keeper(backend) as broker:
        start = broker.hub.history.position
        await publish(broker, 1, 10)
        await broker.restart()
        async with broker.hub.history.subscribe(["a/1"], resume=start) as messages:
            gate = broker.store.hang_read()
            reader = asyncio.ensure_future(anext(messages))
            await gate.reached.wait()
            await broker.hub.committer.apply(Prune(4, 0, 100))
            gate.release()
            with pytest.raises(ResumeHistoryUnavailable) as refusal:
                await reader
            assert (refusal.value.position, refusal.value.floor) == (0, 4)
            assert refusal.value.topic == b"a/1"
            with pytest.raises(StopAsyncIteration):
                await anext(messages)


async def test_damage_is_refused_and_other_topics_are_read(backend: Backend) -> None:
    async with keeper(backend) as broker:
        start = broker.hub.history.position
        await publish(broker, 1, 3)
        await broker.restart()
        history = broker.hub.history
        broker.store.fail_read(EntryDamaged(2, b"a/1"))
        async with history.subscribe(["a/1"], resume=start) as messages:
            with pytest.raises(ResumeHistoryUnavailable) as refusal:
                await take(messages, 1)
            assert (refusal.value.floor, refusal.value.topic) == (2, b"a/1")
            with pytest.raises(ResumeHistoryUnavailable):
                await messages.verified
        async with history.subscribe(["a/1"], resume=start) as messages:
            assert await take(messages, 3) == [1, 2, 3]


async def test_a_read_error_is_raised_and_the_position_is_good(backend: Backend) -> None:
    async with keeper(backend) as broker:
        start = broker.hub.history.position
        await publish(broker, 1, 3)
        await broker.restart()
        broker.store.fail_read(StoreUnavailable("no answer"))
        messages = broker.hub.history.subscribe(["a/1"], resume=start)
        with pytest.raises(StoreUnavailable):
            await anext(messages)
        assert messages.progress() == start
        async with broker.hub.history.subscribe(["a/1"], resume=messages.progress()) as again:
            assert await take(again, 3) == [1, 2, 3]


async def test_a_restored_database_refuses_positions_of_before(backend: Backend) -> None:
    async with keeper(backend) as broker:
        await publish(broker, 1, 3)
        before = broker.hub.history.position
        await broker.stop()
        backend.back_up()
        backend.restore()
        await broker.start()
        with pytest.raises(DatabaseGenerationChanged) as refusal:
            broker.hub.history.subscribe(["a/1"], resume=before)
        assert refusal.value.held == before.generation
        assert refusal.value.current == broker.hub.history.generation
        assert (refusal.value.position, refusal.value.head) == (3, 3)


async def test_the_end_of_the_broker_ends_readers(backend: Backend) -> None:
    async with keeper(backend) as broker:
        messages = broker.hub.history.subscribe(["a/1"])
        reader = asyncio.ensure_future(anext(messages))
        await broker.turns(lambda: messages._waiting is not None)
        await broker.restart()
        with pytest.raises(StopAsyncIteration):
            await reader

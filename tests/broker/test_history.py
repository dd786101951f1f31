"""``plugin.history``: a reader that keeps its own position."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from storage.api import Position
from storage.errors import DatabaseGenerationChanged, ResumeHistoryUnavailable
from tests.broker.mqtt import Broker, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from broker_ext.history import HistoryMessage, HistorySubscription

KEPT = ("kept/#",)


@pytest.fixture
async def keeper() -> AsyncIterator[Broker]:
    """A broker that logs kept/# whoever subscribes."""
    async with running(history_filters=KEPT, retain_for_s=1_000_000.0) as broker:
        yield broker


async def take(messages: HistorySubscription, number: int) -> list[HistoryMessage]:
    async def some() -> list[HistoryMessage]:
        return [await anext(messages) for _ in range(number)]

    return await asyncio.wait_for(some(), 5)


async def publish(broker: Broker, topic: bytes, *payloads: bytes) -> None:
    client = await broker.connect()
    await client.deliver(topic, *payloads)


async def test_a_reader_gets_what_is_published_from_now_on(broker: Broker) -> None:
    await publish(broker, b"any/topic", b"before")
    async with broker.hub.history.subscribe(["any/+"]) as messages:
        await publish(broker, b"any/topic", b"1", b"2")
        got = await take(messages, 2)
    assert [(m.topic, m.payload, m.qos) for m in got] == [
        ("any/topic", b"1", 1),
        ("any/topic", b"2", 1),
    ]
    assert [m.position.offset for m in got] == [1, 2]
    assert got[0].position.generation == broker.hub.history.generation


async def test_a_reader_goes_on_where_it_was_over_a_restart(keeper: Broker) -> None:
    async with keeper.hub.history.subscribe(["kept/a"]) as messages:
        await publish(keeper, b"kept/a", b"1")
        await take(messages, 1)
        position = messages.progress()
    await publish(keeper, b"kept/a", b"2", b"3")
    await keeper.restart(history_filters=KEPT, retain_for_s=1_000_000.0)
    await publish(keeper, b"kept/a", b"4")
    async with keeper.hub.history.subscribe(["kept/a"], resume=position) as messages:
        assert [m.payload for m in await take(messages, 3)] == [b"2", b"3", b"4"]
        reader = asyncio.ensure_future(anext(messages))
        head = await asyncio.wait_for(messages.verified, 5)
        assert head == messages.progress() == keeper.hub.history.position
        await publish(keeper, b"kept/a", b"5")
        assert (await asyncio.wait_for(reader, 5)).payload == b"5"


async def test_progress_never_passes_a_message_that_is_still_to_come(keeper: Broker) -> None:
    async with keeper.hub.history.subscribe(["kept/#"]) as messages:
        await publish(keeper, b"kept/a", b"1", b"2", b"3")
        assert [m.payload for m in await take(messages, 1)] == [b"1"]
        assert messages.progress().offset == 1


async def test_the_last_messages_can_be_asked_for(keeper: Broker) -> None:
    await publish(keeper, b"kept/a", b"1", b"2", b"3")
    await publish(keeper, b"kept/b", b"x")
    async with keeper.hub.history.subscribe(["kept/a"], previous=2) as messages:
        assert [m.payload for m in await take(messages, 2)] == [b"2", b"3"]
    async with keeper.hub.history.subscribe(["kept/#"], previous=100) as messages:
        assert [m.payload for m in await take(messages, 4)] == [b"1", b"2", b"3", b"x"]


@pytest.mark.parametrize("previous", [0, 3])
async def test_a_count_beside_a_position_is_refused(keeper: Broker, previous: int) -> None:
    history = keeper.hub.history
    with pytest.raises(ValueError, match="cannot be combined"):
        history.subscribe(["kept/a"], resume=history.position, previous=previous)


async def test_a_position_of_another_generation_is_refused_with_both(keeper: Broker) -> None:
    with pytest.raises(DatabaseGenerationChanged) as refusal:
        keeper.hub.history.subscribe(["kept/a"], resume=Position("0" * 32, 0))
    assert (refusal.value.held, refusal.value.current) == (
        "0" * 32,
        keeper.hub.history.generation,
    )


async def test_a_position_ahead_of_the_head_is_refused(keeper: Broker) -> None:
    ahead = Position(keeper.hub.history.generation, 1)
    with pytest.raises(DatabaseGenerationChanged) as refusal:
        keeper.hub.history.subscribe(["kept/a"], resume=ahead)
    assert (refusal.value.position, refusal.value.head) == (1, 0)


async def test_a_position_that_nothing_kept_is_refused(keeper: Broker) -> None:
    """While the reader was away, nobody need have logged what matches: that is a gap."""
    history = keeper.hub.history
    start = history.position
    await publish(keeper, b"kept/a", b"1")
    with pytest.raises(ResumeHistoryUnavailable) as refusal:
        history.subscribe(["other/#"], resume=start)
    assert refusal.value.topic == b"other/#"


async def test_a_filter_that_is_kept_only_since_later_is_refused_before(broker: Broker) -> None:
    await broker.sleeper(b"somebody", b"kept/a")
    await publish(broker, b"kept/a", b"1")
    early = Position(broker.hub.history.generation, 0)
    await broker.restart(history_filters=KEPT)
    history = broker.hub.history
    with pytest.raises(ResumeHistoryUnavailable) as refusal:
        history.subscribe(["kept/a"], resume=early)
    assert (refusal.value.position, refusal.value.floor) == (0, 1)
    await history.subscribe(["kept/a"], resume=history.position).aclose()


async def test_what_was_pruned_after_the_position_is_refused_by_the_iterator() -> None:
    async with running(history_filters=KEPT, max_messages=2) as broker:
        start = broker.hub.history.position
        await publish(broker, b"kept/a", b"1", b"2", b"3", b"4")
        await broker.hub._prune()
        await broker.restart()  # or it would still have them in memory
        history = broker.hub.history
        async with history.subscribe(["kept/a"], resume=start) as messages:
            with pytest.raises(ResumeHistoryUnavailable) as refusal:
                await take(messages, 1)
            assert (refusal.value.position, refusal.value.floor) == (0, 2)
            assert refusal.value.topic == b"kept/a"
            with pytest.raises(ResumeHistoryUnavailable):
                await messages.verified


async def test_only_committed_messages_are_handed_out(keeper: Broker) -> None:
    async with keeper.hub.history.subscribe(["kept/a"]) as messages:
        client = await keeper.connect()
        gate = keeper.store.hang_submit()
        client.publish(b"kept/a", b"1", qos=1)
        await asyncio.wait_for(gate.reached.wait(), 5)
        reader = asyncio.ensure_future(anext(messages))
        await keeper.turns(lambda: reader.done() or messages._waiting is not None)
        assert not reader.done()
        gate.release()
        assert (await asyncio.wait_for(reader, 5)).payload == b"1"


async def test_closing_ends_a_reader_that_waits_and_what_was_logged_for_it(
    broker: Broker,
) -> None:
    messages = broker.hub.history.subscribe(["a"])
    reader = asyncio.ensure_future(anext(messages))
    await broker.turns(lambda: messages._waiting is not None)
    await messages.aclose()
    with pytest.raises(StopAsyncIteration):
        await reader
    await publish(broker, b"a", b"1")
    assert await broker.history() == []


async def test_filters_that_are_kept_hold_nothing_back() -> None:
    async with running(history_filters=KEPT) as broker:
        await publish(broker, b"kept/a", b"1", b"2")
        broker.clock.advance(ms=1)
        await broker.hub._prune()
        assert await broker.history() == []


async def test_a_filter_that_is_no_longer_kept_is_no_longer_logged(keeper: Broker) -> None:
    await publish(keeper, b"kept/a", b"1")
    await keeper.restart(history_filters=())
    await publish(keeper, b"kept/a", b"2")
    assert await keeper.history() in ([], [b"1"])
    assert await keeper.hub.store.snapshot(b"\x00history") is None


@pytest.mark.parametrize("filters", [[], [""], ["a/#/b"], ["a+"]])
async def test_what_is_no_filter_is_refused(broker: Broker, filters: list[str]) -> None:
    with pytest.raises(ValueError, match="filter"):
        broker.hub.history.subscribe(filters)

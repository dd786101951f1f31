"""With topic plugins that are asked for each packet and each delivery: the same promises."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from broker_ext.wire import Puback, Pubcomp, Publish, Pubrec, Pubrel, Suback
from tests.broker.mqtt import Broker, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    """Every packet goes through the lane, every delivery is asked for."""

    def prepare(broker: Broker) -> None:
        broker.slow = True

    async with running(prepare=prepare) as broker:
        broker.hub.router.guarded = True
        yield broker


async def test_messages_arrive_in_order_and_without_what_is_not_permitted(
    broker: Broker,
) -> None:
    subscriber = await broker.subscriber(b"s", (b"#", 2))
    publisher = await broker.connect(b"p", clean=True)
    for n in range(600):
        publisher.publish(b"secret" if n % 3 else b"a", b"%d" % n, 1 + n % 2)
    expected = [b"%d" % n for n in range(0, 600, 3)]
    assert await subscriber.payloads(200) == expected
    await subscriber.quiet()
    assert broker.is_idle(b"s")


async def test_a_backlog_arrives_in_order_and_without_what_is_not_permitted(
    broker: Broker,
) -> None:
    await broker.sleeper(b"s", b"#")
    publisher = await broker.connect(b"p", clean=True)
    for n in range(1200):
        publisher.publish(b"secret" if n % 2 else b"a", b"%d" % n)
    for _ in range(1200):
        await publisher.next(Puback)
    await broker.restart()
    broker.hub.router.guarded = True
    subscriber = await broker.connect(b"s")
    assert await subscriber.payloads(600) == [b"%d" % n for n in range(0, 1200, 2)]
    await subscriber.quiet()


async def test_a_message_that_may_not_be_published_is_acknowledged_and_dropped(
    broker: Broker,
) -> None:
    await broker.sleeper(b"s", b"#")
    publisher = await broker.connect(b"p")
    publisher.publish(b"forbidden", b"1", 1, packet_id=1)
    publisher.publish(b"forbidden", b"2", 2, packet_id=2)
    publisher.publish(b"a", b"3", 1, packet_id=3)
    assert (await publisher.next(Puback)).packet_id == 1
    assert (await publisher.next(Pubrec)).packet_id == 2
    assert (await publisher.next(Puback)).packet_id == 3
    publisher.send(Pubrel(2))
    await publisher.next(Pubcomp)
    assert await broker.history() == [b"3"]
    await publisher.quiet()


async def test_packets_are_handled_in_order_while_a_plugin_thinks(broker: Broker) -> None:
    broker.slow_filters[b"slow"] = asyncio.Event()
    client = await broker.connect(b"c")
    client.send_bytes(b"\x82\x09\x00\x01\x00\x04slow\x01")
    client.publish(b"slow", b"1", 1)
    await client.quiet()
    broker.slow_filters[b"slow"].set()
    await client.next(Suback)
    got = {type(await client.any()), type(await client.any())}
    assert got == {Puback, Publish}


async def test_qos_0_and_transient_sessions_are_asked_for_too(broker: Broker) -> None:
    subscriber = await broker.connect(b"s", clean=True)
    await subscriber.subscribe((b"#", 1))
    publisher = await broker.connect(b"p", clean=True)
    for n in range(40):
        publisher.publish(b"secret" if n % 2 else b"a", b"%d" % n, n // 2 % 2)
    got = await subscriber.payloads(20)
    assert sorted(got, key=int) == [b"%d" % n for n in range(0, 40, 2)]
    await subscriber.quiet()


async def test_a_client_that_leaves_while_a_plugin_is_asked_loses_nothing(
    broker: Broker,
) -> None:
    subscriber = await broker.subscriber(b"s", b"#")
    publisher = await broker.connect(b"p", clean=True)
    session = broker.session(b"s")
    asked, answer = asyncio.Event(), asyncio.Event()

    async def thinks(topic: bytes) -> bool:
        del topic
        asked.set()
        await answer.wait()
        return True

    session.may_receive = thinks
    await publisher.deliver(b"a", b"1", b"2")
    await asked.wait()
    await subscriber.cut()
    again = await broker.connect(b"s")
    answer.set()
    assert await again.payloads(2) == [b"1", b"2"]
    await again.quiet()

"""A stop in good order: what was read is stored and acknowledged, and everybody resumes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from broker_ext.wire import Puback, Pubrec

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_stop_stores_and_acknowledges_what_it_has_read(broker: Broker, qos: int) -> None:
    await broker.sleeper(b"s", (b"#", 2))
    publisher = await broker.connect(b"p")
    gate = broker.store.hang_submit()
    for n in range(20):
        publisher.publish(b"a", b"%d" % n, qos)
    await gate.reached.wait()
    await publisher.quiet()
    stopping = asyncio.ensure_future(broker.stop())
    await asyncio.sleep(0)
    gate.release()
    for _ in range(20):
        await publisher.next(Puback if qos == 1 else Pubrec)
    await publisher.closed()
    await stopping
    await broker.start()
    subscriber = await broker.connect(b"s")
    assert await subscriber.payloads(20) == [b"%d" % n for n in range(20)]


async def test_a_stop_refuses_who_comes_now(broker: Broker) -> None:
    client = await broker.dial()
    broker.hub.refusing = True
    assert (await client.connect(b"c")).reason == 3
    await client.closed()
    broker.hub.refusing = False


async def test_a_stop_during_a_drain_loses_nothing_and_sends_nothing_twice_without_dup(
    broker: Broker,
) -> None:
    await broker.sleeper(b"s", b"#")
    publisher = await broker.connect(b"p", clean=True)
    payloads = [b"%d" % n for n in range(800)]
    await publisher.deliver(b"a", *payloads)
    got: list[bytes] = []
    while len(got) < 800:
        subscriber = await broker.connect(b"s")
        for packet in await subscriber.publishes(min(90, 800 - len(got))):
            if not packet.dup:
                assert packet.payload not in got
            if packet.payload not in got:
                got.append(packet.payload)
        await subscriber.until_ping()  # the acknowledgements were read; what came behind was not
        await broker.restart()
    assert got == payloads

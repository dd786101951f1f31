"""MQTT 5: what a publisher is told in PUBACK and PUBREC: 0x10, 0x97; and 3.1.1 as before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from broker_ext.wire import Puback, Pubcomp, Pubrec, Pubrel
from storage.errors import StoreFull, StoreUnavailable
from tests.broker.mqtt import running

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker, Client

NO_MATCHING, QUOTA = 0x10, 0x97


async def told(client: Client, topic: bytes, qos: int, *, retain: bool = False) -> int:
    """The reason code of one message."""
    number = client.publish(topic, b"m", qos, retain=retain)
    packet = await client.next(Puback if qos == 1 else Pubrec)  # type: ignore[type-var]
    assert packet.packet_id == number  # type: ignore[attr-defined]
    reason: int = packet.reason  # type: ignore[attr-defined]
    if qos == 2 and reason < 0x80:
        client.send(Pubrel(number))
        await client.next(Pubcomp)
    return reason


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("qos", [1, 2])
async def test_a_publisher_is_told_that_there_are_no_matching_subscribers(
    broker: Broker, qos: int, clean: bool
) -> None:
    sender = await broker.connect(b"p", clean=clean, version=5)
    assert await told(sender, b"t", qos) == NO_MATCHING
    await broker.sleeper(b"s", b"t")
    assert await told(sender, b"t", qos) == 0
    assert await told(sender, b"u", qos) == NO_MATCHING
    await sender.subscribe((b"own", 1 | 0x04))  # No Local
    assert await told(sender, b"own", qos) == (NO_MATCHING if clean else 0)
    listener = await broker.connect(b"l", clean=True)
    await listener.subscribe((b"u", 0))
    assert await told(sender, b"u", qos) == 0
    await listener.disconnect()
    assert await told(sender, b"u", qos) == NO_MATCHING


async def test_3_1_1_is_not_told(broker: Broker) -> None:
    sender = await broker.connect(b"p", clean=True)
    sender.publish(b"t", b"m", 1)
    assert await sender.next(Puback) == Puback(1)


async def test_a_message_that_cannot_be_retained_is_refused_whole() -> None:
    async with running(max_retained_messages=1) as broker:
        listener = await broker.connect(b"l", clean=True)
        await listener.subscribe((b"#", 0))
        sender = await broker.connect(b"p", clean=True, version=5)
        assert await told(sender, b"1", 1, retain=True) == 0
        for qos in (1, 2):
            assert await told(sender, b"2", qos, retain=True) == QUOTA
        sender.publish(b"3", b"m", 0, retain=True)  # nobody can be told: delivered, not retained
        assert await told(sender, b"1", 2, retain=True) == 0  # there is one of this topic
        assert await told(sender, b"4", 1) == 0
        got = await listener.publishes(4)
        assert [p.topic for p in got] == [b"1", b"3", b"1", b"4"]
        assert broker.hub.figures.refused_quota == 2
        assert [m.topic for m in await broker.store.inner.retained()] == [b"1"]


async def test_a_full_disk_is_told_where_it_can_be_told_at_once(broker: Broker) -> None:
    await broker.sleeper(b"s", (b"t", 2))
    first = await broker.connect(b"p1", clean=True, version=5)
    second = await broker.connect(b"p2", clean=True, version=5)
    old = await broker.connect(b"p3", clean=True)
    broker.store.fail_submit(StoreFull("no space"), times=1_000)
    first.publish(b"t", b"accepted", 1)
    await broker.turns(lambda: broker.hub.committer.full)
    for qos in (1, 2):
        assert await told(second, b"t", qos) == QUOTA
    assert await told(second, b"u", 1, retain=True) == QUOTA
    assert await told(second, b"u", 1) == NO_MATCHING  # this one needs no disk
    first.publish(b"t", b"waits too", 1)
    old.publish(b"t", b"of 3.1.1", 1)
    await first.quiet()
    await old.quiet()
    broker.store.heal()
    assert [(await first.next(Puback)).reason for _ in range(2)] == [0, 0]
    await old.next(Puback)
    assert await told(second, b"t", 1) == 0
    assert await broker.history() == [b"accepted", b"waits too", b"of 3.1.1", b"m"]


async def test_a_disk_that_fails_otherwise_is_waited_for(broker: Broker) -> None:
    await broker.sleeper(b"s", b"t")
    first = await broker.connect(b"p1", clean=True, version=5)
    second = await broker.connect(b"p2", clean=True, version=5)
    broker.store.fail_submit(StoreUnavailable("I/O error"), times=1_000)
    first.publish(b"t", b"1", 1)
    await broker.turns(lambda: broker.hub.committer.failing_since is not None)
    second.publish(b"t", b"2", 1)
    await second.quiet()
    broker.store.heal()
    assert (await first.next(Puback)).reason == (await second.next(Puback)).reason == 0


async def test_a_refused_packet_id_is_free(broker: Broker) -> None:
    await broker.sleeper(b"s", (b"t", 2))
    sender = await broker.connect(b"p", version=5)
    filler = await broker.connect(b"f", clean=True)
    broker.store.fail_submit(StoreFull("no space"), times=1_000)
    filler.publish(b"t", b"1", 1)
    await broker.turns(lambda: broker.hub.committer.full)
    sender.publish(b"t", b"refused", 2, packet_id=7)
    assert (await sender.next(Pubrec)).reason == QUOTA
    broker.store.heal()
    await filler.next(Puback)
    sender.publish(b"t", b"taken", 2, packet_id=7)
    assert (await sender.next(Pubrec)).reason == 0
    sender.send(Pubrel(7))
    await sender.next(Pubcomp)
    assert await broker.history() == [b"1", b"taken"]

"""MQTT 5: subscription options and identifiers, live, from the backlog and after a resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from broker_ext.replay import Replay, Wanted
from broker_ext.wire import Properties, Puback, Publish
from broker_ext.wire.properties import SUBSCRIPTION_ID, USER_PROPERTY
from storage.api import Entry
from storage.memory import MemoryStore
from tests.broker.mqtt import running

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker, Client

NO_LOCAL: Final = 0x04
AS_PUBLISHED: Final = 0x08
IF_NEW: Final = 0x10
NEVER: Final = 0x20


def identifier(number: int) -> Properties:
    return Properties(((SUBSCRIPTION_ID, number),))


def identifiers(packet: Publish) -> list[int]:
    found = packet.properties
    return sorted(found.all(SUBSCRIPTION_ID)) if found is not None else []


async def publisher(broker: Broker) -> Client:
    return await broker.connect(b"p", clean=True, version=5)


# -------------------------------------------------------------------------------- identifiers


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_delivery_has_the_identifiers_of_all_filters_that_match(
    broker: Broker, clean: bool, qos: int
) -> None:
    client = await broker.connect(b"s", clean=clean, version=5)
    await client.subscribe((b"a/+", 0), properties=identifier(268_435_455))
    await client.subscribe((b"a/#", 2), (b"a/b", 1), properties=identifier(7))
    await client.subscribe((b"+/b", 1))
    await client.subscribe((b"other", 1), properties=identifier(9))
    more = Properties(((USER_PROPERTY, (b"k", b"v")),))
    (await publisher(broker)).publish(b"a/b", b"m", qos, properties=more)
    (packet,) = await client.publishes(1)
    assert packet.qos == qos
    assert identifiers(packet) == [7, 7, 268_435_455]
    assert packet.properties is not None
    assert packet.properties.all(USER_PROPERTY) == ((b"k", b"v"),)
    await client.quiet()


async def test_identifiers_are_stored_with_the_session(durable_broker: Broker) -> None:
    broker = durable_broker
    client = await broker.connect(b"s", version=5)
    await client.subscribe((b"a/+", 1), properties=identifier(1))
    await client.subscribe((b"a/#", 2), properties=identifier(2))
    await client.subscribe((b"#", 0), properties=identifier(3))
    await client.disconnect()
    sender = await publisher(broker)
    await sender.deliver(b"a/b", b"queued")
    await broker.crash_and_restart()
    client = await broker.connect(b"s", version=5)
    (queued,) = await client.publishes(1)
    sender = await publisher(broker)
    await sender.deliver(b"a/b", b"live")
    (live,) = await client.publishes(1)
    assert identifiers(queued) == identifiers(live) == [1, 2, 3]


def test_a_message_that_is_older_than_a_subscription_has_not_its_identifier() -> None:
    wanted = (Wanted(b"a/b", 1, 3, 0, 1), Wanted(b"a/#", 2, 5, AS_PUBLISHED, 2))
    replay = Replay(MemoryStore(), wanted)
    found = [
        (replay.granted(entry), replay.options(entry).identifiers, replay.options(entry).retain)
        for entry in (Entry(offset, b"a/b", b"", 2) for offset in (3, 4, 6, 6))
    ]
    assert found == [
        (0, b"", False),
        (1, b"\x0b\x01", False),
        (2, b"\x0b\x01\x0b\x02", True),
        (2, b"\x0b\x01\x0b\x02", True),
    ]


async def test_what_an_earlier_connection_left_has_the_identifiers_of_now(
    broker: Broker,
) -> None:
    client = await broker.connect(b"s", version=5)
    await client.subscribe((b"t", 1), properties=identifier(1))
    sender = await publisher(broker)
    await sender.deliver(b"t", b"m")
    (sent,) = await client.publishes(1, ack=False)
    await client.subscribe((b"t", 1), properties=identifier(2))
    await client.cut()
    client = await broker.connect(b"s", version=5)
    (again,) = await client.publishes(1, ack=False)
    assert (identifiers(sent), identifiers(again)) == ([1], [2])
    await client.unsubscribe(b"t")
    await client.cut()
    client = await broker.connect(b"s", version=5)
    (again,) = await client.publishes(1)
    assert identifiers(again) == []


@pytest.mark.parametrize("clean", [False, True])
async def test_a_retained_message_has_the_identifier_of_its_subscription(
    broker: Broker, clean: bool
) -> None:
    sender = await publisher(broker)
    sender.publish(b"t", b"m", retain=True)
    await sender.next(Puback)
    client = await broker.connect(b"s", clean=clean, version=5)
    await client.subscribe((b"#", 1), properties=identifier(1))
    assert [identifiers(p) for p in await client.publishes(1)] == [[1]]
    await client.subscribe((b"t", 1), properties=identifier(2))
    (packet,) = await client.publishes(1, ack=False)
    assert (identifiers(packet), packet.retain) == ([2], True)
    if not clean:
        await client.unsubscribe(b"t")
        await client.cut()
        client = await broker.connect(b"s", version=5)
        (packet,) = await client.publishes(1)  # its copy is held as it was
        assert (identifiers(packet), packet.retain, packet.dup) == ([2], True, True)


async def test_subscribing_again_replaces_options_and_identifier(broker: Broker) -> None:
    for clean in (False, True):
        client = await broker.connect(b"s", clean=clean, version=5)
        await client.subscribe((b"t", 1 | AS_PUBLISHED), properties=identifier(1))
        await client.subscribe((b"t", 1))
        sender = await publisher(broker)
        sender.publish(b"t", b"m", retain=True)
        (packet,) = await client.publishes(1)
        assert (identifiers(packet), packet.retain) == ([], False)
        sender.publish(b"t", b"", retain=True)
        await client.publishes(1)


async def test_a_session_that_3_1_1_takes_on_keeps_its_identifiers(broker: Broker) -> None:
    client = await broker.connect(b"s", version=5)
    await client.subscribe((b"t", 1), properties=identifier(1))
    await client.disconnect()
    client = await broker.connect(b"s")
    sender = await publisher(broker)
    await sender.deliver(b"t", b"m")
    (packet,) = await client.publishes(1)
    assert packet.properties is None
    await client.disconnect()
    client = await broker.connect(b"s", version=5)
    await sender.deliver(b"t", b"m")
    assert [identifiers(p) for p in await client.publishes(1)] == [[1]]


# ----------------------------------------------------------------------------------- no local


@pytest.mark.parametrize("clean", [False, True])
async def test_no_local_keeps_away_what_the_client_publishes_itself(
    broker: Broker, clean: bool
) -> None:
    client = await broker.connect(b"s", clean=clean, version=5)
    await client.subscribe((b"t", 1 | NO_LOCAL))
    other = await broker.connect(b"o", version=5)
    await other.subscribe((b"t", 1 | NO_LOCAL))
    for sender, receiver in ((client, other), (other, client)):
        for qos in (0, 1):
            await sender.deliver(b"t", sender.client_id, qos=qos)
            assert await receiver.payloads(1) == [sender.client_id]
    await client.quiet()
    await other.quiet()


async def test_no_local_counts_for_its_filter_alone(broker: Broker) -> None:
    client = await broker.connect(b"s", version=5)
    await client.subscribe((b"t/#", 2 | NO_LOCAL), properties=identifier(1))
    await client.subscribe((b"t/1", 1), properties=identifier(2))
    client.publish(b"t/2", b"m", 2, packet_id=9)
    client.publish(b"t/1", b"m", 2, packet_id=10)
    got = [p for p in await client.until_ping() if isinstance(p, Publish)]
    while not got:
        got = [p for p in await client.until_ping() if isinstance(p, Publish)]
    assert [(p.topic, p.qos, identifiers(p)) for p in got] == [(b"t/1", 1, [2])]


async def test_no_local_holds_for_the_backlog_and_after_a_restart(
    durable_broker: Broker,
) -> None:
    broker = durable_broker
    client = await broker.connect(b"s", version=5)
    await client.subscribe((b"t/#", 1 | NO_LOCAL))
    await broker.sleeper(b"witness", b"t/#")
    await client.deliver(b"t/own", b"m", b"m")
    await client.disconnect()
    sender = await publisher(broker)
    await sender.deliver(b"t/other", b"1")
    await broker.crash_and_restart()
    client = await broker.connect(b"s", version=5)
    assert await client.payloads(1) == [b"1"]
    await client.deliver(b"t/own", b"m")
    await broker.turns(lambda: broker.is_idle(b"s"))
    await client.quiet()


def test_no_local_holds_for_what_is_read_from_the_store() -> None:
    wanted = (Wanted(b"t/#", 2, 0, NO_LOCAL, 1), Wanted(b"t/1", 1, 0, 0, 2))
    replay = Replay(MemoryStore(), wanted, reader=b"me")
    for _ in range(2):  # found, and remembered
        granted = [
            replay.granted(Entry(1, topic, b"", 2, 0, origin))
            for topic in (b"t/1", b"t/2")
            for origin in (b"me", b"you", b"")
        ]
        assert granted == [1, 2, 2, 0, 2, 2]


async def test_no_local_keeps_own_retained_messages_away(broker: Broker) -> None:
    client = await broker.connect(b"s", clean=True, version=5)
    client.publish(b"t/own", b"m", retain=True)
    await client.next(Puback)
    sender = await publisher(broker)
    sender.publish(b"t/other", b"m", retain=True)
    await sender.next(Puback)
    await client.subscribe((b"t/#", 1 | NO_LOCAL))
    assert [p.topic for p in await client.publishes(1)] == [b"t/other"]
    await client.quiet()


# ------------------------------------------------------------------------- retain as published


@pytest.mark.parametrize("clean", [False, True])
async def test_retain_stays_as_published_where_so_asked(broker: Broker, clean: bool) -> None:
    client = await broker.connect(b"s", clean=clean, version=5)
    await client.subscribe((b"kept/#", 2 | AS_PUBLISHED), (b"#", 1))
    sender = await publisher(broker)
    for topic in (b"kept/1", b"other"):
        for qos in (0, 1):
            for retain in (False, True):
                sender.publish(topic, b"m", qos, retain=retain)
    got = await client.publishes(8)
    flags = [(p.topic, p.qos, p.retain) for p in got]
    assert sorted(flags) == [
        (b"kept/1", 0, False),
        (b"kept/1", 0, True),
        (b"kept/1", 1, False),
        (b"kept/1", 1, True),
        (b"other", 0, False),
        (b"other", 0, False),
        (b"other", 1, False),
        (b"other", 1, False),
    ]


async def test_retain_stays_as_published_in_the_backlog_and_when_it_comes_again(
    durable_broker: Broker,
) -> None:
    broker = durable_broker
    client = await broker.connect(b"s", version=5)
    await client.subscribe((b"kept", 1 | AS_PUBLISHED), (b"other", 1))
    await client.disconnect()
    sender = await publisher(broker)
    for topic in (b"kept", b"other"):
        sender.publish(topic, b"m", 1, retain=True)
    await sender.until_ping()
    await broker.restart()
    for dup in (False, True):
        client = await broker.connect(b"s", version=5)
        got = await client.publishes(2, ack=False)
        assert [(p.topic, p.retain, p.dup) for p in got] == [
            (b"kept", True, dup),
            (b"other", False, dup),
        ]
        await client.cut()


# ----------------------------------------------------------------------------- retain handling


@pytest.mark.parametrize("clean", [False, True])
async def test_retain_handling_says_when_retained_messages_come(
    broker: Broker, clean: bool
) -> None:
    sender = await publisher(broker)
    sender.publish(b"t", b"m", retain=True)
    await sender.next(Puback)
    client = await broker.connect(b"s", clean=clean, version=5)

    async def gets(options: int) -> int:
        before = broker.hub.figures.delivered
        await client.subscribe((b"t", options))
        await broker.hub.committer.drain()
        for packet in await client.until_ping():
            client.send(Puback(packet.packet_id))
        return broker.hub.figures.delivered - before

    assert await gets(1 | IF_NEW) == 1
    assert await gets(1 | IF_NEW) == 0
    assert await gets(1 | NEVER) == 0
    assert await gets(1) == 1
    await client.unsubscribe(b"t")
    assert await gets(1 | NEVER) == 0
    assert await gets(1 | IF_NEW) == 0
    await client.unsubscribe(b"t")
    assert await gets(1 | IF_NEW) == 1


async def test_a_resumed_subscription_is_not_new(durable_broker: Broker) -> None:
    broker = durable_broker
    sender = await publisher(broker)
    sender.publish(b"t", b"m", retain=True)
    await sender.next(Puback)
    client = await broker.connect(b"s", version=5)
    await client.subscribe((b"t", 1 | NEVER))
    await client.disconnect()
    await broker.restart()
    client = await broker.connect(b"s", version=5)
    await client.subscribe((b"t", 1 | IF_NEW))
    await broker.hub.committer.drain()
    await client.quiet()


async def test_overlapping_options_come_to_one_delivery_that_keeps_all_of_them() -> None:
    async with running(max_inflight=2, receive_maximum=2_000) as broker:
        client = await broker.connect(b"s", version=5)
        await client.subscribe((b"a/#", 2 | NO_LOCAL), properties=identifier(1))
        await client.subscribe((b"a/b", 0 | AS_PUBLISHED), properties=identifier(2))
        sender = await publisher(broker)
        for number in range(2_000):
            sender.publish(b"a/b", b"%d" % number, 1, retain=True)
        got = await client.publishes(2_000)
        assert {(p.qos, p.retain, tuple(identifiers(p))) for p in got} == {(1, True, (1, 2))}
        assert [p.payload for p in got] == [b"%d" % n for n in range(2_000)]

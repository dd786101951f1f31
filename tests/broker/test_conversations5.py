"""What MQTT 5 clients say to each other, from end to end: the scenarios that interoperability tests
go through. Each runs on both stores, with sessions that end with their connection and with stored
ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from broker_ext.wire import ConnectWill, Disconnect, Properties, Publish, Pubrec, Pubrel
from broker_ext.wire.properties import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    MESSAGE_EXPIRY_S,
    PACKET_BYTES_MAX,
    PAYLOAD_FORMAT,
    RECEIVE_MAX,
    RESPONSE_TOPIC,
    SUBSCRIPTION_ID,
    TOPIC_ALIAS,
    TOPIC_ALIAS_MAX,
    USER_PROPERTY,
    WILL_DELAY_S,
)

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker, Client

clean_or_stored = pytest.mark.parametrize("clean", [True, False], ids=["clean", "stored"])


def properties(*pairs: tuple[int, Any]) -> Properties:
    return Properties(pairs)


@pytest.fixture
async def broker(durable_broker: Broker) -> Broker:
    return durable_broker


async def listener(broker: Broker, *filters: bytes, clean: bool, **options: Any) -> Client:
    client = await broker.connect(b"listener", version=5, clean=clean, **options)
    await client.subscribe(*((f, 2) for f in filters))
    return client


async def talker(broker: Broker) -> Client:
    return await broker.connect(b"talker", version=5, clean=True)


@clean_or_stored
async def test_each_qos_arrives_as_it_was_sent(broker: Broker, clean: bool) -> None:
    ear = await listener(broker, b"a/b", clean=clean)
    mouth = await talker(broker)
    for qos in (0, 1, 2):
        await mouth.deliver(b"a/b", b"%d" % qos, qos=qos)
        (got,) = await ear.publishes(1)
        assert (got.qos, got.payload, got.retain) == (qos, b"%d" % qos, False)


@clean_or_stored
async def test_retained_messages_come_and_go(broker: Broker, clean: bool) -> None:
    mouth = await talker(broker)
    said = properties((USER_PROPERTY, (b"a", b"2")), (USER_PROPERTY, (b"c", b"3")))
    for qos, topic in enumerate((b"a/0", b"a/1", b"a/2")):
        mouth.publish(topic, topic, qos, retain=True, properties=said)
    for _ in range(2):
        packet = await mouth.any()
        if type(packet) is Pubrec:
            mouth.send(Pubrel(packet.packet_id))
            await mouth.any()
    ear = await listener(broker, b"a/+", clean=clean)
    got = await ear.publishes(3)
    assert {(p.topic, p.qos, p.retain) for p in got} == {
        (b"a/%d" % qos, qos, True) for qos in (0, 1, 2)
    }
    assert all(p.properties == said for p in got)
    for topic in (b"a/0", b"a/1", b"a/2"):
        mouth.publish(topic, b"", 0, retain=True)
    await mouth.quiet()
    assert [p.payload for p in await ear.publishes(3)] == [b"", b"", b""]
    other = await broker.connect(b"other", version=5, clean=clean)
    await other.subscribe((b"a/+", 2))
    await other.quiet()


async def test_messages_for_a_client_that_is_away_wait_for_it(broker: Broker) -> None:
    ear = await listener(broker, b"+/c", b"a/#", clean=False)
    await ear.disconnect()
    mouth = await talker(broker)
    for qos in (0, 1, 2):
        await mouth.deliver(b"t/c", b"%d" % qos, qos=qos)
    ear = await broker.connect(b"listener", version=5)
    assert ear.connack.session_present
    got = await ear.publishes(3)
    assert sorted((p.qos, p.payload) for p in got) == [(0, b"0"), (1, b"1"), (2, b"2")]
    await ear.quiet()


@pytest.mark.parametrize("qos", [1, 2])
async def test_what_was_not_acknowledged_comes_again(broker: Broker, qos: int) -> None:
    ear = await listener(broker, b"a/b", clean=False)
    mouth = await talker(broker)
    await mouth.deliver(b"a/b", b"1", b"2", qos=qos)
    first = await ear.publishes(2, ack=False)
    await ear.cut()
    ear = await broker.connect(b"listener", version=5)
    again = await ear.publishes(2)
    assert [(p.packet_id, p.payload) for p in again] == [(p.packet_id, p.payload) for p in first]
    assert all(p.dup for p in again)


@clean_or_stored
async def test_overlapping_filters_come_to_one_delivery_with_all_identifiers(
    broker: Broker, clean: bool
) -> None:
    ear = await broker.connect(b"listener", version=5, clean=clean)
    await ear.subscribe((b"a/#", 2), properties=properties((SUBSCRIPTION_ID, 456789)))
    await ear.subscribe((b"a/+", 1), properties=properties((SUBSCRIPTION_ID, 2)))
    await (await talker(broker)).deliver(b"a/b", b"1", qos=2)
    (got,) = await ear.publishes(1)
    assert got.qos == 2
    assert got.properties is not None
    assert sorted(got.properties.all(SUBSCRIPTION_ID)) == [2, 456789]
    await ear.quiet()


@clean_or_stored
async def test_no_more_comes_after_unsubscribe(broker: Broker, clean: bool) -> None:
    ear = await listener(broker, b"a", b"b", clean=clean)
    assert await ear.unsubscribe(b"a", b"x") == bytes([0, 0x11])
    mouth = await talker(broker)
    await mouth.deliver(b"a", b"1")
    await mouth.deliver(b"b", b"2")
    assert await ear.payloads(1) == [b"2"]


@clean_or_stored
async def test_a_request_is_answered_where_it_asks_to_be(broker: Broker, clean: bool) -> None:
    ear = await listener(broker, b"requests", clean=clean)
    mouth = await talker(broker)
    await mouth.subscribe((b"answers/1", 2))
    asked = properties((RESPONSE_TOPIC, b"answers/1"), (CORRELATION_DATA, b"\x00\xff334"))
    mouth.publish(b"requests", b"how much?", 0, properties=asked)
    (request,) = await ear.publishes(1)
    assert request.properties == asked
    back = properties((CORRELATION_DATA, request.properties.get(CORRELATION_DATA)))
    ear.publish(request.properties.get(RESPONSE_TOPIC), b"12", 0, properties=back)
    (answer,) = await mouth.publishes(1)
    assert (answer.payload, answer.properties) == (b"12", back)


@clean_or_stored
async def test_what_describes_a_payload_goes_on_with_it(broker: Broker, clean: bool) -> None:
    ear = await listener(broker, b"a", clean=clean)
    mouth = await talker(broker)
    said = properties((PAYLOAD_FORMAT, 1), (CONTENT_TYPE, b"My name"), (USER_PROPERTY, (b"", b"")))
    for qos in (0, 1, 2):
        mouth.publish(b"a", "grün".encode(), qos, properties=said)
        (got,) = await ear.publishes(1)
        assert got.properties == said
        while qos and type(await mouth.any()) is Pubrec:
            mouth.send(Pubrel(1 if qos == 1 else 2))


async def test_a_message_that_waited_says_what_is_left_of_its_time(broker: Broker) -> None:
    ear = await listener(broker, b"a", clean=False)
    await ear.disconnect()
    mouth = await talker(broker)
    for seconds in (6, 1):
        said = properties((MESSAGE_EXPIRY_S, seconds))
        mouth.publish(b"a", b"%d" % seconds, 1, properties=said)
        await mouth.any()
    broker.clock.advance(ms=3_000)
    ear = await broker.connect(b"listener", version=5)
    (got,) = await ear.publishes(1)
    assert (got.payload, got.properties) == (b"6", properties((MESSAGE_EXPIRY_S, 3)))
    await ear.quiet()


@clean_or_stored
async def test_no_more_are_under_way_than_the_client_takes(broker: Broker, clean: bool) -> None:
    ear = await listener(broker, b"a", clean=clean, properties=properties((RECEIVE_MAX, 2)))
    await (await talker(broker)).deliver(b"a", *(b"%d" % i for i in range(7)), qos=2)
    got: list[bytes] = []
    while len(got) < 7:
        under_way = await ear.publishes(min(2, 7 - len(got)), ack=False)
        await ear.quiet()
        for packet in under_way:
            ear.send(Pubrec(packet.packet_id, 0x80))
        got += [packet.payload for packet in under_way]
    assert got == [b"%d" % i for i in range(7)]


@clean_or_stored
async def test_what_is_too_large_for_a_client_is_left_out(broker: Broker, clean: bool) -> None:
    most = properties((PACKET_BYTES_MAX, 64))
    ear = await listener(broker, b"a", clean=clean, properties=most)
    mouth = await talker(broker)
    await mouth.deliver(b"a", b"x" * 100, b"fits", qos=1)
    assert await ear.payloads(1) == [b"fits"]
    await ear.quiet()


@clean_or_stored
async def test_aliases_of_both_sides(broker: Broker, clean: bool) -> None:
    few = properties((TOPIC_ALIAS_MAX, 1))
    ear = await listener(broker, b"#", clean=clean, properties=few)
    mouth = await talker(broker)
    for i in range(3):
        alias = properties((TOPIC_ALIAS, 5))
        mouth.publish(b"" if i else b"long/topic", b"%d" % i, 0, properties=alias)
    got = await ear.publishes(3)
    assert [(p.topic, p.properties) for p in got] == [
        (b"long/topic", properties((TOPIC_ALIAS, 1))),
        (b"", properties((TOPIC_ALIAS, 1))),
        (b"", properties((TOPIC_ALIAS, 1))),
    ]


@clean_or_stored
async def test_a_will_tells_of_a_client_that_is_silent(broker: Broker, clean: bool) -> None:
    ear = await listener(broker, b"wills", clean=clean)
    said = properties((USER_PROPERTY, (b"a", b"2")))
    await broker.connect(
        b"silent",
        version=5,
        clean=clean,
        keep_alive=5,
        will=ConnectWill(b"wills", b"keep alive", 2, False, said),
    )
    broker.hub._look_for_silence()
    broker.clock.advance(ms=7_501)
    broker.hub._look_for_silence()
    (got,) = await ear.publishes(1)
    assert (got.payload, got.properties) == (b"keep alive", said)


async def test_a_will_waits_but_no_longer_than_its_session(broker: Broker) -> None:
    ear = await listener(broker, b"wills", clean=True)
    delayed = ConnectWill(b"wills", b"gone", 1, False, properties((WILL_DELAY_S, 5)))
    for expiry, seconds in ((2, 2), (20, 5)):
        client = await broker.connect(b"dev%d" % expiry, version=5, expiry=expiry, will=delayed)
        await client.cut()
        broker.clock.advance(ms=seconds * 1000 - 1)
        broker.hub.wills.publish_due()
        await ear.quiet()
        broker.clock.advance(ms=2)
        broker.hub.wills.publish_due()
        assert await ear.payloads(1) == [b"gone"]


async def test_wildcards_do_not_match_dollar_topics(broker: Broker) -> None:
    ear = await listener(broker, b"#", b"+/x", clean=True)
    mouth = await talker(broker)
    mouth.publish(b"$SYS/x", b"1", 0)
    await mouth.quiet()
    await ear.quiet()


async def test_a_disconnect_with_will_publishes_it(broker: Broker) -> None:
    ear = await listener(broker, b"wills", clean=True)
    for reason, expected in ((0x04, 1), (0x00, 0), (0x83, 1)):
        client = await broker.connect(
            b"dev", version=5, clean=True, will=ConnectWill(b"wills", b"w", 1, False)
        )
        client.send(Disconnect(reason))
        await client.closed()
        assert len([p for p in await ear.until_ping() if type(p) is Publish]) == expected

"""MQTT 5 beside 3.1.1 on one port: each exchange, over the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_ext.wire import Connack, Disconnect, Properties, Pubcomp, Publish, Pubrec, Pubrel
from broker_ext.wire.properties import (
    ASSIGNED_CLIENT_ID,
    CONTENT_TYPE,
    MESSAGE_EXPIRY_S,
    PACKET_BYTES_MAX,
    RECEIVE_MAX,
    SESSION_EXPIRY_S,
    USER_PROPERTY,
)

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker


def properties(*pairs: tuple[int, int | bytes | tuple[bytes, bytes]]) -> Properties:
    return Properties(pairs)


async def test_connack_says_what_the_broker_limits(broker: Broker) -> None:
    client = await broker.connect(b"dev", version=5)
    told = client.connack.properties
    assert told is not None
    assert told.get(RECEIVE_MAX) == broker.settings.receive_maximum
    assert told.get(PACKET_BYTES_MAX) == broker.settings.max_packet_bytes
    assert told.get(SESSION_EXPIRY_S) is None  # as it was asked for


async def test_every_qos_goes_from_each_version_to_the_other(broker: Broker) -> None:
    for sender, receiver in ((4, 5), (5, 4), (5, 5)):
        name = b"%d%d" % (sender, receiver)
        subscriber = await broker.connect(b"sub" + name, version=receiver)
        assert await subscriber.subscribe((name, 2)) == bytes([2])
        publisher = await broker.connect(b"pub" + name, version=sender)
        for qos in (0, 1, 2):
            await publisher.deliver(name, b"%d" % qos, qos=qos)
            (got,) = await subscriber.publishes(1)
            assert (got.qos, got.payload) == (qos, b"%d" % qos)


async def test_properties_go_on_with_a_message_in_their_order(broker: Broker) -> None:
    subscriber = await broker.connect(b"sub", version=5)
    await subscriber.subscribe((b"t", 1))
    publisher = await broker.connect(b"pub", version=5)
    sent = ((USER_PROPERTY, (b"b", b"2")), (CONTENT_TYPE, b"x"), (USER_PROPERTY, (b"a", b"1")))
    publisher.publish(b"t", b"1", 1, properties=properties(*sent, (MESSAGE_EXPIRY_S, 60)))
    (got,) = await subscriber.publishes(1)
    assert got.properties == properties((MESSAGE_EXPIRY_S, 60), *sent)


async def test_an_empty_client_id_is_assigned_and_told_whatever_clean_start_is(
    broker: Broker,
) -> None:
    for clean in (True, False):
        client = await broker.connect(b"", version=5, clean=clean)
        assert client.connack.properties is not None
        assigned = client.connack.properties.get(ASSIGNED_CLIENT_ID)
        assert assigned in broker.hub.registry.owners


async def test_clean_start_and_expiry_are_two_things(broker: Broker) -> None:
    client = await broker.connect(b"dev", version=5, clean=True, expiry=100)
    assert not client.connack.session_present
    await client.subscribe((b"t", 1))
    await client.disconnect()
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", b"1")
    client = await broker.connect(b"dev", version=5, clean=False, expiry=0)
    assert client.connack.session_present
    assert await client.payloads(1) == [b"1"]
    await client.disconnect()  # it ends with this connection
    client = await broker.connect(b"dev", version=5, clean=False, expiry=100)
    assert not client.connack.session_present


async def test_a_session_of_one_version_is_resumed_by_the_other(broker: Broker) -> None:
    await broker.sleeper(b"dev", b"t")
    publisher = await broker.connect(b"pub")
    for version in (5, 4, 5):
        await publisher.deliver(b"t", b"%d" % version)
        client = await broker.connect(b"dev", version=version)
        assert client.connack.session_present
        assert await client.payloads(1) == [b"%d" % version]
        await client.disconnect()


async def test_disconnect_changes_the_expiry_but_never_from_0(broker: Broker) -> None:
    client = await broker.connect(b"dev", version=5, expiry=100)
    await client.disconnect(properties=properties((SESSION_EXPIRY_S, 1000)))
    snapshot = await broker.snapshot(b"dev")
    assert snapshot is not None
    assert snapshot.consumer.expiry_s == 1000
    client = await broker.connect(b"dev", version=5, expiry=100)
    await client.disconnect(properties=properties((SESSION_EXPIRY_S, 0)))
    assert await broker.snapshot(b"dev") is None
    client = await broker.connect(b"dev", version=5, expiry=0)
    client.send(Disconnect(0, properties((SESSION_EXPIRY_S, 5))))
    assert (await client.next(Disconnect)).reason == 0x82
    await client.closed()
    assert await broker.snapshot(b"dev") is None


async def test_the_receive_maximum_is_the_window_also_on_resume(broker: Broker) -> None:
    client = await broker.connect(b"dev", version=5)
    await client.subscribe((b"t", 2))
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", *(b"%d" % i for i in range(6)), qos=2)
    first = await client.publishes(6, ack=False)
    await client.cut()
    client = await broker.connect(b"dev", version=5, properties=properties((RECEIVE_MAX, 2)))
    got: list[Publish] = []
    while len(got) < 6:
        more = await client.publishes(2, ack=False)
        await client.quiet()  # the window is full
        for packet in more:
            client.send(Pubrec(packet.packet_id))
        for _ in more:
            client.send(Pubcomp((await client.next(Pubrel)).packet_id))
        got += more
    assert [p.packet_id for p in got] == [p.packet_id for p in first]


async def test_a_takeover_is_told(broker: Broker) -> None:
    older = await broker.connect(b"dev", version=5)
    await broker.connect(b"dev", version=5)
    assert (await older.next(Disconnect)).reason == 0x8E
    await older.closed()


async def test_unsuback_says_what_was_there(broker: Broker) -> None:
    for clean in (True, False):
        client = await broker.connect(b"dev", version=5, clean=clean)
        await client.subscribe(b"a")
        assert await client.unsubscribe(b"b", b"a") == bytes([0x11, 0])


async def test_a_version_that_is_not_known_is_answered_in_a_form_that_can_be_read(
    broker: Broker,
) -> None:
    client = await broker.dial()
    client.reads(5)
    client.send_bytes(b"\x10\x0d\x00\x04MQTT\x06\x02\x00\x00\x00\x00\x00")
    refused = await client.next(Connack)
    assert refused.reason == 0x84
    await client.closed()

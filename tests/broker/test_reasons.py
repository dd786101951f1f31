"""Every reason code that the broker sends, over the wire. DESIGN.md has the table."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from broker_ext.operations import kick
from broker_ext.wire import (
    Connack,
    ConnectWill,
    Disconnect,
    Properties,
    Puback,
    Pubrec,
    Subscribe,
    SubscribeFilter,
)
from broker_ext.wire.properties import (
    PACKET_BYTES_MAX,
    PAYLOAD_FORMAT,
    REASON_STRING,
    REQUEST_PROBLEM_INFORMATION,
)
from storage.errors import StoreFull, StoreUnavailable
from tests.broker.mqtt import running, will

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker, Client


def properties(*pairs: tuple[int, Any]) -> Properties:
    return Properties(pairs)


async def refused(broker: Broker, client_id: bytes = b"dev", **options: Any) -> Connack:
    """The CONNACK of a CONNECT that is not accepted; then the connection is closed."""
    client = await broker.dial()
    connack = await client.connect(client_id, version=5, **options)
    await client.closed()
    return connack


async def refused_raw(broker: Broker, data: bytes) -> Connack:
    client = await broker.dial()
    client.reads(5)
    client.send_bytes(data)
    connack = await client.next(Connack)
    await client.closed()
    return connack


async def disconnected(client: Client) -> Disconnect:
    """Why the broker ended a connection: the last it says."""
    packet = await client.next(Disconnect)
    await client.closed()
    return packet


def connect_5(rest: bytes, flags: int = 2) -> bytes:
    """A CONNECT from its flags on. rest: properties, client id, ..."""
    body = b"\x00\x04MQTT\x05" + bytes((flags,)) + b"\x00\x00" + rest
    return b"\x10" + bytes((len(body),)) + body


# ------------------------------------------------------------------- what breaks the rules


@pytest.mark.parametrize(
    "data",
    [
        connect_5(b"\x00\x00\x01a", flags=3),  # the reserved flag
        connect_5(b"\x00\x00\x01\xff"),  # a client id that is not UTF-8
        connect_5(b"\x03\x23\x00\x01\x00\x01a"),  # a topic alias in CONNECT
        connect_5(b"\x00\x00\x01a\x00"),  # longer than its fields
        connect_5(b"\x07\x26\x00\x01a\x00\x01\xff\x00\x01a"),  # half a pair is not UTF-8
    ],
)
async def test_0x81_a_malformed_connect_is_told_so(broker: Broker, data: bytes) -> None:
    assert (await refused_raw(broker, data)).reason == 0x81


@pytest.mark.parametrize(
    "data",
    [
        b"\x36\x06\x00\x01a\x00\x01\x00",  # QoS 3
        b"\x38\x04\x00\x01a\x00",  # DUP with QoS 0
        b"\x30\x07\x00\x01a\x03\x21\x00\x01",  # a receive maximum in PUBLISH
        b"\x30\x05\x00\x01\xff\x00x",  # a topic that is not UTF-8
        b"\x30\x0b\x00\x01a\x07\x26\x00\x01a\x00\x01\x00",  # a user property with NUL
        b"\x80\x07\x00\x01\x00\x00\x01a\x00",  # SUBSCRIBE with flags 0
        b"\x82\x07\x00\x01\x00\x00\x01a\x40",  # reserved options
        b"\xc0\x01\x00",  # PINGREQ with a body
        b"\xe0\x05\x00\x05\x11\x00\x00",  # a property cut short
        b"\x00\x00",  # packet type 0
    ],
)
async def test_0x81_a_malformed_packet_is_told_so(broker: Broker, data: bytes) -> None:
    client = await broker.connect(version=5)
    client.send_bytes(data)
    assert (await disconnected(client)).reason == 0x81


@pytest.mark.parametrize(
    "data",
    [
        connect_5(b"\x0a\x11\x00\x00\x00\x01\x11\x00\x00\x00\x01\x00\x01a"),  # expiry twice
        connect_5(b"\x03\x21\x00\x00\x00\x01a"),  # receive maximum 0
        connect_5(b"\x05\x27\x00\x00\x00\x00\x00\x01a"),  # maximum packet size 0
        connect_5(b"\x02\x17\x02\x00\x01a"),  # request problem information 2
        connect_5(b"\x04\x16\x00\x01d\x00\x01a"),  # authentication data without a method
    ],
)
async def test_0x82_a_connect_that_breaks_the_protocol_is_told_so(
    broker: Broker, data: bytes
) -> None:
    assert (await refused_raw(broker, data)).reason == 0x82


@pytest.mark.parametrize(
    "data",
    [
        connect_5(b"\x00\x00\x01a"),  # a second CONNECT
        b"\x30\x03\x00\x00\x00",  # neither topic nor alias
        b"\x30\x06\x00\x00\x03\x23\x00\x05",  # an alias that stands for nothing
        b"\x32\x06\x00\x01a\x00\x00\x00",  # packet id 0
        b"\x30\x08\x00\x01a\x04\x01\x00\x01\x00",  # payload format twice
        b"\x30\x06\x00\x01a\x02\x01\x02",  # payload format 2
        b"\x30\x06\x00\x01a\x02\x0b\x01",  # a subscription identifier from a client
        b"\x82\x09\x00\x01\x02\x0b\x00\x00\x01a\x00",  # subscription identifier 0
        b"\x82\x0b\x00\x01\x04\x0b\x01\x0b\x02\x00\x01a\x00",  # two of them
        b"\x82\x07\x00\x01\x00\x00\x01a\x03",  # QoS 3 is asked for
        b"\x82\x07\x00\x01\x00\x00\x01a\x30",  # retain handling 3
        b"\x82\x03\x00\x01\x00",  # SUBSCRIBE to nothing
        b"\xa2\x03\x00\x01\x00",  # UNSUBSCRIBE from nothing
        b"\x40\x03\x00\x01\x92",  # a reason that PUBACK does not have
        b"\xe0\x01\x8b",  # only a server shuts down
        b"\x20\x03\x00\x00\x00",  # CONNACK from a client
        b"\xf0\x00",  # AUTH, and no method
    ],
)
async def test_0x82_a_packet_that_breaks_the_protocol_is_told_so(
    broker: Broker, data: bytes
) -> None:
    client = await broker.connect(version=5)
    client.send_bytes(data)
    told = await disconnected(client)
    assert told.reason == 0x82
    assert told.properties is not None
    assert b"[MQTT" in told.properties.get(REASON_STRING)  # the clause, in our words


async def test_0x84_a_version_that_is_not_served() -> None:
    async with running(versions=frozenset({3, 4})) as broker:
        assert (await refused_raw(broker, connect_5(b"\x00\x00\x01a"))).reason == 0x84


async def test_0x8f_an_empty_filter_and_a_filter_that_is_none(broker: Broker) -> None:
    client = await broker.connect(version=5)
    assert await client.subscribe(b"a", b"a/#/b", b"a+") == bytes([1, 0x8F, 0x8F])
    client.send_bytes(b"\x82\x06\x00\x01\x00\x00\x00\x00")
    assert (await disconnected(client)).reason == 0x8F


async def test_0x90_a_topic_with_a_wildcard_ends_the_connection(broker: Broker) -> None:
    client = await broker.connect(version=5)
    client.publish(b"a/#", b"1")
    assert (await disconnected(client)).reason == 0x90


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_0x90_a_dollar_topic_is_not_taken(broker: Broker, qos: int) -> None:
    client = await broker.connect(version=5)
    client.publish(b"$SYS/x", b"1", qos, packet_id=7)
    if qos:
        answer: Any = await client.any()
        assert type(answer) is (Puback if qos == 1 else Pubrec)
        assert (answer.packet_id, answer.reason) == (7, 0x90)
    await client.quiet()
    assert not broker.hub.registry.owners[client.client_id].inbound
    refusal = await refused(broker, will=will(b"$SYS/x"))
    assert refusal.reason == 0x90


# -------------------------------------------------------------------------------- limits


async def test_0x93_more_under_way_than_the_receive_maximum() -> None:
    async with running(receive_maximum=3) as broker:
        client = await broker.connect(version=5)
        for i in (1, 2, 3):
            client.publish(b"t", b"1", 2, packet_id=i)
        for _ in range(3):
            await client.next(Pubrec)
        client.publish(b"t", b"1", 2, packet_id=2, dup=True)  # the same once more is no more
        await client.next(Pubrec)
        await client.deliver(b"t", b"1", qos=0)
        client.publish(b"t", b"1", 1, packet_id=4)
        assert (await disconnected(client)).reason == 0x93


async def test_0x93_counts_what_waits_for_the_disk_and_forgets_what_was_finished() -> None:
    async with running(receive_maximum=2) as broker:
        await broker.sleeper(b"keeper", b"t")
        client = await broker.connect(version=5)
        for _ in range(3):
            await client.deliver(b"t", b"1", b"2", qos=1)
            await client.deliver(b"t", b"1", b"2", qos=2)
        gate = broker.store.hang_submit()
        for i in (1, 2, 3):
            client.publish(b"t", b"1", 1, packet_id=i)
        assert (await disconnected(client)).reason == 0x93
        gate.release()


async def test_0x93_does_not_count_what_an_earlier_connection_left() -> None:
    async with running(receive_maximum=2) as broker:
        client = await broker.connect(b"dev", version=5)
        for i in (1, 2):
            client.publish(b"t", b"1", 2, packet_id=i)
            await client.next(Pubrec)
        await client.cut()
        client = await broker.connect(b"dev", version=5)
        for i in (3, 4):
            client.publish(b"t", b"1", 2, packet_id=i)
            await client.next(Pubrec)
        await client.quiet()


@pytest.mark.parametrize("alias", [0, 17, 65_535])
async def test_0x94_an_alias_above_the_maximum(broker: Broker, alias: int) -> None:
    client = await broker.connect(version=5)
    client.send_bytes(b"\x30\x07\x00\x01t\x03\x23" + alias.to_bytes(2, "big"))
    assert (await disconnected(client)).reason == 0x94


async def test_0x95_a_packet_that_is_too_large() -> None:
    async with running(max_packet_bytes=1024) as broker:
        client = await broker.connect(version=5)
        client.publish(b"t", b"x" * 1024)
        assert (await disconnected(client)).reason == 0x95
        assert (await refused(broker, will=will(b"t", b"x" * 1024))).reason == 0x95


async def test_0x95_a_client_that_cannot_be_told_what_it_must_know(broker: Broker) -> None:
    small = properties((PACKET_BYTES_MAX, 12))
    assert (await refused(broker, properties=small)).reason == 0x95
    client = await broker.dial()  # not even that
    client.reads(5)
    packet = client.connect_packet(b"dev", version=5, properties=properties((PACKET_BYTES_MAX, 4)))
    client.send(packet)
    await client.closed()
    assert not client._packets


async def test_0x95_a_suback_that_is_too_large_for_its_client(broker: Broker) -> None:
    client = await broker.connect(version=5, properties=properties((PACKET_BYTES_MAX, 40)))
    assert len(await client.subscribe(*(b"%d" % i for i in range(30)))) == 30
    client.send(Subscribe(9, tuple(SubscribeFilter(b"%d" % i, 0) for i in range(40))))
    assert (await disconnected(client)).reason == 0x95


@pytest.mark.parametrize("qos", [1, 2])
async def test_0x99_a_payload_that_is_not_utf_8_as_it_says(broker: Broker, qos: int) -> None:
    client = await broker.connect(version=5)
    wrong = properties((PAYLOAD_FORMAT, 1))
    client.publish(b"t", b"\xff", qos, properties=wrong)
    assert (await client.any()).reason == 0x99
    client.publish(b"t", b"\xc3\xa4", qos, properties=wrong)
    assert (await client.any()).reason in (0, 0x10)
    client.publish(b"t", b"\xff", 0, properties=wrong)
    assert (await disconnected(client)).reason == 0x99
    bad = ConnectWill(b"t", b"\xff", 1, False, wrong)
    assert (await refused(broker, will=bad)).reason == 0x99


async def test_0x9a_retain_where_it_is_not_available() -> None:
    async with running(max_retained_messages=0) as broker:
        client = await broker.connect(version=5)
        client.publish(b"t", b"1", retain=True)
        assert (await disconnected(client)).reason == 0x9A
        assert (await refused(broker, will=will(b"t", retain=True))).reason == 0x9A


async def test_0x9b_a_qos_above_the_maximum() -> None:
    async with running(max_qos=1) as broker:
        client = await broker.connect(version=5)
        assert await client.subscribe((b"t", 2)) == bytes([1])
        client.publish(b"t", b"1", 2)
        assert (await disconnected(client)).reason == 0x9B
        assert (await refused(broker, will=will(b"t", qos=2))).reason == 0x9B


async def test_0x9e_0xa1_0xa2_subscriptions_that_are_not_available() -> None:
    async with running(
        wildcard_subscriptions=False, subscription_identifiers=False, shared_subscriptions=False
    ) as broker:
        client = await broker.connect(version=5)
        codes = await client.subscribe(b"a", b"a/+", b"#", b"$share/g/a")
        assert codes == bytes([1, 0xA2, 0xA2, 0x9E])
        codes = await client.subscribe(b"b", properties=properties((11, 1)))
        assert codes == bytes([0xA1])
        old = await broker.connect(version=4)
        assert await old.subscribe(b"a", b"#") == bytes([1, 0x80])


# ---------------------------------------------------------------------------- permission


async def test_0x85_a_client_id_that_is_too_long() -> None:
    async with running(max_client_id_bytes=30) as broker:
        assert (await refused(broker, b"x" * 31)).reason == 0x85


async def test_0x86_0x87_who_is_not_let_in(broker: Broker) -> None:
    assert (await refused(broker, user=b"nobody", password=b"no")).reason == 0x86
    broker.anonymous = False
    assert (await refused(broker)).reason == 0x87
    broker.anonymous = True
    await broker.connect(b"dev", version=5, user=b"alice")
    assert (await refused(broker, user=b"bob")).reason == 0x87  # P14


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_0x87_what_the_topic_plugins_do_not_permit(qos: int) -> None:
    async with running(prepare=lambda b: setattr(b, "slow", True)) as broker:
        subscriber = await broker.connect(version=5)
        assert await subscriber.subscribe(b"forbidden/x", b"t") == bytes([0x87, 1])
        client = await broker.connect(version=5)
        client.publish(b"forbidden/x", b"1", qos)
        if qos:
            assert (await client.any()).reason == 0x87
        await client.quiet()
        await client.deliver(b"t", b"1", qos=qos)
        assert await subscriber.payloads(1) == [b"1"]


# ------------------------------------------------------------------------------ the broker


async def test_0x80_a_subscription_change_that_cannot_be_saved() -> None:
    async with running() as broker:
        client = await broker.connect(b"dev", version=5)
        assert await client.subscribe(b"a") == bytes([1])
        broker.store.fail_submit(StoreFull("no space"))
        assert await client.subscribe(b"b") == bytes([0x80])
        await broker.hub.committer.drain()
        broker.store.fail_submit(StoreFull("no space"))
        assert await client.unsubscribe(b"a", b"b") == bytes([0x80, 0x80])
        await broker.hub.committer.drain()
        assert await client.unsubscribe(b"a", b"b") == bytes([0, 0x11])


async def test_0x80_a_session_whose_store_cannot_be_read(broker: Broker) -> None:
    await broker.sleeper(b"dev", b"t")
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", b"1")
    await broker.restart()
    broker.store.fail_read(StoreUnavailable("I/O error"))
    client = await broker.connect(b"dev", version=5)
    assert (await disconnected(client)).reason == 0x80
    client = await broker.connect(b"dev", version=5)
    assert await client.payloads(1) == [b"1"]


async def test_0x88_0x89_a_store_that_does_not_answer_and_one_that_is_slow() -> None:
    async with running(takeover_timeout_s=0.2) as broker:
        broker.store.fail_submit(StoreUnavailable("I/O error"))
        assert (await refused(broker)).reason == 0x88
        await broker.hub.committer.drain()
        gate = broker.store.hang_submit()
        assert (await refused(broker)).reason == 0x89
        gate.release()
        broker.hub.refusing = True
        assert (await refused(broker)).reason == 0x88
        broker.hub.refusing = False


async def test_0x8b_a_broker_that_stops(broker: Broker) -> None:
    client = await broker.connect(b"dev", version=5)
    await broker.restart()
    assert (await disconnected(client)).reason == 0x8B


async def test_0x8d_a_client_that_is_silent(broker: Broker) -> None:
    client = await broker.connect(b"dev", version=5, keep_alive=10, will=will(b"w"))
    broker.hub._look_for_silence()
    broker.clock.advance(ms=15_001)
    broker.hub._look_for_silence()
    assert (await disconnected(client)).reason == 0x8D


async def test_0x8e_who_is_taken_over(broker: Broker) -> None:
    for version in (5, 4):
        older = await broker.connect(b"dev", version=5)
        await broker.connect(b"dev", version=version)
        assert (await disconnected(older)).reason == 0x8E


async def test_0x98_who_is_kicked(broker: Broker) -> None:
    client = await broker.connect(b"dev", version=5)
    await kick(broker.hub, client_id="dev")
    assert (await disconnected(client)).reason == 0x98


# ------------------------------------------------------------------- reason strings


async def test_no_words_where_the_client_wants_none_or_they_do_not_fit(broker: Broker) -> None:
    for asked in ((REQUEST_PROBLEM_INFORMATION, 0), (PACKET_BYTES_MAX, 30)):
        client = await broker.connect(version=5, properties=properties(asked))
        client.send_bytes(b"\xf0\x00")
        told = await disconnected(client)
        assert told == Disconnect(0x82)


async def test_0x93_counts_what_waits_for_a_topic_plugin() -> None:
    async with running(receive_maximum=3, prepare=lambda b: setattr(b, "slow", True)) as broker:
        gate = broker.slow_filters[b"slow"] = asyncio.Event()
        client = await broker.connect(version=5)
        client.send(Subscribe(9, (SubscribeFilter(b"slow", 1),)))
        for i in (1, 2, 3):
            client.publish(b"t", b"1", 2, packet_id=i)
        client.publish(b"t", b"1", 1, packet_id=4)
        packet = await client.any()
        while type(packet) is not Disconnect:
            packet = await client.any()
        assert packet.reason == 0x93
        gate.set()

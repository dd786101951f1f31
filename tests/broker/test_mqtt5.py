"""MQTT 5 beside 3.1.1 on one port: each exchange, over the wire."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest

from broker_ext.terms import FOR_EVER
from broker_ext.wire import (
    Connack,
    Disconnect,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
)
from broker_ext.wire.properties import (
    ASSIGNED_CLIENT_ID,
    CONTENT_TYPE,
    MESSAGE_EXPIRY_S,
    PACKET_BYTES_MAX,
    QOS_MAX,
    REASON_STRING,
    RECEIVE_MAX,
    REQUEST_PROBLEM_INFORMATION,
    REQUEST_RESPONSE_INFORMATION,
    RESPONSE_INFORMATION,
    RETAIN_AVAILABLE,
    SERVER_KEEP_ALIVE_S,
    SESSION_EXPIRY_S,
    SHARED_AVAILABLE,
    SUBSCRIPTION_IDS_AVAILABLE,
    TOPIC_ALIAS,
    TOPIC_ALIAS_MAX,
    USER_PROPERTY,
    WILDCARDS_AVAILABLE,
)
from storage.errors import EntryDamaged
from tests.broker.mqtt import running
from tests.storage import faults

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker, Client
    from tests.storage.harness import Backend


def properties(*pairs: tuple[int, int | bytes | tuple[bytes, bytes]]) -> Properties:
    return Properties(pairs)


def told(client: Client) -> Properties:
    """The properties of its CONNACK."""
    assert client.connack.properties is not None
    return client.connack.properties


async def test_connack_says_what_the_broker_limits(broker: Broker) -> None:
    client = await broker.connect(b"dev", version=5, keep_alive=60)
    assert dict(told(client).pairs) == {
        RECEIVE_MAX: 1000,
        PACKET_BYTES_MAX: 16 << 20,
        TOPIC_ALIAS_MAX: 16,
        **({} if broker.settings.shared_subscriptions else {SHARED_AVAILABLE: 0}),
    }


async def test_connack_says_everything_that_is_limited() -> None:
    async with running(
        max_qos=1,
        receive_maximum=65_535,
        topic_alias_maximum=0,
        max_retained_messages=0,
        max_packet_bytes=2048,
        wildcard_subscriptions=False,
        subscription_identifiers=False,
        shared_subscriptions=False,
        session_expiry_interval_s=100,
        max_keep_alive_s=30,
        response_information="answers/{client_id}/",
    ) as broker:
        asked = properties((REQUEST_RESPONSE_INFORMATION, 1))
        client = await broker.connect(b"", version=5, keep_alive=60, properties=asked)
        assigned = told(client).get(ASSIGNED_CLIENT_ID)
        assert dict(told(client).pairs) == {
            SESSION_EXPIRY_S: 100,
            QOS_MAX: 1,
            RETAIN_AVAILABLE: 0,
            PACKET_BYTES_MAX: 2048,
            ASSIGNED_CLIENT_ID: assigned,
            WILDCARDS_AVAILABLE: 0,
            SUBSCRIPTION_IDS_AVAILABLE: 0,
            SHARED_AVAILABLE: 0,
            SERVER_KEEP_ALIVE_S: 30,
            RESPONSE_INFORMATION: b"answers/" + assigned + b"/",
        }
        client = await broker.connect(b"dev", version=5, keep_alive=20, expiry=50)
        assert told(client).get(RESPONSE_INFORMATION) is None  # it did not ask
        assert told(client).get(SERVER_KEEP_ALIVE_S) is None
        assert told(client).get(SESSION_EXPIRY_S) is None


async def test_the_server_keep_alive_is_the_one_that_counts() -> None:
    async with running(max_keep_alive_s=10) as broker:
        client = await broker.connect(b"dev", version=5, keep_alive=0)
        assert told(client).get(SERVER_KEEP_ALIVE_S) == 10
        broker.hub._look_for_silence()
        broker.clock.advance(ms=14_900)
        broker.hub._look_for_silence()
        await client.quiet()
        broker.hub._look_for_silence()
        broker.clock.advance(ms=15_100)
        broker.hub._look_for_silence()
        assert (await client.next(Disconnect)).reason == 0x8D


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
        assigned = told(client).get(ASSIGNED_CLIENT_ID)
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


@pytest.mark.parametrize("level", [0, 6, 77])
async def test_a_version_that_is_not_known_is_answered_as_3_1_1_must_be(
    broker: Broker, level: int
) -> None:
    """[MQTT-3.1.2-2]: return code 1; MQTT 5 leaves it to the server."""
    client = await broker.dial()
    client.send_bytes(b"\x10\x0d\x00\x04MQTT%c\x02\x00\x00\x00\x00\x00" % level)
    assert (await client.next(Connack)).reason == 1
    await client.closed()


# ----------------------------------------------------------------------- session expiry


async def test_a_session_that_ends_with_its_connection_is_not_taken_over(broker: Broker) -> None:
    client = await broker.connect(b"dev", version=5, clean=False, expiry=0)
    await client.subscribe(b"t")
    newer = await broker.connect(b"dev", version=5, clean=False, expiry=0)
    assert not newer.connack.session_present
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", b"1")
    await newer.quiet()


@pytest.mark.parametrize("stops", [True, False])
async def test_expiry_counts_from_the_disconnect_over_restarts_and_clock_jumps(
    disk: Backend, stops: bool
) -> None:
    async with running(disk) as broker:
        for name, expiry in ((b"short", 100), (b"long", 1000), (b"ever", FOR_EVER)):
            client = await broker.connect(name, version=5, expiry=expiry)
            await client.subscribe(b"t")
            broker.clock.advance(ms=500_000)  # while connected nothing counts
            await client.disconnect()
        broker.clock.advance(ms=50_000)
        await broker.hub._prune()
        await (broker.restart() if stops else broker.crash_and_restart())
        broker.clock.jump(ms=-3_600_000)
        await broker.restart()  # the clock was set back: time does not
        assert (await broker.connect(b"ever", version=5)).connack.session_present
        broker.clock.advance(ms=60_000)
        await broker.hub._expire()
        assert await broker.snapshot(b"short") is None
        assert (await broker.connect(b"long", version=5)).connack.session_present


async def test_the_configured_maximum_caps_the_expiry_and_disconnect_is_capped_too() -> None:
    async with running(session_expiry_interval_s=60) as broker:
        client = await broker.connect(b"dev", version=5, expiry=FOR_EVER)
        assert told(client).get(SESSION_EXPIRY_S) == 60
        await client.disconnect(properties=properties((SESSION_EXPIRY_S, 4_000_000_000)))
        snapshot = await broker.snapshot(b"dev")
        assert snapshot is not None
        assert snapshot.consumer.expiry_s == 60


async def test_an_expiry_is_that_of_the_last_connection(broker: Broker) -> None:
    client = await broker.connect(b"dev", version=5, expiry=10)
    await client.quiet()
    await client.cut()
    client = await broker.connect(b"dev", version=5, expiry=1000)
    assert client.connack.session_present
    await client.cut()
    broker.clock.advance(ms=100_000)
    client = await broker.connect(b"dev", version=4)
    assert client.connack.session_present
    await client.cut()
    broker.clock.advance(ms=10_000_000)  # 3.1.1 has no expiry of its own
    assert (await broker.connect(b"dev", version=4)).connack.session_present


# ------------------------------------------------------------------------------- verdicts


async def pruned(broker: Broker) -> None:
    """A session at rest that lost what it had not had."""
    await broker.sleeper(b"dev", b"t")
    publisher = await broker.connect(b"pub", clean=True)
    await publisher.deliver(b"t", *(b"%d" % i for i in range(10)))
    await publisher.disconnect()
    await broker.hub._prune()


async def test_a_reset_is_told_in_words_and_again_until_it_was_heard() -> None:
    async with running(max_messages=1) as broker:
        await pruned(broker)
        for _ in range(2):
            client = await broker.connect(b"dev", version=5)
            assert not client.connack.session_present
            assert told(client).get(REASON_STRING) == b"resume: 410 history-pruned"
            assert told(client).all(USER_PROPERTY) == (
                (b"resume", b"410 history-pruned"),
                (b"position", b"0"),
                (b"floor", b"9"),
            )
            await client.cut()
        client = await broker.connect(b"dev", version=5)
        await client.quiet()
        await client.cut()
        client = await broker.connect(b"dev", version=5)
        assert client.connack.session_present
        assert told(client).get(REASON_STRING) is None


async def test_who_wants_no_problem_information_is_told_session_present_0() -> None:
    async with running(max_messages=1) as broker:
        await pruned(broker)
        asked = properties((REQUEST_PROBLEM_INFORMATION, 0))
        client = await broker.connect(b"dev", version=5, properties=asked)
        assert not client.connack.session_present
        assert told(client).get(REASON_STRING) is None
        assert told(client).get(USER_PROPERTY) is None


async def test_another_generation_is_told_in_words(broker: Broker) -> None:
    await broker.sleeper(b"dev", b"t")
    await broker.stop()
    faults.restore(broker.store.inner, "f" * 32)  # type: ignore[arg-type]
    await broker.start(on_generation_change="reset")
    client = await broker.connect(b"dev", version=5)
    assert not client.connack.session_present
    assert told(client).get(REASON_STRING) == b"resume: 409 generation-changed"
    assert told(client).all(USER_PROPERTY) == (
        (b"resume", b"409 generation-changed"),
        (b"position", b"0"),
        (b"head", b"0"),
        (b"generation", b"f" * 32),
    )


async def test_a_refusal_during_the_replay_is_told_in_words_with_0x83(broker: Broker) -> None:
    await broker.sleeper(b"dev", b"t")
    publisher = await broker.connect(b"pub", clean=True)
    await publisher.deliver(b"t", *(b"%d" % i for i in range(10)))
    await broker.restart()
    broker.store.fail_read(EntryDamaged(3, b"t"), nth=1)
    client = await broker.connect(b"dev", version=5)
    assert client.connack.session_present
    packet = await client.next(Disconnect)
    assert packet.reason == 0x83
    assert packet.properties is not None
    assert packet.properties.get(REASON_STRING) == b"resume: 410 history-unavailable"
    await client.closed()
    client = await broker.connect(b"dev", version=5)
    assert not client.connack.session_present
    assert told(client).get(REASON_STRING) == b"resume: 410 history-unavailable"


# ----------------------------------------------------------------------------- aliases


async def test_a_clients_aliases_are_its_connections_and_change_their_meaning(
    broker: Broker,
) -> None:
    subscriber = await broker.subscriber(b"sub", b"#", version=5)
    publisher = await broker.connect(b"pub", version=5)

    def alias(topic: bytes, number: int) -> None:
        publisher.publish(topic, b"x", 1, properties=properties((TOPIC_ALIAS, number)))

    alias(b"a", 1)
    alias(b"b", 16)
    alias(b"", 1)
    alias(b"", 16)
    alias(b"c", 1)
    alias(b"", 1)
    got = await subscriber.publishes(6)
    assert [p.topic for p in got] == [b"a", b"b", b"a", b"b", b"c", b"c"]
    assert all(p.properties is None for p in got)
    await publisher.cut()
    publisher = await broker.connect(b"pub", version=5)
    alias(b"", 1)
    assert (await publisher.next(Disconnect)).reason == 0x82


async def test_topics_are_sent_under_aliases_where_the_client_permits_it(broker: Broker) -> None:
    asked = properties((TOPIC_ALIAS_MAX, 2))
    subscriber = await broker.subscriber(b"sub", (b"#", 2), version=5, properties=asked)
    publisher = await broker.connect(b"pub")
    topics = (b"long/1", b"long/2", b"long/1", b"long/3", b"long/2", b"ab", b"long/1")
    for i, topic in enumerate(topics):
        await publisher.deliver(topic, b"x", qos=i % 3)
        packet = (await subscriber.publishes(1))[0]
        number = packet.properties.get(TOPIC_ALIAS) if packet.properties else None
        expected = {0: (b"long/1", 1), 1: (b"long/2", 2), 2: (b"", 1), 4: (b"", 2), 6: (b"", 1)}
        assert (packet.topic, number) == expected.get(i, (topic, None))
    await subscriber.cut()
    await publisher.deliver(b"long/1", b"x")
    subscriber = await broker.connect(b"sub", version=5, properties=asked)
    (packet,) = await subscriber.publishes(1)
    assert packet.topic == b"long/1"  # another connection, other aliases


# ------------------------------------------------------------------------------ flow


@pytest.mark.parametrize("clean", [True, False])
async def test_a_pubrec_that_refuses_ends_the_delivery(broker: Broker, clean: bool) -> None:
    asked = properties((RECEIVE_MAX, 1))
    client = await broker.connect(b"dev", version=5, clean=clean, properties=asked)
    await client.subscribe((b"t", 2))
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", b"1", b"2", b"3", qos=2)
    (first,) = await client.publishes(1, ack=False)
    client.send(Pubrec(first.packet_id, 0x87))
    (second,) = await client.publishes(1, ack=False)
    assert second.payload == b"2"
    client.send(Pubrec(second.packet_id))
    await client.next(Pubrel)
    client.send(Pubrec(second.packet_id, 0x87))  # too late: it was received
    client.send(Pubcomp(second.packet_id, 0x92))
    assert await client.payloads(1) == [b"3"]


async def test_a_puback_that_refuses_is_a_puback(broker: Broker) -> None:
    client = await broker.subscriber(b"dev", b"t", version=5)
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", b"1")
    (packet,) = await client.publishes(1, ack=False)
    client.send(Puback(packet.packet_id, 0x97))
    await client.quiet()
    await client.cut()
    assert await broker.unsettled(b"dev") == []


async def test_everything_the_broker_sends_to_3_1_1_is_3_1_1(broker: Broker) -> None:
    old = await broker.subscriber(b"old", b"#", version=4)
    new = await broker.connect(b"new", version=5)
    new.publish(b"t", b"1", 1, properties=properties((CONTENT_TYPE, b"x"), (TOPIC_ALIAS, 1)))
    (packet,) = await old.publishes(1)
    assert (packet.topic, packet.payload) == (b"t", b"1")


async def test_a_connection_that_is_over_is_freed_at_once(broker: Broker) -> None:
    client = await broker.subscriber(b"dev", b"t", version=5, properties=properties((34, 5)))
    (connection,) = broker.hub.connections
    left = weakref.ref(connection)
    del connection
    gc.disable()
    try:
        await client.cut()
        await broker.turns(lambda: left() is None)
    finally:
        gc.enable()

"""MQTT 5: what a message carries reaches whoever receives it, unaltered and as long as it is valid,
whatever way it takes: live, backlog, restart, retained, will, held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from broker_ext.session import publish_bytes
from broker_ext.wire import Properties, Puback, Publish, Pubrec, encode, read_forwarded
from broker_ext.wire.properties import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    MESSAGE_EXPIRY_S,
    PACKET_BYTES_MAX,
    PAYLOAD_FORMAT,
    RECEIVE_MAX,
    RESPONSE_TOPIC,
    SUBSCRIPTION_ID,
    TOPIC_ALIAS_MAX,
    USER_PROPERTY,
)
from storage.api import Entry
from storage.outbox import SESSIONS, Failure
from tests.broker.mqtt import running, will

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker, Client

FORWARDED: Final = (
    (PAYLOAD_FORMAT, 1),
    (USER_PROPERTY, (b"b", b"first")),
    (CONTENT_TYPE, "text/plain ä".encode()),
    (RESPONSE_TOPIC, b"answers/7"),
    (CORRELATION_DATA, bytes(range(256))),
    (USER_PROPERTY, (b"a", b"second")),
    (USER_PROPERTY, (b"b", b"")),
)
ALL: Final = Properties(FORWARDED)


def expiring(seconds: int, *more: tuple[int, int | bytes]) -> Properties:
    return Properties(((MESSAGE_EXPIRY_S, seconds), *more))


def left_s(packet: Publish) -> int | None:
    return None if packet.properties is None else packet.properties.get(MESSAGE_EXPIRY_S)


async def publisher(broker: Broker) -> Client:
    return await broker.connect(b"p", clean=True, version=5)


# ------------------------------------------------------------------------- what is carried


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("clean", [False, True])
async def test_properties_come_in_their_order(broker: Broker, qos: int, clean: bool) -> None:
    client = await broker.connect(b"s", clean=clean, version=5)
    await client.subscribe((b"t", 2))
    (await publisher(broker)).publish(b"t", b"m", qos, properties=ALL)
    (packet,) = await client.publishes(1)
    assert packet.properties == ALL


async def test_properties_survive_the_backlog_and_a_crash(durable_broker: Broker) -> None:
    broker = durable_broker
    client = await broker.connect(b"s", version=5)
    await client.subscribe((b"t", 2))
    sender = await publisher(broker)
    sender.publish(b"t", b"in flight", 1, properties=ALL)
    await client.publishes(1, ack=False)
    await client.cut()
    sender.publish(b"t", b"queued", 2, properties=ALL)
    await sender.next(Puback)
    await sender.next(Pubrec)
    await broker.crash_and_restart()
    client = await broker.connect(b"s", version=5)
    got = await client.publishes(2)
    assert [(p.payload, p.dup, p.properties) for p in got] == [
        (b"in flight", True, ALL),
        (b"queued", False, ALL),
    ]


async def test_a_retained_message_has_its_properties_after_a_restart(
    durable_broker: Broker,
) -> None:
    broker = durable_broker
    sender = await publisher(broker)
    sender.publish(b"t", b"m", 1, retain=True, properties=ALL)
    await sender.next(Puback)
    await broker.crash_and_restart()
    for client_id, clean in ((b"transient", True), (b"durable", False)):
        client = await broker.connect(client_id, clean=clean, version=5)
        await client.subscribe(b"t")
        (packet,) = await client.publishes(1, ack=False)
        assert (packet.retain, packet.properties) == (True, ALL)
    await client.cut()
    await broker.crash_and_restart()  # its copy is held
    client = await broker.connect(b"durable", version=5)
    (packet,) = await client.publishes(1)
    assert (packet.dup, packet.properties) == (True, ALL)


async def test_a_will_has_its_properties(durable_broker: Broker) -> None:
    broker = durable_broker
    listener = await broker.connect(b"l", version=5)
    await listener.subscribe(b"w")
    message = will(b"w")._replace(properties=ALL)
    client = await broker.connect(b"c", version=5, will=message)
    await client.cut()
    assert [p.properties for p in await listener.publishes(1)] == [ALL]
    await broker.connect(b"d", version=5, will=message)
    await broker.crash_and_restart()
    broker.hub.wills.publish_orphans()
    listener = await broker.connect(b"l", version=5)
    assert [p.properties for p in await listener.publishes(1)] == [ALL]


async def test_readers_of_the_history_are_given_properties(broker: Broker) -> None:
    async with broker.hub.history.subscribe(["t"]) as messages:
        sender = await publisher(broker)
        sender.publish(b"t", b"m", 1, properties=expiring(60, *FORWARDED))  # type: ignore[arg-type]
        message = await anext(messages)
        assert read_forwarded(message.properties) == ALL


async def test_older_clients_are_sent_no_properties(broker: Broker) -> None:
    for client_id, clean in ((b"s", False), (b"t", True)):
        client = await broker.connect(client_id, clean=clean)
        await client.subscribe((b"t", 2))
        sender = await publisher(broker)
        for qos in (0, 1, 2):
            sender.publish(b"t", b"m", qos, properties=expiring(60, *FORWARDED))  # type: ignore[arg-type]
        got = await client.publishes(3)
        assert [(p.payload, p.properties) for p in got] == [(b"m", None)] * 3


# --------------------------------------------------------------------------- message expiry


async def test_a_message_comes_with_the_time_that_is_left(durable_broker: Broker) -> None:
    broker = durable_broker
    client = await broker.connect(b"s", version=5)
    await client.subscribe(b"t")
    sender = await publisher(broker)
    sender.publish(b"t", b"live", properties=expiring(10))
    assert [left_s(p) for p in await client.publishes(1)] == [10]
    await client.disconnect()
    await sender.next(Puback)
    sender.publish(b"t", b"queued", properties=expiring(10))
    await sender.next(Puback)
    broker.clock.advance(ms=3_200)
    await broker.restart()
    client = await broker.connect(b"s", version=5)
    assert [left_s(p) for p in await client.publishes(1)] == [7]


@pytest.mark.parametrize("restart", [False, True])
async def test_an_expired_message_of_the_backlog_is_not_delivered(
    durable_broker: Broker, restart: bool
) -> None:
    broker = durable_broker
    await broker.sleeper(b"s", (b"t", 2))
    sender = await publisher(broker)
    for qos in (1, 2):
        sender.publish(b"t", b"short", qos, properties=expiring(1))
        sender.publish(b"t", b"long", qos, properties=expiring(100))
        sender.publish(b"t", b"for ever", qos)
    await sender.until_ping()
    await broker.hub.committer.drain()  # what is not acknowledged may be lost
    broker.clock.advance(ms=1_000)
    if restart:
        await broker.crash_and_restart()
    client = await broker.connect(b"s", version=5)
    got = await client.publishes(4)
    assert [p.payload for p in got] == [b"long", b"for ever"] * 2
    await client.quiet()
    await broker.turns(lambda: broker.is_idle(b"s"))
    assert broker.hub.figures.expired_messages == 2


async def test_what_expires_while_it_waits_for_the_window_is_settled_unsent(
    broker: Broker,
) -> None:
    for client_id, clean in ((b"durable", False), (b"transient", True)):
        window = Properties(((RECEIVE_MAX, 1),))
        client = await broker.connect(client_id, clean=clean, version=5, properties=window)
        await client.subscribe((b"t", 2))
        sender = await publisher(broker)
        for qos in (1, 2):
            sender.publish(b"t", b"first", qos, properties=expiring(10))
            for _ in range(3):
                sender.publish(b"t", b"short", qos, properties=expiring(1))
        sender.publish(b"t", b"last", properties=expiring(10))
        (first,) = await client.publishes(1, ack=False)
        await sender.until_ping()
        await client.quiet()
        broker.clock.advance(ms=1_000)
        client.send(Puback(first.packet_id))
        assert await client.payloads(2) == [b"first", b"last"]
        await client.quiet()
        if not clean:
            await broker.turns(lambda: broker.is_idle(b"durable"))
            assert await broker.unsettled(b"durable") == []
        await client.disconnect()
    assert broker.hub.figures.expired_messages == 12


async def test_what_may_have_been_sent_before_it_expired_is_sent_again(broker: Broker) -> None:
    """[MQTT5-4.4.0-1]: its packet id is in use at the client's side, who ends the delivery."""
    client = await broker.connect(b"s", version=5)
    await client.subscribe((b"t", 2))
    sender = await publisher(broker)
    sender.publish(b"t", b"m", 2, properties=expiring(1))
    (sent,) = await client.publishes(1, ack=False)
    await client.cut()
    broker.clock.advance(ms=5_000)
    client = await broker.connect(b"s", version=5)
    (again,) = await client.publishes(1)
    assert (again.packet_id, again.dup, left_s(again)) == (sent.packet_id, True, 0)
    await broker.turns(lambda: broker.is_idle(b"s"))
    assert await broker.unsettled(b"s") == []


async def test_a_session_is_not_reset_for_what_had_expired_when_it_was_pruned() -> None:
    for seconds, present in ((1, True), (100, False)):
        async with running(max_messages=2, prune_interval_s=1.0) as broker:
            await broker.sleeper(b"s", b"t/#")
            sender = await publisher(broker)
            for number in range(10):
                sender.publish(b"t/%d" % number, b"short", properties=expiring(seconds))
            for number in range(2):
                sender.publish(b"t/0", b"%d" % number)
            await sender.until_ping()
            broker.clock.advance(ms=1_000)
            await broker.hub._prune()
            client = await broker.connect(b"s", version=5)
            assert client.connack.session_present is present
            if present:
                assert await client.payloads(2) == [b"0", b"1"]


async def test_an_expired_message_is_not_delivered_though_the_clock_was_set_back(
    durable_broker: Broker,
) -> None:
    broker = durable_broker
    await broker.sleeper(b"s", b"t")
    sender = await publisher(broker)
    sender.publish(b"t", b"short", properties=expiring(10))
    await sender.next(Puback)
    broker.clock.advance(ms=10_000)
    await broker.sleeper(b"other", b"u")  # a commit, so that the store has seen the time
    await broker.stop()
    broker.clock.jump(ms=-31_536_000_000)
    await broker.start()
    client = await broker.connect(b"s", version=5)
    await broker.turns(lambda: broker.is_idle(b"s"))
    await client.quiet()


async def test_a_retained_message_is_not_given_when_its_time_is_over(
    durable_broker: Broker,
) -> None:
    broker = durable_broker
    sender = await publisher(broker)
    for topic, seconds in ((b"t/1", 1), (b"t/5", 5), (b"t/9", 9)):
        sender.publish(topic, topic, retain=True, properties=expiring(seconds))
    sender.publish(b"t/9", b"for ever", retain=True)
    await sender.until_ping()
    broker.clock.advance(ms=1_000)
    client = await broker.connect(b"c", clean=True, version=5)
    await client.subscribe((b"t/#", 0))
    got = await client.publishes(2)
    assert [(p.topic, left_s(p)) for p in got] == [(b"t/5", 4), (b"t/9", None)]
    await client.quiet()
    await broker.hub._expire()
    await broker.hub.committer.drain()
    assert [m.topic for m in await broker.store.inner.retained()] == [b"t/5", b"t/9"]
    assert len(broker.hub.retained) == 2
    await broker.stop()
    broker.clock.advance(ms=4_000)
    await broker.start()
    assert len(broker.hub.retained) == 1
    await broker.hub.committer.drain()
    assert [m.payload for m in await broker.store.inner.retained()] == [b"for ever"]


async def test_replacing_a_retained_message_for_ever_keeps_no_deadlines(broker: Broker) -> None:
    sender = await publisher(broker)
    for number in range(5_000):
        sender.publish(b"t", b"%d" % number, 0, retain=True, properties=expiring(10_000))
    await sender.until_ping()
    assert len(broker.hub.retained._deadlines) < 2_000


async def test_the_time_of_a_will_runs_from_its_publication(broker: Broker) -> None:
    await broker.sleeper(b"l", b"w")
    message = will(b"w")._replace(properties=expiring(10))
    client = await broker.connect(b"c", version=5, will=message)
    broker.clock.advance(ms=60_000)
    await client.cut()
    broker.clock.advance(ms=3_000)
    listener = await broker.connect(b"l", version=5)
    assert [left_s(p) for p in await listener.publishes(1)] == [7]
    client = await broker.connect(b"c", version=5, will=message)
    await listener.disconnect()
    await client.cut()
    broker.clock.advance(ms=10_000)
    listener = await broker.connect(b"l", version=5)
    await listener.quiet()


async def test_a_message_with_no_time_to_live_is_delivered_to_nobody(broker: Broker) -> None:
    client = await broker.connect(b"s", version=5)
    await client.subscribe((b"t", 1))
    sender = await publisher(broker)
    for qos in (0, 1):
        sender.publish(b"t", b"m", qos, properties=expiring(0))
    await sender.next(Puback)
    await broker.turns(lambda: broker.is_idle(b"s"))
    await client.quiet()


# ------------------------------------------------------------------------ what is too large


@pytest.mark.parametrize("clean", [False, True])
async def test_what_is_too_large_for_the_client_is_settled_unsent(
    durable_broker: Broker, clean: bool
) -> None:
    broker = durable_broker
    small = Properties(((PACKET_BYTES_MAX, 200),))
    client = await broker.connect(b"s", clean=clean, version=5, properties=small)
    await client.subscribe((b"t", 2))
    sender = await publisher(broker)
    for qos in (0, 1, 2):
        sender.publish(b"t", b"small", qos)
        sender.publish(b"t", bytes(200), qos)
        sender.publish(b"t", b"many properties", qos, properties=ALL)
    got = await client.publishes(3)
    assert [p.payload for p in got] == [b"small"] * 3
    await client.quiet()
    assert broker.hub.figures.too_large == 6
    if not clean:
        await broker.turns(lambda: broker.is_idle(b"s"))
        assert await broker.unsettled(b"s") == []
        letters = await broker.store.inner.outbox.dead_letters(SESSIONS)
        assert [
            (m.destination, m.failure, m.message and m.message._replace(offset=m.offset))
            for m in letters
        ] == [
            (b"s", Failure.TOO_LARGE, entry)
            for entry in await _history_of(broker)
            if len(entry.payload) + len(entry.properties) > 150
        ]


async def test_dead_letters_of_one_connection_keep_a_bounded_number_of_payloads(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker_ext.durable.DEAD_BYTES_MAX", 1_000)
    small = Properties(((PACKET_BYTES_MAX, 200),))
    client = await broker.connect(b"s", version=5, properties=small)
    await client.subscribe(b"t")
    sender = await publisher(broker)
    await sender.deliver(b"t", *(bytes(300) for _ in range(10)))
    await broker.turns(lambda: broker.is_idle(b"s"))
    await broker.hub.committer.drain()
    letters = await broker.store.inner.outbox.dead_letters(SESSIONS)
    assert [m.message is not None for m in letters] == [True] * 3 + [False] * 7


async def _history_of(broker: Broker) -> list[Entry]:
    chunk = await broker.store.inner.read(0, lambda _: 2, entries_max=100, bytes_max=1 << 20)
    return [entry for entry, _ in chunk.entries]


@pytest.mark.parametrize("aliases", [0, 64])
async def test_the_largest_packet_that_a_client_takes_is_sent(broker: Broker, aliases: int) -> None:
    for total in (120, 127, 128, 129, 130, 131, 140):
        for payload in range(total - 30, total):
            entry = Entry(0, b"t", bytes(payload), 1, properties=ALL.forwarded()[:2])
            packet = Publish(2, b"t", 1, entry.payload, Properties(((PAYLOAD_FORMAT, 1),)))
            assert publish_bytes(entry, 1, b"") == len(encode(packet, 5))
    limit = Properties(((PACKET_BYTES_MAX, 140), (TOPIC_ALIAS_MAX, aliases)))
    client = await broker.connect(b"s", version=5, properties=limit)
    await client.subscribe((b"topic/+", 1), properties=Properties(((SUBSCRIPTION_ID, 7),)))
    sender = await publisher(broker)
    for size in range(140):
        sender.publish(b"topic/%d" % (size % 50), bytes(size), 0, properties=expiring(60))
    await sender.until_ping()
    got = [p for p in await client.until_ping() if isinstance(p, Publish)]
    sizes = [len(encode(p, 5)) for p in got]
    assert max(sizes) == 140
    assert len(sizes) + broker.hub.figures.too_large == 140


# ------------------------------------------------------------------------- receive maximum


async def test_more_under_way_than_the_new_window_allows_comes_bit_by_bit() -> None:
    async with running(max_inflight=20) as broker:
        client = await broker.connect(b"s", version=5)
        await client.subscribe((b"t", 2))
        sender = await publisher(broker)
        for number in range(20):
            sender.publish(b"t", b"%d" % number, 1 + number % 2)
        sent = await client.publishes(20, ack=False)
        await client.cut()
        window = Properties(((RECEIVE_MAX, 3),))
        client = await broker.connect(b"s", version=5, properties=window)
        again = await client.publishes(3, ack=False)
        await client.quiet()
        client.send(Puback(again[0].packet_id))
        again += await client.publishes(1, ack=False)
        await client.quiet()
        await client.cut()
        client = await broker.connect(b"s", version=5, properties=window)
        got = await client.publishes(19)
        assert [(p.packet_id, p.payload) for p in got] == [
            (p.packet_id, p.payload) for p in sent[1:]
        ]
        await broker.turns(lambda: broker.is_idle(b"s"))

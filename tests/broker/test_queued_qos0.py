"""What is published with QoS 0 for who is away (``queue_qos0``): once at most, in nobody's way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from broker_ext.durable import AHEAD_MIN
from broker_ext.rules import FilterRule
from broker_ext.wire import Properties, Puback, Publish, Suback
from broker_ext.wire.properties import MESSAGE_EXPIRY_S, PACKET_BYTES_MAX, SUBSCRIPTION_ID
from tests.broker.mqtt import running

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.broker.mqtt import Broker, Client

LARGE = [b"%d " % n + bytes(60_000) for n in range(200)]
"""They fill a client's socket, and what is in front of it."""


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % n for n in range(start, start + count)]


async def publish(publisher: Client, *payloads: bytes, topic: bytes = b"t") -> None:
    """With QoS 0; the broker has handled it."""
    await publisher.deliver(topic, *payloads, qos=0)
    await publisher.quiet()


def told(packets: Sequence[object]) -> list[tuple[bytes, int]]:
    """Payload and QoS of what was sent; none of it as sent again."""
    assert all(type(packet) is Publish and not packet.dup for packet in packets)
    return [(packet.payload, packet.qos) for packet in packets]  # type: ignore[attr-defined]


def at_most_once(*payloads: bytes) -> list[tuple[bytes, int]]:
    return [(payload, 0) for payload in payloads]


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("restart", ["", "restart", "crash_and_restart"])
async def test_who_was_away_gets_it_once_with_qos_0(
    durable_broker: Broker, qos: int, restart: str
) -> None:
    broker = durable_broker
    await broker.sleeper(b"dev", (b"t/+", qos))
    publisher = await broker.connect(b"pub", clean=True)
    await publish(publisher, *numbered(3), topic=b"t/1")
    await publisher.deliver(b"t/1", b"sure", qos=1)
    await publish(publisher, *numbered(2, 3), topic=b"t/2")
    await broker.hub.committer.drain()
    if restart:
        await getattr(broker, restart)()
    device = await broker.connect(b"dev")
    got = [(packet.payload, packet.qos) for packet in await device.publishes(6)]
    assert sorted(got) == sorted([*at_most_once(*numbered(5)), (b"sure", 1)])
    assert [payload for payload, qos in got if not qos] == numbered(5)
    assert broker.hub.figures.queued_qos0 == 5
    await device.quiet()
    await device.disconnect()
    device = await broker.connect(b"dev")
    await device.quiet()


async def test_who_is_here_costs_no_disk_and_gets_it_once(broker: Broker) -> None:
    device = await broker.subscriber(b"dev", b"t", (b"#", 2))
    publisher = await broker.connect(b"pub", clean=True)
    await publish(publisher, *numbered(5))
    assert told(await device.publishes(5)) == at_most_once(*numbered(5))
    assert await broker.history() == []
    await broker.sleeper(b"other", b"t")  # now it is written, and this one has it from memory
    await publish(publisher, *numbered(5))
    assert told(await device.publishes(5)) == at_most_once(*numbered(5))
    assert await broker.history() == numbered(5)
    await device.disconnect()
    await broker.restart()
    device = await broker.connect(b"dev")
    await device.quiet()


async def test_what_it_had_at_once_is_not_read_again_with_what_was_before_it() -> None:
    """The position of a session goes back to what it was not sent yet."""
    async with running(max_inflight=1) as broker:
        await broker.sleeper(b"other", b"t")
        device = await broker.subscriber(b"dev", b"t")
        publisher = await broker.connect(b"pub", clean=True)
        await publisher.deliver(b"t", *numbered(3), qos=1)
        await publish(publisher, b"had")
        assert told(await device.publishes(2, ack=False)) == [(b"0", 1), (b"had", 0)]
        await device.disconnect()
        await publish(publisher, b"missed")
        device = await broker.connect(b"dev")
        assert sorted(await device.payloads(4)) == [*numbered(3), b"missed"]
        await device.quiet()


@pytest.mark.parametrize("leaves", ["", "amid", "behind"])
@pytest.mark.parametrize("gains", [b"t/+", b"t/1"])
async def test_what_a_subscription_of_qos_0_had_is_not_read_for_one_that_is_more(
    gains: bytes, leaves: str
) -> None:
    """While the new one is being saved, and its session is not through with what it missed."""
    async with running(max_inflight=1) as broker:
        await broker.sleeper(b"other", b"t/1")
        await broker.sleeper(b"dev", b"x", (b"t/+", 0))
        publisher = await broker.connect(b"pub", clean=True)
        await publisher.deliver(b"x", *numbered(AHEAD_MIN + 10))
        device = await broker.connect(b"dev")
        assert told(await device.publishes(1, ack=False)) == [(b"0", 1)]
        gate = broker.store.hang_submit()
        device.send_subscribe((gains, 1))
        await gate.reached.wait()
        publisher.publish(b"t/1", b"had", 0)
        assert told(await device.publishes(1)) == at_most_once(b"had")
        assert broker.session(b"dev").catches_up
        if leaves == "amid":
            await device.cut()
            await broker.turns(lambda: b"dev" not in broker.hub.registry.owners)
        gate.release()
        if leaves != "amid":
            await device.next(Suback)
        if leaves:
            await device.cut()
            device = await broker.connect(b"dev")
            assert await device.payloads(AHEAD_MIN + 10) == numbered(AHEAD_MIN + 10)
        else:
            device.send(Puback(1))
            assert await device.payloads(AHEAD_MIN + 9) == numbered(AHEAD_MIN + 9, 1)
        await device.quiet()
        await publish(publisher, b"new", topic=b"t/1")
        assert told(await device.publishes(1)) == at_most_once(b"new")


async def test_of_a_connection_that_died_with_the_broker_nothing_comes_again(
    durable_broker: Broker,
) -> None:
    broker = durable_broker
    await broker.sleeper(b"other", b"t")  # so that all of it is written
    device = await broker.subscriber(b"dev", b"t")
    publisher = await broker.connect(b"pub", clean=True)
    await publish(publisher, b"had")
    assert told(await device.publishes(1)) == at_most_once(b"had")
    await broker.hub.committer.drain()
    await broker.crash_and_restart()
    publisher = await broker.connect(b"pub", clean=True)
    await publish(publisher, b"missed")
    await broker.hub.committer.drain()
    await broker.crash_and_restart()
    device = await broker.connect(b"dev")
    assert told(await device.publishes(1)) == at_most_once(b"missed")
    other = await broker.connect(b"other")
    assert told(await other.publishes(2)) == at_most_once(b"had", b"missed")
    for client in (device, other):
        await client.quiet()


async def test_a_take_over_neither_loses_nor_repeats(broker: Broker) -> None:
    await broker.sleeper(b"other", b"t")
    device = await broker.subscriber(b"dev", b"t")
    publisher = await broker.connect(b"pub", clean=True)
    got: list[object] = []
    for n in range(20):
        await publish(publisher, b"%d" % n)
        newer = await broker.connect(b"dev")
        await device.closed()
        got += device._packets
        device = newer
    got += await device.until_ping()
    assert told(got) == at_most_once(*numbered(20))


async def test_what_a_connection_was_not_sent_is_left_for_the_next(broker: Broker) -> None:
    """At most once is no leave to throw it away."""
    await broker.sleeper(b"dev", b"t")
    publisher = await broker.connect(b"pub", clean=True)
    await publish(publisher, *LARGE)
    device = await broker.connect(b"dev")
    session = broker.session(b"dev")
    await broker.turns(lambda: session.peer.congested)
    await publish(publisher, b"meanwhile")
    assert session.catches_up
    await device.cut()
    await broker.turns(lambda: b"dev" not in broker.hub.registry.owners)
    sent = broker.hub.figures.queued_qos0
    assert 0 < sent < len(LARGE)
    await publish(publisher, b"later")
    device = await broker.connect(b"dev")
    got = await device.publishes(len(LARGE) - sent + 2)
    assert told(got) == at_most_once(*LARGE[sent:], b"meanwhile", b"later")
    await device.quiet()


async def test_a_backlog_waits_for_a_client_that_does_not_read(broker: Broker) -> None:
    """P12: no more of it is in memory than what fills a socket."""
    await broker.sleeper(b"dev", b"t")
    publisher = await broker.connect(b"pub", clean=True)
    await publish(publisher, *LARGE)
    device = await broker.connect(b"dev")
    session = broker.session(b"dev")
    await broker.turns(lambda: session.peer.congested)
    for _ in range(100):
        await publisher.quiet()
    assert session.catches_up
    assert session.backlog.reading is None
    assert 0 < broker.hub.figures.queued_qos0 < len(LARGE)
    await publish(publisher, b"last")
    assert told(await device.publishes(len(LARGE) + 1)) == at_most_once(*LARGE, b"last")
    assert broker.hub.figures.dropped_qos0 == 0
    assert not session.catches_up


async def test_while_the_store_cannot_write_it_flows_and_is_not_kept() -> None:
    """P11: what was promised does not wait for what was not."""
    async with running(commit_bytes_max=100_000) as broker:
        await broker.sleeper(b"dev", b"t")
        here = await broker.subscriber(b"here", b"t")
        publisher = await broker.connect(b"pub", clean=True)
        broker.store.fill()
        await publish(publisher, b"kept")
        await broker.turns(lambda: broker.hub.committer.failing_since is not None)
        lost = [b"%d " % n + bytes(5000) for n in range(40)]
        await publish(publisher, *lost)
        assert told(await here.publishes(41)) == at_most_once(b"kept", *lost)
        broker.store.heal()
        await broker.hub.committer.drain()
        await publish(publisher, b"kept, too")
        device = await broker.connect(b"dev")
        assert told(await device.publishes(2)) == at_most_once(b"kept", b"kept, too")


async def test_a_commit_that_hangs_leaves_room_for_what_is_promised() -> None:
    async with running(commit_bytes_max=100_000) as broker:
        await broker.sleeper(b"dev", b"t")
        publisher = await broker.connect(b"pub", clean=True)
        gate = broker.store.hang_submit()
        await publish(publisher, *(bytes(5000) for _ in range(40)))
        assert 25_000 < broker.hub.committer.waiting_bytes < 75_000
        gate.release()


async def test_pruned_it_is_missed_by_nobody() -> None:
    async with running(max_messages=5) as broker:
        await broker.sleeper(b"dev", b"t")
        publisher = await broker.connect(b"pub", clean=True)
        await publish(publisher, *numbered(50))
        await broker.hub.committer.drain()
        await broker.hub._prune()
        await broker.restart(max_messages=5)
        device = await broker.connect(b"dev")
        assert device.connack.session_present
        assert told(await device.publishes(5)) == at_most_once(*numbered(5, 45))


@pytest.mark.parametrize("restart", [False, True])
async def test_it_supersedes_nothing_that_was_promised(*, restart: bool) -> None:
    """``keep: latest``: it may be lost, and then the message before it would be, too."""
    rules = (FilterRule(b"t", keep_latest=True),)
    async with running(filters=rules) as broker:
        await broker.sleeper(b"dev", b"t")
        publisher = await broker.connect(b"pub", clean=True)
        await publish(publisher, b"before")
        await publisher.deliver(b"t", b"old", b"sure")
        await publish(publisher, b"after")
        if restart:
            await broker.restart()
        device = await broker.connect(b"dev")
        got = await device.publishes(2, ack=False)
        assert sorted(told(got)) == [(b"after", 0), (b"sure", 1)]
        await broker.crash_and_restart()
        device = await broker.connect(b"dev")
        assert [p.payload for p in await device.publishes(1)] == [b"sure"]
        await device.quiet()


async def test_it_expires() -> None:
    rules = (FilterRule(b"short", expire_after_ms=5000),)
    async with running(filters=rules) as broker:
        await broker.sleeper(b"dev", b"#")
        publisher = await broker.connect(b"pub", clean=True, version=5)
        soon = Properties(((MESSAGE_EXPIRY_S, 3),))
        publisher.publish(b"own", b"over", 0, properties=soon)
        publisher.publish(b"short", b"over", 0)
        publisher.publish(b"long", b"kept", 0)
        await publisher.quiet()
        broker.clock.advance(ms=5001)
        device = await broker.connect(b"dev")
        assert told(await device.publishes(1)) == at_most_once(b"kept")
        await device.quiet()
        assert broker.hub.figures.expired_messages == 2


async def test_it_is_kept_for_what_is_subscribed_with_qos_1_or_2_only(broker: Broker) -> None:
    await broker.sleeper(b"dev", (b"zero", 0), (b"one", 1))
    publisher = await broker.connect(b"pub", clean=True)
    for topic in (b"zero", b"one", b"none", b"$SYS/x"):
        broker.hub.router.publish(topic, topic, 0)
    await publish(publisher, b"other", topic=b"other")
    assert await broker.history() == [b"one"]
    device = await broker.connect(b"dev")
    assert told(await device.publishes(1)) == at_most_once(b"one")
    await device.subscribe((b"none", 1), (b"other", 1), (b"zero", 1))
    await device.quiet()


async def test_a_subscription_brings_nothing_that_is_older(broker: Broker) -> None:
    await broker.sleeper(b"other", b"#")
    await broker.sleeper(b"dev", b"a")
    publisher = await broker.connect(b"pub", clean=True)
    await publish(publisher, b"a", topic=b"a")
    await publish(publisher, b"b", topic=b"b")
    device = await broker.connect(b"dev")
    device.send_subscribe(b"b")  # it is not through with what it missed
    assert told([p for p in await device.until_ping() if type(p) is Publish]) == at_most_once(b"a")


async def test_nothing_is_kept_for_sinks_groups_and_readers() -> None:
    """They take QoS 1 and 2; a session with the same filter makes the difference."""
    async with running(history_filters=("t",)) as broker:
        member = await broker.subscriber(b"member", b"$share/g/t")
        publisher = await broker.connect(b"pub", clean=True)
        await publish(publisher, b"live")
        assert told(await member.publishes(1)) == at_most_once(b"live")
        await member.disconnect()
        async with broker.hub.history.subscribe("t") as reader:
            await publish(publisher, b"lost")
            assert await broker.history() == []
            await broker.sleeper(b"dev", b"t")
            await publish(publisher, b"kept")
            assert await broker.history() == [b"kept"]
            await publisher.deliver(b"t", b"sure")
            assert (await anext(reader)).payload == b"sure"
        member = await broker.connect(b"member")
        assert told(await member.publishes(1)) == [(b"sure", 1)]
        await member.quiet()


async def test_topic_plugins_are_asked(broker: Broker) -> None:
    await broker.sleeper(b"dev", b"#")
    publisher = await broker.connect(b"pub", clean=True)
    for topic in (b"open", b"secret"):
        await publish(publisher, topic, topic=topic)
    broker.hub.router.guarded = True
    device = await broker.connect(b"dev")
    assert told(await device.publishes(1)) == at_most_once(b"open")
    await device.quiet()


async def test_what_a_subscription_asks_for_holds_for_it(broker: Broker) -> None:
    """Retain As Published, No Local, a Subscription Identifier, and the client's largest packet."""
    device = await broker.connect(b"dev", version=5)
    identifier = Properties(((SUBSCRIPTION_ID, 7),))
    await device.subscribe((b"#", 0x0D), properties=identifier)  # QoS 1, 0x04 and 0x08
    await device.disconnect()
    transient = await broker.connect(b"dev/2", version=5, clean=True)
    transient.publish(b"t", b"retained", 0, retain=True)
    await publish(transient, b"plain", bytes(100))
    broker.hub.router.publish(b"t", b"own", 0, origin=b"dev")
    device = await broker.connect(
        b"dev", version=5, properties=Properties(((PACKET_BYTES_MAX, 50),))
    )
    first, second = await device.publishes(2)
    assert (first.payload, first.retain) == (b"retained", True)
    assert (second.payload, second.retain) == (b"plain", False)
    assert first.properties == second.properties == identifier
    await device.quiet()
    assert broker.hub.figures.too_large == 1


async def test_switched_off_it_is_as_if_it_had_not_been() -> None:
    async with running(queue_qos0=False) as broker:
        await broker.sleeper(b"dev", b"t")
        publisher = await broker.connect(b"pub", clean=True)
        await publish(publisher, b"lost")
        assert await broker.history() == []
        device = await broker.connect(b"dev")
        await device.quiet()
        await device.disconnect()
        await broker.restart(queue_qos0=True)
        publisher = await broker.connect(b"pub", clean=True)
        await publish(publisher, b"kept")
        await broker.restart(queue_qos0=False)
        device = await broker.connect(b"dev")
        await device.quiet()

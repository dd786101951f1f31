"""P5 and P6: QoS 2 exactly once both ways, and first things first, wherever it is cut (HK-23)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from broker_ext.wire import Puback, Pubcomp, Publish, Pubrec, Pubrel
from storage.api import RECEIVED
from tests.broker.mqtt import running
from tests.storage.harness import Memory, OnDisk, scratch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.broker.mqtt import Broker, Client

ENDS = ["cut", "takeover", "stop", "crash"]


def cases(*steps: str) -> list[tuple[str, str]]:
    """Every step, ended every way; but a stop waits for what is under way (test_stop)."""
    return [(s, e) for s in steps for e in ENDS if not (e == "stop" and "under way" in s)]


@pytest.fixture(params=["memory", "lmdb", "sqlite"])
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    """What is promised here is promised over every store."""
    with scratch() as path:
        backend = Memory(path) if request.param == "memory" else OnDisk(request.param, path)
        async with running(backend) as broker:
            yield broker


async def end(broker: Broker, client: Client, how: str) -> None:
    """End the client's connection, or the broker."""
    if how == "cut":
        await client.cut()
    elif how == "stop":
        await broker.restart()
    elif how == "crash":
        await broker.crash_and_restart()
    # takeover: the next CONNECT does it


# ------------------------------------------------------------------------------- inbound


async def finish_publishing(client: Client, *, received: bool) -> None:
    """What a client does with a QoS 2 message that it is not done with when it comes back."""
    if not received:
        client.publish(b"a", b"1", 2, packet_id=5, dup=True)
        assert (await client.next(Pubrec)).packet_id == 5
    client.send(Pubrel(5))
    assert (await client.next(Pubcomp)).packet_id == 5


@pytest.mark.case("HK-23")
@pytest.mark.parametrize(
    ("step", "how"),
    cases("publish under way", "published", "received", "release under way", "released"),
)
async def test_a_qos_2_message_of_a_publisher_is_taken_once(
    broker: Broker, how: str, step: str
) -> None:
    await broker.sleeper(b"s", (b"#", 2))
    publisher = await broker.connect(b"p")
    hang = broker.store.hang_submit
    gate = hang() if step == "publish under way" else None
    publisher.publish(b"a", b"1", 2, packet_id=5)
    received = False
    if gate is not None:
        await gate.reached.wait()
    else:
        if step == "published":
            await publisher.until_ping()
            assert await broker.history() == [b"1"]
        else:
            await publisher.next(Pubrec)
            received = True
        if step == "release under way":
            gate = hang()
            publisher.send(Pubrel(5))
            await gate.reached.wait()
        elif step == "released":
            publisher.send(Pubrel(5))
            assert len(await publisher.until_ping()) <= 1
            await broker.hub.committer.drain()
    await end(broker, publisher, how)
    if gate is not None:
        gate.release()
    again = await broker.connect(b"p")
    # after a crash, unless nothing of it was stored
    nothing = how == "crash" and step == "publish under way"
    assert again.connack.session_present or nothing
    await finish_publishing(again, received=received)
    await finish_publishing_another(again)
    assert await broker.history() == [b"1", b"2"]
    snapshot = await broker.snapshot(b"p")
    assert snapshot is not None
    assert snapshot.inbound == frozenset()


async def finish_publishing_another(client: Client) -> None:
    """The id is free again: a new message under it is a new message."""
    client.publish(b"a", b"2", 2, packet_id=5)
    await client.next(Pubrec)
    client.send(Pubrel(5))
    await client.next(Pubcomp)


async def test_a_repeated_publish_is_answered_and_not_taken_again(broker: Broker) -> None:
    await broker.sleeper(b"s", (b"#", 2))
    publisher = await broker.connect(b"p")
    gate = broker.store.hang_submit()
    for _ in range(3):
        publisher.publish(b"a", b"1", 2, packet_id=5)
    await gate.reached.wait()
    await publisher.quiet()
    gate.release()
    for _ in range(3):
        await publisher.next(Pubrec)
    assert await broker.history() == [b"1"]


async def test_an_id_that_is_released_and_used_again_in_one_commit_is_durable(
    broker: Broker,
) -> None:
    await broker.sleeper(b"s", (b"#", 2))
    publisher = await broker.connect(b"p")
    publisher.publish(b"a", b"1", 2, packet_id=5)
    await publisher.next(Pubrec)
    publisher.send(Pubrel(5), Publish(4, b"a", 5, b"2"))  # it does not wait for PUBCOMP
    await publisher.next(Pubcomp)
    await publisher.next(Pubrec)
    await broker.crash_and_restart()
    again = await broker.connect(b"p")
    again.publish(b"a", b"2", 2, packet_id=5, dup=True)
    await again.next(Pubrec)
    assert await broker.history() == [b"1", b"2"]


async def test_a_transient_publisher_is_taken_once_within_its_connection(broker: Broker) -> None:
    await broker.sleeper(b"s", (b"#", 2))
    publisher = await broker.connect(b"p", clean=True)
    publisher.publish(b"a", b"1", 2, packet_id=5)
    publisher.publish(b"a", b"1", 2, packet_id=5, dup=True)
    await publisher.next(Pubrec)
    await publisher.next(Pubrec)
    publisher.send(Pubrel(5))
    await publisher.next(Pubcomp)
    assert await broker.history() == [b"1"]


# ------------------------------------------------------------------------------ outbound


class Device:
    """The application of a subscriber: it remembers what a session has to, and what it took."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.half: set[int] = set()

    def take(self, packet: Publish) -> None:
        if packet.packet_id not in self.half:
            self.taken.append(packet.payload)
            if packet.qos == 2:
                self.half.add(packet.packet_id)

    async def work(self, client: Client) -> None:
        """Settle everything that comes, until nothing more does."""
        broker, client_id = client.broker, client.client_id
        while not broker.is_idle(client_id):
            for packet in await client.until_ping():
                if type(packet) is Publish:
                    self.take(packet)
                    kind: Any = Pubrec if packet.qos == 2 else Puback
                    client.send(kind(packet.packet_id))
                elif type(packet) is Pubrel:
                    self.half.discard(packet.packet_id)
                    client.send(Pubcomp(packet.packet_id))
            await broker.hub.committer.drain()


@pytest.mark.case("HK-23")
@pytest.mark.parametrize(
    ("step", "how"),
    cases(
        "claim under way",
        "sent",
        "received under way",
        "pubrel sent",
        "settle under way",
        "settled",
    ),
)
async def test_a_qos_2_message_to_a_subscriber_is_taken_once(
    broker: Broker, how: str, step: str
) -> None:
    device = Device()
    subscriber = await broker.subscriber(b"s", (b"#", 2))
    publisher = await broker.connect(b"p", clean=True)
    hang = broker.store.hang_submit
    gate = hang() if step == "claim under way" else None
    publisher.publish(b"a", b"1", 2)
    if gate is not None:
        await gate.reached.wait()
    else:
        packet = await subscriber.next(Publish)
        device.take(packet)
        if step == "received under way":
            gate = hang()
            subscriber.send(Pubrec(packet.packet_id))
            await gate.reached.wait()
            await subscriber.quiet()
            subscriber.send(Pubrec(packet.packet_id))
            await subscriber.quiet()  # P5: PUBREL only when "received" is stored
        elif step != "sent":
            subscriber.send(Pubrec(packet.packet_id))
            await subscriber.next(Pubrel)
            snapshot = await broker.snapshot(b"s")
            assert snapshot is not None
            assert snapshot.claims[0].deliveries[0].state == RECEIVED
        if step in ("settle under way", "settled"):
            device.half.discard(packet.packet_id)
            gate = hang() if step == "settle under way" else None
            subscriber.send(Pubcomp(packet.packet_id))
            if gate is not None:
                await gate.reached.wait()
            else:
                await subscriber.quiet()
                assert await broker.unsettled(b"s") == []
    await end(broker, subscriber, how)
    if gate is not None:
        gate.release()
    again = await broker.connect(b"s")
    assert again.connack.session_present
    await device.work(again)
    # the publisher was not told in one case: what it did not hear of may be gone with a crash
    lost = step == "claim under way" and how == "crash"
    assert device.taken == ([] if lost else [b"1"])
    assert device.half == set()
    assert await broker.unsettled(b"s") == []


@pytest.mark.case("HK-23")
@pytest.mark.parametrize("how", ENDS)
async def test_a_pubrec_that_is_repeated_at_once_after_a_reconnect_ends_the_delivery(
    broker: Broker, how: str
) -> None:
    """A bridge does so; a PUBLISH behind the PUBREL would be a second message to it."""
    device = Device()
    subscriber = await broker.subscriber(b"s", (b"#", 2))
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", b"1", b"2", qos=2)
    first, second = await subscriber.publishes(2, ack=False)
    device.take(first)
    device.take(second)
    await end(broker, subscriber, how)
    reading = broker.store.hang_read(nth=1)
    again = await broker.connect(b"s")
    await reading.reached.wait()
    again.send(Pubrec(first.packet_id))
    assert (await again.next(Pubrel)).packet_id == first.packet_id
    device.half.discard(first.packet_id)
    again.send(Pubcomp(first.packet_id))
    await again.quiet()
    reading.release()
    await device.work(again)
    assert device.taken == [b"1", b"2"]
    assert await broker.unsettled(b"s") == []


# ------------------------------------------------------------------------------------ P6


@pytest.mark.parametrize("how", ENDS)
async def test_unsettled_deliveries_go_first_in_order_with_their_ids_and_dup(
    broker: Broker, how: str
) -> None:
    subscriber = await broker.subscriber(b"s", (b"#", 2))
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", b"1", b"2", b"3")
    await publisher.deliver(b"a", b"4", qos=2)
    before = await subscriber.publishes(4, ack=False)
    subscriber.send(Puback(before[1].packet_id), Pubrec(before[3].packet_id))
    assert (await subscriber.next(Pubrel)).packet_id == before[3].packet_id
    await broker.hub.committer.drain()
    await end(broker, subscriber, how)
    publisher = await broker.connect(b"p", clean=True)
    if how != "takeover":
        await publisher.deliver(b"a", b"5", b"6")
    again = await broker.connect(b"s")
    assert (await again.next(Pubrel)).packet_id == before[3].packet_id
    left = await again.publishes(2, ack=False)
    assert [(p.payload, p.packet_id, p.dup) for p in left] == [
        (before[0].payload, before[0].packet_id, True),
        (before[2].payload, before[2].packet_id, True),
    ]
    if how != "takeover":
        rest = await again.publishes(2, ack=False)
        assert [(p.payload, p.dup) for p in rest] == [(b"5", False), (b"6", False)]
        assert not {p.packet_id for p in rest} & {p.packet_id for p in before}
    await again.quiet()


@pytest.mark.case("HK-12")
@pytest.mark.parametrize("how", ENDS)
async def test_what_was_claimed_ahead_and_not_sent_comes_again_without_dup_unless_it_crashed(
    broker: Broker, how: str
) -> None:
    await broker.stop()
    await broker.start(max_inflight=2)
    await broker.sleeper(b"s", b"#")
    publisher = await broker.connect(b"p", clean=True)
    payloads = [b"%d" % n for n in range(20)]
    await publisher.deliver(b"a", *payloads)
    subscriber = await broker.connect(b"s")
    first = await subscriber.publishes(2, ack=False)
    await subscriber.quiet()
    await end(broker, subscriber, how)
    again = await broker.connect(b"s")
    got = await again.publishes(20)
    assert [p.payload for p in got] == payloads
    assert [p.packet_id for p in got[:2]] == [p.packet_id for p in first]
    assert [p.dup for p in got] == [True, True, *[how == "crash"] * 18]
    await again.quiet()
    assert await broker.unsettled(b"s") == []


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("count", [3, 150, 700])
async def test_a_client_that_comes_and_goes_misses_nothing_and_gets_nothing_settled_again(
    broker: Broker, how: str, count: int
) -> None:
    """Acknowledged in part, out of order, over several connections."""
    await broker.sleeper(b"s", b"#")
    publisher = await broker.connect(b"p", clean=True)
    payloads = [b"%d" % n for n in range(count)]
    await publisher.deliver(b"a", *payloads)
    settled: list[bytes] = []
    step = min(100, max(1, count // 5))
    for _ in range(40):
        client = await broker.connect(b"s")
        got = await client.publishes(min(step, count - len(settled)), ack=False)
        assert not {p.payload for p in got} & set(settled)
        for packet in reversed(got[: step // 2 + 1]):
            client.send(Puback(packet.packet_id))
            settled.append(packet.payload)
        await client.until_ping()
        await broker.hub.committer.drain()
        await end(broker, client, how)
        if len(settled) == count:
            break
    assert sorted(settled) == sorted(payloads)
    last = await broker.connect(b"s")
    await last.quiet()


async def test_messages_stay_in_order_when_the_client_falls_behind_and_catches_up(
    broker: Broker,
) -> None:
    subscriber = await broker.subscriber(b"s", b"a/#")
    publisher = await broker.connect(b"p", clean=True)
    sent: list[bytes] = []
    for n in range(1500):
        sent.append(b"%d" % n)
        publisher.publish(b"a/%d" % (n % 3), sent[-1])
        if n % 100 == 99:
            await asyncio.sleep(0)
    assert await subscriber.payloads(1500) == sent
    await subscriber.quiet()


async def test_a_restart_resumes_exactly(broker: Broker) -> None:
    device = Device()
    subscriber = await broker.subscriber(b"s", (b"#", 2))
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", b"1", b"2", qos=2)
    await publisher.deliver(b"a", b"3")
    for packet in await subscriber.publishes(3, ack=False):
        device.take(packet)
    subscriber.send(Pubrec(1))
    await subscriber.next(Pubrel)
    await subscriber.cut()
    await publisher.deliver(b"a", b"4")
    await broker.restart()
    again = await broker.connect(b"s")
    assert again.connack.session_present
    await device.work(again)
    assert device.taken == [b"1", b"2", b"3", b"3", b"4"]  # QoS 1 was not acknowledged
    await broker.restart()
    last = await broker.connect(b"s")
    await last.quiet()

"""P1 and P2: nothing is acknowledged, and nothing delivered, before its commit. P10 beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from broker_ext.wire import Puback, Pubcomp, Publish, Pubrec, Pubrel
from storage.errors import StoreFull

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker

# ------------------------------------------------------------------------------------ P1


@pytest.mark.parametrize(("qos", "answer"), [(1, Puback), (2, Pubrec)])
async def test_no_acknowledgement_before_the_commit_that_holds_the_message(
    broker: Broker, qos: int, answer: type[Puback | Pubrec]
) -> None:
    await broker.sleeper(b"s", (b"#", 2))
    publisher = await broker.connect(b"p", clean=True)
    gate = broker.store.hang_submit()
    publisher.publish(b"a", b"1", qos, packet_id=7)
    await gate.reached.wait()
    await publisher.quiet()
    gate.release()
    assert (await publisher.next(answer)).packet_id == 7
    assert await broker.history() == [b"1"]


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_retained_message_is_acknowledged_when_it_is_stored(
    broker: Broker, qos: int
) -> None:
    publisher = await broker.connect(b"p", clean=True)
    gate = broker.store.hang_submit()
    publisher.publish(b"a", b"1", qos, retain=True)
    await gate.reached.wait()
    await publisher.quiet()
    assert await broker.store.inner.retained() == []
    gate.release()
    if qos:
        await publisher.next(Puback if qos == 1 else Pubrec)
    await broker.hub.committer.drain()
    assert [m.payload for m in await broker.store.inner.retained()] == [b"1"]


async def test_a_message_that_nobody_durable_wants_costs_no_commit(broker: Broker) -> None:
    listener = await broker.connect(b"l", clean=True)
    await listener.subscribe(b"a")
    publisher = await broker.connect(b"p", clean=True)
    before = len(broker.store.batches)
    await publisher.deliver(b"a", b"1")
    await publisher.deliver(b"a", b"2", qos=2)
    await publisher.deliver(b"b", b"3")
    assert await listener.payloads(2) == [b"1", b"2"]
    assert len(broker.store.batches) == before


async def test_acknowledgements_leave_in_the_order_of_what_they_acknowledge(
    broker: Broker,
) -> None:
    await broker.sleeper(b"s", b"stored/#")
    publisher = await broker.connect(b"p", clean=True)
    gate = broker.store.hang_submit()
    publisher.publish(b"stored/1", packet_id=1)
    await gate.reached.wait()
    publisher.publish(b"passing", packet_id=2)
    publisher.publish(b"stored/2", packet_id=3)
    publisher.publish(b"passing", packet_id=4)
    await publisher.quiet()
    gate.release()
    assert [(await publisher.next(Puback)).packet_id for _ in range(4)] == [1, 2, 3, 4]


async def test_messages_of_one_chunk_share_one_commit(broker: Broker) -> None:
    await broker.sleeper(b"s", b"#")
    publisher = await broker.connect(b"p", clean=True)
    before = len(broker.store.batches)
    publisher.send(*(Publish(2, b"a", n, b"") for n in range(1, 201)))
    for n in range(1, 201):
        assert (await publisher.next(Puback)).packet_id == n
    assert len(broker.store.batches) - before <= 3


async def test_a_message_is_stored_once_however_many_sleep(broker: Broker) -> None:
    for n in range(5):
        await broker.sleeper(b"s%d" % n, b"a/#", b"a/+")
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a/b", b"1")
    assert await broker.history() == [b"1"]


# ------------------------------------------------------------------------------------ P2


@pytest.mark.parametrize("qos", [1, 2])
async def test_no_delivery_before_the_commit_of_entry_claim_and_cursor(
    broker: Broker, qos: int
) -> None:
    subscriber = await broker.subscriber(b"s", (b"#", 2))
    publisher = await broker.connect(b"p", clean=True)
    gate = broker.store.hang_submit()
    publisher.publish(b"a", b"1", qos)
    await gate.reached.wait()
    await subscriber.quiet()
    gate.release()
    assert (await subscriber.next(Publish)).payload == b"1"
    snapshot = await broker.snapshot(b"s")
    assert snapshot is not None
    assert snapshot.consumer.cursor == 1
    assert [(d.offset, d.qos) for c in snapshot.claims for d in c.deliveries] == [(1, qos)]


async def test_a_backlog_is_not_delivered_before_its_claim_is_committed(broker: Broker) -> None:
    await broker.sleeper(b"s", b"#")
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", b"1", b"2")
    subscriber = await broker.dial()
    gate = broker.store.hang_submit(nth=2)  # the first is Acquire
    assert (await subscriber.connect(b"s")).session_present
    await gate.reached.wait()
    await subscriber.quiet()
    gate.release()
    assert await subscriber.payloads(2) == [b"1", b"2"]


async def test_qos_0_is_delivered_while_a_commit_hangs(broker: Broker) -> None:
    subscriber = await broker.subscriber(b"s", b"#")
    publisher = await broker.connect(b"p", clean=True)
    gate = broker.store.hang_submit()
    publisher.publish(b"a", b"stored", 1)
    publisher.publish(b"a", b"passing", 0)
    await gate.reached.wait()
    assert (await subscriber.next(Publish)).payload == b"passing"
    gate.release()
    assert (await subscriber.next(Publish)).payload == b"stored"


# ------------------------------------------------------------------------- what is refused


async def test_nothing_of_a_failed_commit_is_acknowledged_or_delivered(broker: Broker) -> None:
    subscriber = await broker.subscriber(b"s", b"#")
    publisher = await broker.connect(b"p", clean=True)
    broker.store.fail_submit(StoreFull("no space"), times=2)
    publisher.publish(b"a", b"1", packet_id=1)
    await publisher.quiet()
    await subscriber.quiet()
    await publisher.next(Puback)
    assert await subscriber.payloads(1) == [b"1"]


async def test_an_unknown_pubrel_is_answered(broker: Broker) -> None:
    client = await broker.connect(b"c")
    client.send(Pubrel(77))
    assert (await client.next(Pubcomp)).packet_id == 77


# ----------------------------------------------------------------------------------- P10


@pytest.mark.parametrize("published", [0, 1, 2])
@pytest.mark.parametrize("granted", [0, 1, 2])
@pytest.mark.parametrize("clean", [False, True])
async def test_delivered_qos_is_the_lower_of_published_and_granted(
    broker: Broker, published: int, granted: int, clean: bool
) -> None:
    subscriber = await broker.connect(b"s", clean=clean)
    assert await subscriber.subscribe((b"a", granted)) == bytes([granted])
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", b"1", qos=published)
    (packet,) = await subscriber.publishes(1)
    assert packet.qos == min(published, granted)
    assert not packet.retain
    assert not packet.dup
    await subscriber.quiet()


@pytest.mark.parametrize("clean", [False, True])
async def test_overlapping_filters_deliver_once_at_the_highest_qos(
    broker: Broker, clean: bool
) -> None:
    subscriber = await broker.connect(b"s", clean=clean)
    await subscriber.subscribe((b"a/#", 0), (b"a/+", 2), (b"a/b", 1), (b"#", 1))
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a/b", b"1", qos=2)
    await publisher.deliver(b"c", b"2", qos=2)
    packets = await subscriber.publishes(2)
    assert [(p.payload, p.qos) for p in packets] == [(b"1", 2), (b"2", 1)]
    await subscriber.quiet()


async def test_overlapping_filters_deliver_a_backlog_once_at_the_highest_qos(
    broker: Broker,
) -> None:
    await broker.sleeper(b"s", (b"a/#", 1), (b"a/+", 2), (b"a/b", 0))
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a/b", b"1", qos=2)
    await publisher.deliver(b"a/b/c", b"2", qos=2)
    subscriber = await broker.connect(b"s")
    packets = await subscriber.publishes(2)
    assert [(p.payload, p.qos) for p in packets] == [(b"1", 2), (b"2", 1)]
    await subscriber.quiet()


async def test_a_queued_message_is_not_a_retained_one(broker: Broker) -> None:
    await broker.sleeper(b"s", b"#")
    publisher = await broker.connect(b"p", clean=True)
    publisher.publish(b"a", b"1", 1, retain=True)
    await publisher.next(Puback)
    subscriber = await broker.connect(b"s")
    (queued,) = await subscriber.publishes(1)
    assert not queued.retain
    await subscriber.subscribe(b"#")
    (retained,) = await subscriber.publishes(1)
    assert retained.retain

"""Dead letters of sessions that an operator has reissued come to their clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from broker_ext.wire import Properties
from broker_ext.wire.properties import PACKET_BYTES_MAX
from storage.outbox import SESSIONS, Backlog
from tests.broker.test_properties import publisher

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker, Client

LARGE = bytes(300)
SMALL = Properties(((PACKET_BYTES_MAX, 200),))


async def dead_letter(broker: Broker, client_id: bytes = b"s", qos: int = 1) -> int:
    """A message that was too large for its client, which is connected still."""
    client = await broker.connect(client_id, clean=False, version=5, properties=SMALL)
    await client.subscribe((b"t", 2))
    (await publisher(broker)).publish(b"t", LARGE, qos)
    await broker.turns(lambda: broker.hub.figures.too_large == 1)
    await broker.turns(lambda: broker.is_idle(client_id))
    await broker.hub.committer.drain()
    (letter,) = await broker.store.inner.outbox.dead_letters(SESSIONS)
    await client.disconnect()
    return letter.id


async def reissue(broker: Broker, message_id: int) -> None:
    await broker.hub.handles.operator().reissue(message_id, b"ann")


async def figures(broker: Broker) -> Backlog:
    (found,) = await broker.store.inner.outbox.backlog()
    return found


async def returned(broker: Broker) -> Client:
    """The client, without its limit."""
    return await broker.connect(b"s", clean=False, version=5)


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_reissued_letter_comes_to_its_client(durable_broker: Broker, qos: int) -> None:
    broker = durable_broker
    await reissue(broker, await dead_letter(broker, qos=qos))
    client = await returned(broker)
    await broker.hub.letters.look()
    (got,) = await client.publishes(1)
    assert (got.topic, got.payload, got.qos, got.retain) == (b"t", LARGE, qos, False)
    assert await figures(broker) == Backlog(SESSIONS, done=1, reissued=1)
    await broker.hub.letters.look()
    await client.quiet()


async def test_it_waits_while_its_client_is_away(durable_broker: Broker) -> None:
    broker = durable_broker
    await reissue(broker, await dead_letter(broker))
    for _ in range(10):
        await broker.hub.letters.look()
        broker.clock.advance(ms=120_000)
    assert (await figures(broker)).waiting == 1
    client = await returned(broker)
    await broker.hub.letters.look()
    assert [p.payload for p in await client.publishes(1)] == [LARGE]


async def test_it_is_the_sessions_from_then_on(durable_broker: Broker) -> None:
    """Not acknowledged: it comes again with DUP, from the session's record."""
    broker = durable_broker
    await reissue(broker, await dead_letter(broker))
    client = await returned(broker)
    await broker.hub.letters.look()
    await client.publishes(1, ack=False)
    assert (await figures(broker)).done == 1
    await client.disconnect()
    again = await returned(broker)
    (got,) = await again.publishes(1)
    assert (got.payload, got.dup) == (LARGE, True)


@pytest.mark.parametrize("reason", ["unsubscribed", "session gone"])
async def test_one_that_nobody_wants_is_a_dead_letter_again(
    durable_broker: Broker, reason: str
) -> None:
    broker = durable_broker
    await reissue(broker, await dead_letter(broker))
    client = await broker.connect(b"s", clean=reason == "session gone", version=5)
    if reason == "unsubscribed":
        await client.unsubscribe(b"t")
    else:
        await client.disconnect()
    await broker.hub.letters.look()
    found = await figures(broker)
    assert (found.dead, found.waiting, found.reissued) == (1, 0, 1)


@pytest.mark.parametrize("qos", [1, 2])
async def test_one_of_a_group_comes_to_a_durable_member(durable_broker: Broker, qos: int) -> None:
    broker = durable_broker
    shared = (b"$share/g/t", 2)
    await (await broker.connect(b"other")).subscribe(shared)
    client = await broker.connect(b"s", clean=False, version=5, properties=SMALL)
    await client.subscribe(shared)
    for other in broker.clients[:1]:
        await other.disconnect()
    (await publisher(broker)).publish(b"t", LARGE, qos)
    await broker.turns(lambda: broker.hub.figures.too_large == 1)
    await broker.hub.committer.drain()
    (letter,) = await broker.store.inner.outbox.dead_letters(SESSIONS)
    await client.disconnect()
    await broker.restart()
    await reissue(broker, letter.id)
    await (await broker.connect(b"passing", clean=True)).subscribe(shared)
    await broker.hub.letters.look()
    assert (await figures(broker)).waiting == 1, "a transient member cannot hold it"
    broker.clock.advance(ms=120_000)
    other = await broker.connect(b"other")
    await broker.hub.letters.look()
    assert (await figures(broker)).done == 1
    await broker.crash_and_restart()
    (got,) = await (await broker.connect(b"other")).publishes(1)
    assert (got.topic, got.payload, got.qos) == (b"t", LARGE, qos)
    del other


async def test_one_of_a_group_that_is_gone_is_a_dead_letter_again(durable_broker: Broker) -> None:
    broker = durable_broker
    client = await broker.connect(b"s", clean=False, version=5, properties=SMALL)
    await client.subscribe((b"$share/g/t", 2))
    (await publisher(broker)).publish(b"t", LARGE, 1)
    await broker.turns(lambda: broker.hub.figures.too_large == 1)
    await broker.hub.committer.drain()
    (letter,) = await broker.store.inner.outbox.dead_letters(SESSIONS)
    await client.unsubscribe(b"$share/g/t")
    await reissue(broker, letter.id)
    await broker.hub.letters.look()
    found = await figures(broker)
    assert (found.dead, found.waiting, found.reissued) == (1, 0, 1)

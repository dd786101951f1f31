"""HK-23: the connection, or the broker, ends after each turn of the loop of a whole exchange.

A publisher and a subscriber that do everything as the specification wants it; what they must be
able to rely on is counted at the end: QoS 2 exactly once, QoS 1 at least once, in order, and
nothing again that was acknowledged.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from broker_ext.wire import Puback, Pubcomp, Publish, Pubrec, Pubrel
from tests.broker.mqtt import running

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker, Client

MESSAGES = [(b"1", 1), (b"2", 2), (b"3", 2), (b"4", 1), (b"5", 2)]


class Publisher:
    """pending: packet id -> (payload, QoS, whether PUBREC came), in the order they were sent."""

    def __init__(self) -> None:
        self.pending: dict[int, tuple[bytes, int, bool]] = {}
        self.left = list(enumerate(MESSAGES, 1))

    async def run(self, client: Client) -> None:
        for packet_id, (payload, qos, received) in self.pending.items():
            if received:
                client.send(Pubrel(packet_id))
            else:
                client.publish(b"a", payload, qos, packet_id=packet_id, dup=True)
        while self.left:
            packet_id, (payload, qos) = self.left.pop(0)
            self.pending[packet_id] = (payload, qos, False)
            client.publish(b"a", payload, qos, packet_id=packet_id)
        while self.pending:
            packet = await client.any()
            if type(packet) is Pubrec:
                payload, qos, _ = self.pending[packet.packet_id]
                self.pending[packet.packet_id] = (payload, qos, True)
                client.send(Pubrel(packet.packet_id))
            else:
                assert type(packet) in (Puback, Pubcomp), packet
                del self.pending[packet.packet_id]


class Subscriber:
    """taken: what the application got. acknowledged: payloads of QoS 1 that it has said it has."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.half: set[int] = set()

    async def run(self, client: Client) -> None:
        while True:
            packet = await client.any()
            if type(packet) is Publish:
                if packet.qos == 1:
                    self.taken.append(packet.payload)
                    client.send(Puback(packet.packet_id))
                else:
                    if packet.packet_id not in self.half:
                        self.taken.append(packet.payload)
                        self.half.add(packet.packet_id)
                    client.send(Pubrec(packet.packet_id))
            else:
                assert type(packet) is Pubrel, packet
                self.half.discard(packet.packet_id)
                client.send(Pubcomp(packet.packet_id))


async def stopped(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.case("HK-23")
@pytest.mark.parametrize("turns", range(36))
@pytest.mark.parametrize("how", ["subscriber", "publisher", "takeover", "crash", "stop"])
async def test_whatever_ends_after_whatever_turn_nothing_is_lost_or_doubled(
    turns: int, how: str
) -> None:
    async with running() as broker:
        publisher, subscriber = Publisher(), Subscriber()
        reading = await broker.subscriber(b"s", (b"#", 2))
        writing = await broker.connect(b"p")
        tasks = [
            asyncio.ensure_future(publisher.run(writing)),
            asyncio.ensure_future(subscriber.run(reading)),
        ]
        for _ in range(turns):
            await asyncio.sleep(0)
        await stopped(*tasks)
        if how in ("crash", "stop"):
            await (broker.crash_and_restart() if how == "crash" else broker.restart())
        if how == "subscriber":
            await reading.cut()
        if how == "publisher":
            await writing.cut()
        reading, writing = await broker.connect(b"s"), await broker.connect(b"p")
        assert reading.connack.session_present
        assert writing.connack.session_present or not turns  # nothing of it was heard
        listening = asyncio.ensure_future(subscriber.run(reading))
        await asyncio.wait_for(publisher.run(writing), 10)
        await broker.turns(lambda: broker.is_idle(b"s"))
        await stopped(listening)
        await reading.quiet()
        await check(broker, subscriber)


async def check(broker: Broker, subscriber: Subscriber) -> None:
    taken = subscriber.taken
    for payload, qos in MESSAGES:
        copies = taken.count(payload)
        # QoS 1: published again and delivered again, each because an answer was cut off
        assert copies == 1 if qos == 2 else 1 <= copies <= 3, taken
    firsts = list(dict.fromkeys(taken))
    assert [p for p in firsts if p in (b"2", b"3", b"5")] == [b"2", b"3", b"5"]
    history = await broker.history()
    assert [history.count(payload) for payload, qos in MESSAGES if qos == 2] == [1, 1, 1]
    assert await broker.unsettled(b"s") == []
    snapshot = await broker.snapshot(b"p")
    assert snapshot is not None
    assert snapshot.inbound == frozenset()

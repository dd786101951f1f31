"""Certified progress: how far a stored position may move, and that it does move.

The rule. A session's position (its cursor, as stored) is a certificate: every entry of the history
at or below it that matches a durable filter of the session, and is above that filter's
``from_offset``, was acknowledged by the client or stands in a stored claim. Therefore

* it stops below an entry that was not offered, or that was read and could not be claimed;
* what was claimed ahead and never sent is given back with the cursor, at the end of a connection;
* it starts afresh where tracking starts: at the cursor that is on the record;
* it moves with entries that do not match, so that a quiet session keeps up with the log.

The model below drives sessions through random interleavings and looks at what is stored after each
step, from every committed batch; see ``Model.certified``.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pytest

from broker_ext import backlog, durable, replay
from broker_ext.topics import matches
from broker_ext.wire import (
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    SubscribeFilter,
    Unsuback,
    Unsubscribe,
)
from tests.broker.mqtt import running
from tests.storage.harness import BACKENDS, Memory, scratch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from storage.api import Entry, Snapshot
    from tests.broker.mqtt import Broker, Client
    from tests.storage.harness import Backend

TOPICS: Final = (b"a", b"b", b"c")
FILTERS: Final = (b"a", b"b", b"#", b"+", b"a/#", b"c")
STEPS: Final = 80


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with scratch() as path:
        yield BACKENDS[request.param](path)


# ------------------------------------------------------------------------------ it does move


async def test_a_quiet_session_keeps_up_by_the_timer(backend: Backend) -> None:
    """It matches nothing of what is published, and holds none of it back."""
    async with running(backend) as broker:
        quiet = await broker.subscriber(b"quiet", b"nothing")
        busy = await broker.subscriber(b"busy", b"a")
        publisher = await broker.connect(b"p", clean=True)
        for round_ in range(3):
            for n in range(20):
                await publisher.deliver(b"a", b"%d" % n)
            await busy.publishes(20)
            await busy.quiet()
            broker.clock.advance(ms=1)
            await prune(broker)
            assert (await broker.store.log()).floor == 20 * round_  # quiet holds them
            broker.hub._checkpoint()
            await prune(broker)
            assert (await broker.store.log()).floor == 20 * (round_ + 1)
            snapshot = await broker.snapshot(b"quiet")
            assert snapshot is not None
            assert snapshot.consumer.cursor == 20 * (round_ + 1)
        await quiet.quiet()


@pytest.mark.parametrize("how", ["acknowledgement", "disconnect", "cut"])
async def test_a_position_moves_at_acknowledgement_and_at_the_end(
    backend: Backend, how: str
) -> None:
    async with running(backend) as broker:
        client = await broker.subscriber(b"c", b"rare")
        other = await broker.subscriber(b"other", b"a")
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", *[b"x"] * 20)
        await other.publishes(20)
        if how == "acknowledgement":
            await publisher.deliver(b"rare", b"y")
            await client.publishes(1)
            await client.quiet()
        elif how == "disconnect":
            await client.disconnect()
        else:
            await client.cut()
        snapshot = await broker.snapshot(b"c")
        assert snapshot is not None
        assert snapshot.consumer.cursor == 20 + (how == "acknowledgement")
        assert snapshot.claims == ()


async def test_nothing_is_replayed_twice_after_a_kill(backend: Backend) -> None:
    async with running(backend) as broker:
        client = await broker.subscriber(b"c", b"a")
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", *[b"x"] * 10)
        await client.publishes(10)
        await client.quiet()
        await publisher.deliver(b"a", b"y")
        await client.publishes(1, ack=False)
        await broker.hub.committer.drain()
        for _ in range(3):
            await broker.crash_and_restart()
            client = await broker.connect(b"c")
            assert client.connack.session_present
            (again,) = await client.publishes(1, ack=False)
            assert (again.payload, again.dup) == (b"y", True)
            await client.quiet()
        client.send(Puback(again.packet_id))
        await client.quiet()
        await broker.hub.committer.drain()
        await broker.crash_and_restart()
        client = await broker.connect(b"c")
        assert client.connack.session_present
        await client.quiet()


async def test_a_session_that_lags_checkpoints_what_it_has(backend: Backend) -> None:
    """It is never live while it drains; history goes as it goes through it."""
    async with running(backend, max_inflight=10) as broker:
        await broker.sleeper(b"c", b"a")
        publisher = await broker.connect(b"p", clean=True)
        for n in range(100):
            await publisher.deliver(b"a", b"%d" % n, *[b"x"] * 9)
        await broker.restart()
        client = await broker.connect(b"c")
        await client.publishes(500)
        await client.until_ping()
        broker.hub._checkpoint()
        await broker.hub.committer.drain()
        broker.clock.advance(ms=1)
        await prune(broker)
        assert 480 <= (await broker.store.log()).floor <= 500


async def prune(broker: Broker) -> None:
    await broker.hub.committer.drain()
    await broker.hub._prune()
    assert await broker.store.inner.check() == []


# ---------------------------------------------------------------------- it never moves too far


@dataclass
class Device:
    """A durable client, as far as the model has to know it.

    sent: packet id -> (offset, QoS) of what was received on this connection and not acknowledged.
    received: packet id -> offset of what was answered with PUBREC, on any connection.
    acknowledged: offsets for which PUBACK or PUBCOMP was sent, ever. lately: on this connection.
    settled: those of which the broker is known to have it on disk. had: those that came.
    """

    client_id: bytes
    client: Client | None = None
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    acknowledged: set[int] = field(default_factory=set)
    lately: set[int] = field(default_factory=set)
    settled: set[int] = field(default_factory=set)
    had: set[int] = field(default_factory=set)


class Model:
    """A broker, two devices, and everything that was ever committed."""

    def __init__(self, broker: Broker, seed: int) -> None:
        self.broker = broker
        self.rng = random.Random(seed)  # noqa: S311 - it has to be repeatable
        self.log: dict[int, Entry] = {}
        self.offset_of: dict[bytes, int] = {}
        self.devices = [Device(b"one"), Device(b"two")]
        self.published = 0
        self.publisher: Client
        self._looked = 0
        self.steps: list[str] = []

    async def begin(self) -> None:
        self.publisher = await self.broker.connect(b"p", clean=True)

    # ------------------------------------------------------------------------------ steps

    async def step(self) -> None:
        device = self.rng.choice(self.devices)
        steps: list[tuple[int, Callable[[Device], Awaitable[object]]]] = [
            (10, self.publish),
            (8, self.acknowledge),
            (6, self.look),
            (4, self.turns),
            (4, self.checkpoint),
            (4, self.connect),
            (3, self.subscribe),
            (1, self.unsubscribe),
            (2, self.leave),
            (2, self.settle),
            (2, self.prune),
            (1, self.crash),
        ]
        weights = [weight for weight, _ in steps]
        _, do = self.rng.choices(steps, weights)[0]
        self.steps.append(f"{do.__name__} {device.client_id.decode()}")
        await do(device)
        await self.certified()

    async def publish(self, _: Device) -> None:
        for _n in range(self.rng.choice((1, 1, 3, 12))):
            self.published += 1
            topic = self.rng.choice(TOPICS)
            self.publisher.publish(topic, b"%d" % self.published, self.rng.choice((1, 1, 2)))
        if self.rng.random() < 0.5:
            for packet in await self.publisher.until_ping():
                if type(packet) is Pubrec:
                    self.publisher.send(Pubrel(packet.packet_id))

    async def look(self, device: Device) -> list[Any]:
        """Read what has come; nothing is acknowledged yet."""
        if device.client is None:
            return []
        packets = await device.client.until_ping()
        self.committed()
        for packet in packets:
            if type(packet) is Publish and packet.qos:
                offset = self.offset_of[packet.payload]  # so it was committed before (P2)
                assert offset not in device.settled, f"{offset} came again"
                device.had.add(offset)
                device.sent[packet.packet_id] = offset, packet.qos
            elif type(packet) is Pubrel:
                device.client.send(Pubcomp(packet.packet_id))
                if packet.packet_id in device.received:
                    device.lately.add(device.received.pop(packet.packet_id))
                    device.acknowledged |= device.lately
        return packets

    async def acknowledge(self, device: Device) -> None:
        await self.look(device)
        if device.client is None:
            return
        ids = self.rng.sample(sorted(device.sent), self.rng.randint(0, len(device.sent)))
        for packet_id in ids:
            self.acknowledged(device, packet_id)

    def acknowledged(self, device: Device, packet_id: int) -> None:
        assert device.client is not None
        offset, qos = device.sent.pop(packet_id)
        if qos == 2:
            device.received[packet_id] = offset
            device.client.send(Pubrec(packet_id))
        else:
            device.lately.add(offset)
            device.acknowledged.add(offset)
            device.client.send(Puback(packet_id))

    async def turns(self, _: Device) -> None:
        for _n in range(self.rng.randint(1, 10)):
            await asyncio.sleep(0)

    async def checkpoint(self, _: Device) -> None:
        self.broker.hub._checkpoint()

    async def connect(self, device: Device) -> None:
        """Also while it is connected: then it takes over from itself."""
        device.sent.clear()
        device.lately.clear()
        await self.broker.hub.committer.drain()
        before = await self.broker.store.inner.snapshot(device.client_id)
        device.client = await self.broker.connect(device.client_id)
        present = device.client.connack.session_present
        assert present <= (before is not None)
        assert present >= (before is not None and bool(before.subscriptions or before.claims))

    async def subscribe(self, device: Device) -> None:
        if device.client is None:
            await self.connect(device)
        assert device.client is not None
        name = self.rng.choice(FILTERS)
        qos = self.rng.choice((0, 1, 1, 1, 2))
        device.client.send(Subscribe(1, (SubscribeFilter(name, qos),)))
        while not any(type(p) is Suback for p in await self.look(device)):  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def unsubscribe(self, device: Device) -> None:
        if device.client is not None:
            device.client.send(Unsubscribe(2, (self.rng.choice(FILTERS),)))
            while not any(type(p) is Unsuback for p in await self.look(device)):  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def leave(self, device: Device) -> None:
        if device.client is not None:
            if self.rng.random() < 0.5:
                await device.client.disconnect()
            else:
                await device.client.cut()
            device.client = None

    async def settle(self, _: Device) -> None:
        """Wait until everything that was acknowledged is on disk."""
        for device in self.devices:
            await self.look(device)
        await self.broker.hub.committer.drain()
        for device in self.devices:
            if device.client is not None:
                device.settled |= device.lately

    async def prune(self, _: Device) -> None:
        self.broker.clock.advance(ms=1)
        await self.broker.hub._prune()

    async def crash(self, _: Device) -> None:
        await self.broker.crash()
        self.committed()
        for device in self.devices:
            device.client = None
        await self.broker.start()
        self._looked = 0
        await self.begin()

    # ------------------------------------------------------------------------------ judging

    def committed(self) -> None:
        """Take up what was committed since."""
        for batch in self.broker.store.applied[self._looked :]:
            for entry in batch.entries:
                self.log[entry.offset] = entry
                self.offset_of[entry.payload] = entry.offset
        self._looked = len(self.broker.store.applied)

    async def certified(self) -> None:
        """The rule, for what is stored now."""
        snapshots = [await self.broker.store.inner.snapshot(d.client_id) for d in self.devices]
        self.committed()
        floor = (await self.broker.store.inner.log()).floor
        for device, snapshot in zip(self.devices, snapshots, strict=True):
            if snapshot is None:
                continue
            assert snapshot.loss is None
            claimed = {d.offset for claim in snapshot.claims for d in claim.deliveries}
            assert all(offset > floor for offset in claimed)
            for offset, entry in self.log.items():
                if not wants(snapshot, entry):
                    continue
                if offset <= snapshot.consumer.cursor:
                    assert offset in claimed or offset in device.acknowledged, offset
                else:
                    assert offset > floor, f"{offset} was pruned"

    async def finish(self) -> None:
        """Everybody comes back and acknowledges everything; then nothing is left to be kept."""
        for device in self.devices:
            await self.connect(device)
        await self.publisher.until_ping()
        for device in self.devices:
            while not self.broker.is_idle(device.client_id):
                await self.look(device)
                for packet_id in list(device.sent):
                    self.acknowledged(device, packet_id)
                await asyncio.sleep(0)
        await self.certified()
        for device in self.devices:
            snapshot = await self.broker.snapshot(device.client_id)
            assert snapshot is not None
            wanted = {offset for offset, entry in self.log.items() if wants(snapshot, entry)}
            assert wanted <= device.had, f"{sorted(wanted - device.had)} never came"
            assert wanted <= device.acknowledged
        self.broker.hub._checkpoint()
        self.broker.clock.advance(ms=1)
        await prune(self.broker)
        log = await self.broker.store.log()
        assert log.floor == log.head == max(self.log, default=0)


def wants(snapshot: Snapshot, entry: Entry) -> bool:
    return any(
        sub.qos and sub.from_offset < entry.offset and matches(sub.filter, entry.topic)
        for sub in snapshot.subscriptions
    )


async def play(seed: int, backend: Backend, patch: pytest.MonkeyPatch) -> None:
    """One random run, with small windows and chunks so that sessions lag, and read."""
    rng = random.Random(seed)  # noqa: S311 - it has to be repeatable
    patch.setattr(durable, "AHEAD_MIN", rng.choice((1, 3, 256)))
    patch.setattr(backlog, "TAIL_WALK_MAX", rng.choice((0, 5, 512)))
    patch.setattr(backlog, "READ_ENTRIES_MAX", 3)
    patch.setattr(replay, "READ_ENTRIES_MAX", rng.choice((1, 3, 512)))
    window = rng.choice((1, 2, 5, 100))
    async with running(backend, max_inflight=window, max_connects_per_second=1e6) as broker:
        model = Model(broker, seed)
        await model.begin()
        try:
            for _ in range(STEPS):
                await model.step()
            model.steps.append("finish")
            await model.finish()
        except BaseException:
            print(f"seed {seed}, window {window}: " + ", ".join(model.steps))  # noqa: T201
            raise


@pytest.mark.parametrize("seed", range(40))
async def test_a_stored_position_never_passes_what_is_not_settled_or_claimed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await play(seed, Memory(None), monkeypatch)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(100, 104))
async def test_a_stored_position_never_passes_it_on_disk(
    seed: int, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await play(seed, backend, monkeypatch)


@pytest.mark.timeout(900)
async def test_a_stored_position_never_passes_it_for_minutes(
    monkeypatch: pytest.MonkeyPatch,
    long: bool,
) -> None:
    if not long:
        pytest.skip("with --long only")
    begin = random.SystemRandom().randrange(1 << 32)
    for seed in range(begin, begin + 1000):
        await play(seed, Memory(None), monkeypatch)  # type: ignore[arg-type]

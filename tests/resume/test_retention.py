"""How long history is kept: the arithmetic of ``retain_for`` and of the hard caps.

The store here has one message in a block, unless a test says otherwise: what is published and
acknowledged alone is a commit of its own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from broker_ext import hub as hub_module
from broker_ext.wire import Puback, Publish
from storage.api import Prune
from tests.broker.mqtt import running
from tests.storage.harness import BACKENDS, scratch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.broker.mqtt import Broker, Client
    from tests.storage.harness import Backend


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with scratch() as path:
        yield BACKENDS[request.param](path)


async def publish(broker: Broker, *sizes: int, topic: bytes = b"a") -> Client:
    """One commit after the other; a payload's first byte is its number."""
    publisher = await broker.connect(b"p", clean=True)
    for number, size in enumerate(sizes):
        await publisher.deliver(topic, b"%c" % number + bytes(size - 1))
    return publisher


async def kept(broker: Broker) -> list[int]:
    """Numbers of the messages that are left."""
    return [payload[0] for payload in await broker.history()]


async def prune(broker: Broker) -> None:
    """What the timers do, a day's worth of checkpoints included."""
    broker.hub._checkpoint()
    await broker.hub.committer.drain()
    await broker.hub._prune()
    assert await broker.store.inner.check() == []


# ------------------------------------------------------------------------------- retain_for


async def test_what_every_session_has_goes_at_once(backend: Backend) -> None:
    async with running(backend) as broker:
        client = await broker.subscriber(b"c", b"a")
        await publish(broker, 100, 100)
        first, second = await client.publishes(2, ack=False)
        client.send(Puback(first.packet_id))
        await client.quiet()
        broker.clock.advance(ms=1)
        await prune(broker)
        assert await kept(broker) == [1]  # it is under way
        client.send(Puback(second.packet_id))
        await client.quiet()
        await prune(broker)
        assert await kept(broker) == []


async def test_retain_for_keeps_what_every_session_has(backend: Backend) -> None:
    async with running(backend, retain_for_s=60.0) as broker:
        client = await broker.subscriber(b"c", b"a")
        await publish(broker, 100)
        broker.clock.advance(ms=30_000)
        await publish(broker, 100)
        await client.publishes(2)
        await client.quiet()
        broker.clock.advance(ms=30_000)
        await prune(broker)
        assert await kept(broker) == [0, 0]  # 60 s are not over yet
        broker.clock.advance(ms=1)
        await prune(broker)
        assert len(await kept(broker)) == 1
        broker.clock.advance(ms=30_000)
        await prune(broker)
        assert await kept(broker) == []


async def test_retain_for_deletes_nothing_that_a_session_needs(backend: Backend) -> None:
    async with running(backend, retain_for_s=1.0) as broker:
        await broker.sleeper(b"c", b"a")
        await publish(broker, 100, 100)
        broker.clock.advance(ms=10_000_000)
        await prune(broker)
        assert await kept(broker) == [0, 1]
        client = await broker.connect(b"c")
        await client.publishes(2)
        await client.quiet()
        await prune(broker)
        assert await kept(broker) == []


async def test_a_session_without_durable_filters_holds_nothing(backend: Backend) -> None:
    async with running(backend) as broker:
        await (await broker.connect(b"empty")).disconnect()
        await broker.sleeper(b"qos0", (b"#", 0))
        client = await broker.subscriber(b"c", b"a")
        await publish(broker, 100)
        await client.publishes(1)
        await client.quiet()
        broker.clock.advance(ms=1)
        await prune(broker)
        assert await kept(broker) == []


async def test_a_session_holds_nothing_that_is_older_than_its_subscriptions(
    backend: Backend,
) -> None:
    async with running(backend) as broker:
        late = await broker.connect(b"late")  # its position is 0, as it never gets anything
        await late.disconnect()
        client = await broker.subscriber(b"c", b"a")
        await publish(broker, 100, 100)
        await client.publishes(2)
        late = await broker.connect(b"late")
        await late.subscribe(b"a")
        await late.disconnect()
        await publish(broker, 100)
        await client.publishes(1)
        await client.quiet()
        broker.clock.advance(ms=1)
        await prune(broker)
        assert await kept(broker) == [0]


@pytest.mark.case("HK-17")
async def test_a_session_that_expires_takes_what_only_it_held(backend: Backend) -> None:
    async with running(backend, session_expiry_interval_s=60) as broker:
        await broker.sleeper(b"c", b"a")
        await publish(broker, 100, 100)
        await prune(broker)
        assert await kept(broker) == [0, 1]
        broker.clock.advance(ms=60_000)
        await broker.hub._expire()
        await prune(broker)
        assert await kept(broker) == []
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", b"z")  # nobody wants it any more: not even logged
        assert await kept(broker) == []


# -------------------------------------------------------------------------------- hard caps


async def test_max_messages_keeps_the_newest(backend: Backend) -> None:
    async with running(backend, max_messages=3) as broker:
        await broker.sleeper(b"c", b"a")
        await publish(broker, *[100] * 3)
        await prune(broker)
        assert await kept(broker) == [0, 1, 2]
        await publish(broker, *[100] * 5)
        await prune(broker)
        assert await kept(broker) == [2, 3, 4]
        await prune(broker)
        assert await kept(broker) == [2, 3, 4]


async def test_max_messages_is_exact_within_a_commit(backend: Backend) -> None:
    """Many messages of one commit are one block; what is above the cap in it is kept."""
    async with running(backend, max_messages=3) as broker:
        await broker.sleeper(b"c", b"a")
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", *[b"%c" % n for n in range(10)])
        await prune(broker)
        assert await kept(broker) == [7, 8, 9]


async def test_max_age_deletes_by_the_time_of_the_commit(backend: Backend) -> None:
    async with running(backend, max_age_s=60.0) as broker:
        await broker.sleeper(b"c", b"a")
        await publish(broker, 100)
        broker.clock.advance(ms=1000)
        await publish(broker, 101)
        broker.clock.advance(ms=59_000)
        await prune(broker)
        assert len(await kept(broker)) == 2
        broker.clock.advance(ms=1)
        await prune(broker)
        assert len(await kept(broker)) == 1
        broker.clock.advance(ms=1000)
        await prune(broker)  # though nothing was committed since
        assert await kept(broker) == []


@pytest.mark.parametrize(
    ("sizes", "left"),
    [
        ([10_000] * 10, [6, 7, 8, 9]),
        ([30_000] * 3 + [1000] * 10, list(range(2, 13))),  # large old ones: no small one goes
        ([100] * 10 + [20_000] * 2, list(range(12))),
        ([100] * 10 + [20_000] * 4, [12, 13]),  # small old ones do not help: they all go
        ([60_000], []),  # larger than the cap by itself
        ([60_000, 100, 100], [1, 2]),
    ],
)
async def test_max_bytes_deletes_the_oldest_and_no_more_than_it_must(
    backend: Backend, sizes: list[int], left: list[int]
) -> None:
    async with running(backend, max_bytes=49_500) as broker:
        await broker.sleeper(b"c", b"a")
        await publish(broker, *sizes)
        await prune(broker)
        assert await kept(broker) == left
        assert (await broker.store.log()).bytes <= 49_500
        await prune(broker)
        assert await kept(broker) == left


async def test_a_cap_that_is_not_reached_deletes_nothing(backend: Backend) -> None:
    async with running(
        backend, max_messages=10, max_bytes=100_000, max_age_s=60.0, retain_for_s=1.0
    ) as broker:
        await broker.sleeper(b"c", b"a")
        await publish(broker, *[1000] * 10)
        broker.clock.advance(ms=59_000)
        await prune(broker)
        assert len(await kept(broker)) == 10


async def test_caps_pass_retain_for(backend: Backend) -> None:
    async with running(backend, max_messages=2, retain_for_s=1e6) as broker:
        await broker.sleeper(b"c", b"a")
        await publish(broker, *[100] * 5)
        await prune(broker)
        assert await kept(broker) == [3, 4]


# -------------------------------------------------------------------------- beside traffic


async def test_pruning_goes_by_small_commits_beside_traffic(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "PRUNE_BLOCKS_MAX", 4)
    async with running(backend, max_messages=1) as broker:
        await broker.sleeper(b"c", b"a")
        publisher = await publish(broker, *[100] * 40)
        before = len(broker.store.batches)
        pruning = asyncio.ensure_future(broker.hub._prune())
        acknowledged = 0
        while not pruning.done():
            publisher.publish(b"a", b"beside")
            await publisher.next(Puback)
            acknowledged += 1
        await pruning
        batches = broker.store.batches[before:]
        prunes = [op for batch in batches for op in batch.ops if isinstance(op, Prune)]
        assert len(prunes) >= 10
        assert all(op.blocks_max == 4 for op in prunes)
        assert acknowledged >= 5
        await publisher.quiet()
        await prune(broker)
        assert len(await kept(broker)) == 1


async def test_floor_and_marks_move_with_what_is_deleted(backend: Backend) -> None:
    """A crash after any of the commits of a prune leaves a store that knows what it lost."""
    async with running(backend, max_messages=1) as broker:
        await broker.sleeper(b"c", b"a")
        await broker.sleeper(b"d", b"b")
        publisher = await publish(broker, *[100] * 10)
        await publisher.deliver(b"b", b"last")
        for through in range(1, 11):
            await broker.hub.committer.apply(Prune(through, 0, 1))
            log = await broker.store.log()
            assert log.floor == through
            await broker.crash_and_restart()
            assert await broker.store.inner.check() == []
            snapshot = await broker.snapshot(b"c")
            assert snapshot is not None
            assert snapshot.loss is not None
            assert snapshot.loss == (b"a", through)
            spared = await broker.snapshot(b"d")
            assert spared is not None
            assert spared.loss is None


async def test_space_comes_back(backend: Backend) -> None:
    """What was deleted is used again: the history's bytes on disk stand still."""
    async with running(backend, max_messages=5) as broker:
        await broker.sleeper(b"c", b"a")
        peak = 0
        for _ in range(10):
            await publish(broker, *[10_000] * 5)
            await prune(broker)
            peak = max(peak, (await broker.store.log()).bytes)
        assert peak <= 6 * 10_100


async def test_a_live_session_is_not_hurt_by_a_cap_that_passes_it(backend: Backend) -> None:
    """It was sent what was pruned and acknowledges it afterwards."""
    async with running(backend, max_messages=1) as broker:
        client = await broker.subscriber(b"c", b"a")
        await publish(broker, *[100] * 5)
        got = await client.publishes(5, ack=False)
        await prune(broker)
        for packet in got:
            assert isinstance(packet, Publish)
            client.send(Puback(packet.packet_id))
        await client.quiet()
        await broker.hub.committer.drain()
        await client.cut()
        again = await broker.connect(b"c")
        assert again.connack.session_present
        await again.quiet()

"""P11: a store that fails, hangs, or has lost something. HK-21, HK-24."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from typing import TYPE_CHECKING, Any

import pytest

from broker_ext.wire import Connack, Pingreq, Pingresp, Puback, Publish, Suback
from storage.api import Entry
from storage.errors import EntryDamaged, EntryGone, StoreFull, StoreUnavailable
from tests.broker.mqtt import running
from tests.storage.harness import OnDisk, scratch

if TYPE_CHECKING:
    from pathlib import Path

    from tests.broker.mqtt import Broker

# -------------------------------------------------------------------- a disk that cannot write


async def test_while_the_disk_is_full_nothing_is_acknowledged_and_the_rest_goes_on(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    durable = await broker.subscriber(b"d", (b"#", 1))
    transient = await broker.connect(b"t", clean=True)
    await transient.subscribe((b"#", 0))
    publisher = await broker.connect(b"p", clean=True)
    broker.store.fail_submit(StoreFull("no space"), times=5)
    for n in range(50):
        publisher.publish(b"a", b"%d" % n)
    await publisher.quiet()  # PINGREQ is answered, PUBACK is not sent
    publisher.publish(b"live", b"live", 0)
    assert (await durable.any()).payload == b"live"
    assert [p.payload for p in await transient.publishes(51)][-1] == b"live"
    assert await durable.subscribe(b"more") == b"\x80"
    refused = await broker.dial()
    assert (await refused.connect(b"late")).reason == 3
    # it continues by itself
    assert [(await publisher.next(Puback)).packet_id for _ in range(50)] == list(range(1, 51))
    assert await durable.payloads(50) == [b"%d" % n for n in range(50)]
    assert await broker.history() == [b"%d" % n for n in range(50)]
    ours = [r for r in caplog.records if r.name.startswith("amqtt_durable")]
    said = [r.getMessage() for r in ours if r.levelno >= logging.WARNING]
    assert len(said) == 2  # and nothing of each client that is refused
    assert "cannot write" in said[0]
    assert "writes again" in said[1]


async def test_a_full_disk_has_room_again_when_history_is_old_enough_to_be_pruned() -> None:
    async with running(max_age_s=60.0) as broker:
        await broker.sleeper(b"s", b"#")
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", b"1")
        broker.store.fill()
        publisher.publish(b"a", b"2")
        await publisher.quiet()
        await broker.turns(lambda: broker.hub.committer.full)
        await broker.hub._prune()
        assert broker.hub.figures.pruned_blocks == 0
        assert broker.hub.committer.full
        broker.clock.advance(ms=61_000)
        await broker.hub._prune()
        assert broker.hub.figures.pruned_blocks == 1
        assert await publisher.next(Puback)
        assert await broker.history() == [b"2"]


async def test_a_full_disk_has_room_again_when_a_session_has_expired() -> None:
    async with running(session_expiry_interval_s=60) as broker:
        await broker.sleeper(b"s", b"#")
        stays = await broker.subscriber(b"t", b"#")
        publisher = await broker.connect(b"p", clean=True)
        broker.store.fill()
        publisher.publish(b"a", b"1")
        await publisher.quiet()
        await broker.turns(lambda: broker.hub.committer.full)
        broker.clock.advance(ms=61_000)
        await broker.hub._expire()
        assert broker.hub.figures.expired == 1
        assert await publisher.next(Puback)
        assert await stays.payloads(1) == [b"1"]


async def test_a_full_disk_has_room_again_when_what_ended_in_the_outbox_is_purged() -> None:
    async with running(keep_done_s=60.0) as broker:
        await broker.sleeper(b"s", b"#")
        handles = broker.hub.handles
        await handles.producer(b"q").enqueue(Entry(0, b"t", b"x", 1))
        worker = handles.worker(b"q")
        (message,) = (await worker.claim()).messages
        assert await worker.done(message)
        publisher = await broker.connect(b"p", clean=True)
        broker.store.fill()
        publisher.publish(b"a", b"1")
        await publisher.quiet()
        await broker.turns(lambda: broker.hub.committer.full)
        broker.clock.advance(ms=61_000)
        await broker.hub.sinks.purge()
        assert await publisher.next(Puback)


async def test_what_was_acknowledged_before_a_failure_is_not_lost(broker: Broker) -> None:
    await broker.sleeper(b"s", b"#")
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", b"1")
    broker.store.fail_submit(StoreUnavailable("I/O error"), times=1000)
    publisher.publish(b"a", b"2")
    await publisher.quiet()
    await broker.crash_and_restart()
    subscriber = await broker.connect(b"s")
    assert subscriber.connack.session_present
    assert await subscriber.payloads(1) == [b"1"]
    await subscriber.quiet()


async def test_acknowledgements_of_a_subscriber_are_kept_while_the_disk_is_full(
    broker: Broker,
) -> None:
    subscriber = await broker.subscriber(b"s", b"#")
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", b"1", b"2", b"3")
    packets = await subscriber.publishes(3, ack=False)
    broker.store.fail_submit(StoreFull("no space"), times=3)
    for packet in packets:
        subscriber.send(Puback(packet.packet_id))
    await subscriber.quiet()
    await broker.hub.committer.drain()
    assert await broker.unsettled(b"s") == []


async def test_a_session_that_leaves_while_the_disk_is_full_is_saved_when_it_can_be(
    broker: Broker,
) -> None:
    subscriber = await broker.subscriber(b"s", b"#")
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", b"1", b"2")
    first, second = await subscriber.publishes(2, ack=False)
    broker.store.fail_submit(StoreFull("no space"), times=3)
    subscriber.send(Puback(first.packet_id))
    await subscriber.quiet()
    await subscriber.cut()
    await broker.hub.committer.drain()
    again = await broker.connect(b"s")
    (packet,) = await again.publishes(1)
    assert (packet.payload, packet.packet_id) == (b"2", second.packet_id)


async def test_a_stop_while_the_disk_is_full_ends_in_bounded_time_and_loses_nothing(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker_ext.hub.DRAIN_S", 0.1)
    await broker.sleeper(b"s", b"#")
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", b"1")
    broker.store.fail_submit(StoreFull("no space"), times=1000)
    publisher.publish(b"a", b"2")
    await publisher.quiet()
    await broker.stop()
    assert not publisher._packets
    await broker.start()
    subscriber = await broker.connect(b"s")
    assert await subscriber.payloads(1) == [b"1"]


# ---------------------------------------------------------------------------- a commit that hangs


@pytest.mark.case("HK-21")
async def test_pings_are_answered_while_a_commit_hangs_and_a_big_backlog_is_queued() -> None:
    async with running(commit_bytes_max=4 << 20) as broker:
        subscriber = await broker.subscriber(b"s", b"a")
        bystander = await broker.connect(b"b", clean=True)
        await bystander.subscribe((b"live", 0))
        publisher = await broker.connect(b"p", clean=True)
        gate = broker.store.hang_submit()
        for n in range(80):
            publisher.publish(b"a", b"%04d" % n + bytes(100_000))
        await gate.reached.wait()
        await broker.turns(lambda: broker.hub.committer.over)
        for client in (subscriber, bystander):
            for _ in range(3):  # each time: one that is not a feeder must not be paused either
                async with asyncio.timeout(1):
                    client.send(Pingreq())
                    await client.next(Pingresp)
        bystander.publish(b"live", b"x", 0)
        assert (await bystander.next(Publish)).payload == b"x"
        assert broker.hub.committer.waiting_bytes < 5 << 20  # P12: the publisher is not read
        gate.release()
        assert [p[:4] for p in await subscriber.payloads(80)] == [b"%04d" % n for n in range(80)]
        for _ in range(80):
            await publisher.next(Puback)


async def test_a_client_whose_lane_was_full_when_the_disk_hung_is_read_again() -> None:
    async with running(commit_bytes_max=1 << 20) as broker:
        broker.slow_filters[b"slow"] = asyncio.Event()
        await broker.sleeper(b"s", b"a")
        first = await broker.connect(b"1", clean=True)
        second = await broker.connect(b"2", clean=True)
        lane: Any = broker.session(b"2").peer
        lane.guard.slow = True
        second.send_bytes(_subscribe(b"slow"))
        for _ in range(6):
            second.publish(b"nobody", bytes(60_000), 0)
        await broker.turns(lambda: lane._paused)
        gate = broker.store.hang_submit()
        for _ in range(20):
            first.publish(b"a", bytes(100_000))
        await gate.reached.wait()
        await broker.turns(lambda: broker.hub.committer.over)
        broker.slow_filters[b"slow"].set()
        await second.next(Suback)
        await broker.turns(lambda: not lane._lane.is_busy)
        gate.release()
        await second.quiet()


def _subscribe(topic_filter: bytes) -> bytes:
    body = b"\x00\x09\x00%c" % len(topic_filter) + topic_filter + b"\x00"
    return b"\x82%c" % len(body) + body


@pytest.mark.case("HK-24")
async def test_while_another_process_holds_the_write_lock_acknowledgements_are_late() -> None:
    with scratch() as path:
        backend = OnDisk("sqlite", path)
        async with running(backend) as broker:
            subscriber = await broker.subscriber(b"s", b"#")
            publisher = await broker.connect(b"p", clean=True)
            await publisher.deliver(b"a", b"0")
            assert await subscriber.payloads(1) == [b"0"]
            await broker.hub.committer.drain()
            other = sqlite3.connect(_database(path), isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            for n in range(1, 30):
                publisher.publish(b"a", b"%d" % n)
            for _ in range(20):
                async with asyncio.timeout(1):
                    await publisher.quiet()
                    await subscriber.quiet()
                await asyncio.sleep(0.02)  # the lock is held for a while
            other.execute("ROLLBACK")
            other.close()
            for _ in range(1, 30):
                await publisher.next(Puback)
            assert await subscriber.payloads(29) == [b"%d" % n for n in range(1, 30)]


def _database(path: Path) -> Path:
    (found,) = [p for p in path.rglob("*") if p.is_file() and _is_sqlite(p)]
    return found


def _is_sqlite(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(15) == b"SQLite format 3"


async def test_a_slow_disk_delays_and_loses_nothing(broker: Broker) -> None:
    subscriber = await broker.subscriber(b"s", (b"#", 2))
    publisher = await broker.connect(b"p")
    broker.store.delay_s = 0.005
    payloads = [b"%d" % n for n in range(200)]
    for payload in payloads:
        publisher.publish(b"a", payload, 1)
    assert await subscriber.payloads(200) == payloads


# --------------------------------------------------------------------------- reading that fails


async def backlog(broker: Broker, *clients: bytes, count: int = 5) -> None:
    for client_id in clients:
        await broker.sleeper(client_id, b"a")
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", *(b"%d" % n for n in range(count)))
    await publisher.disconnect()
    await broker.restart()  # so that nothing is in memory


async def test_a_disk_that_cannot_be_read_closes_the_connection_and_the_client_resumes(
    broker: Broker,
) -> None:
    await backlog(broker, b"s")
    broker.store.fail_read(StoreUnavailable("I/O error"))
    client = await broker.connect(b"s")
    await client.closed()
    assert not client._packets
    again = await broker.connect(b"s")
    assert again.connack.session_present
    assert await again.payloads(5) == [b"%d" % n for n in range(5)]


async def test_deliveries_under_way_that_cannot_be_read_now_are_resumed_later(
    broker: Broker,
) -> None:
    subscriber = await broker.subscriber(b"s", b"a")
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", b"1", b"2")
    before = await subscriber.publishes(2, ack=False)
    await subscriber.cut()
    broker.store.fail_read(StoreUnavailable("I/O error"))
    client = await broker.connect(b"s")
    await client.closed()
    again = await broker.connect(b"s")
    after = await again.publishes(2)
    assert [(p.payload, p.packet_id) for p in after] == [(p.payload, p.packet_id) for p in before]


@pytest.mark.parametrize("error", [EntryDamaged(3, b"a"), EntryDamaged(3), EntryGone(3)])
async def test_a_damaged_entry_resets_the_session_that_needs_it_and_others_go_on(
    broker: Broker, error: EntryDamaged | EntryGone, caplog: pytest.LogCaptureFixture
) -> None:
    if isinstance(error, EntryGone):
        await _under_way(broker)
    else:
        await backlog(broker, b"s", b"other")
    other = await broker.connect(b"other")
    assert await other.payloads(5) == [b"%d" % n for n in range(5)]
    broker.store.fail_read(error)
    client = await broker.connect(b"s")
    await client.closed()
    assert not [p for p in client._packets if type(p) is Publish]
    await other.quiet()
    assert await broker.snapshot(b"s") is None
    assert sum(broker.hub.figures.resets.values()) == 1
    assert "is reset" in caplog.text
    again = await broker.dial()
    assert not (await again.connect(b"s")).session_present
    await again.subscribe(b"a")
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", b"new")
    assert await again.payloads(1) == [b"new"]
    assert await other.payloads(1) == [b"new"]


async def _under_way(broker: Broker) -> None:
    """As ``backlog``, but "s" had got everything before, and not acknowledged it."""
    await broker.sleeper(b"other", b"a")
    subscriber = await broker.subscriber(b"s", b"a")
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", *(b"%d" % n for n in range(5)))
    await subscriber.publishes(5, ack=False)
    await broker.restart()


async def test_a_connect_while_a_read_of_another_session_hangs_is_served(broker: Broker) -> None:
    await backlog(broker, b"s")
    gate = broker.store.hang_read()
    slow = await broker.connect(b"s")
    await gate.reached.wait()
    other = await broker.connect(b"o")
    await other.subscribe(b"a")
    await other.quiet()
    await slow.quiet()
    gate.release()
    assert await slow.payloads(5) == [b"%d" % n for n in range(5)]


@pytest.mark.case("HK-23")
async def test_a_client_that_leaves_while_its_history_is_read_loses_nothing(
    broker: Broker,
) -> None:
    await backlog(broker, b"s")
    gate = broker.store.hang_read()
    client = await broker.connect(b"s")
    await gate.reached.wait()
    await client.cut()
    again = await broker.dial()
    again.send(again.connect_packet(b"s"))
    assert (await again.next(Connack)).session_present
    assert await again.payloads(5) == [b"%d" % n for n in range(5)]
    gate.release()
    await again.quiet()
    assert await broker.unsettled(b"s") == []

"""P12: everything has a bound. And what is driven by the clock: keep alive, expiry, retention."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from broker_ext import hub as hub_module
from broker_ext.durable import DurableSession
from broker_ext.outbound import AHEAD_BYTES_MAX
from broker_ext.wire import Puback, Publish
from storage.api import Advance
from tests.broker.mqtt import running

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker, Client
    from tests.storage.harness import Backend

YEAR_MS = 365 * 24 * 3600 * 1000


# -------------------------------------------------------------------------- slow and fast


async def test_a_client_that_does_not_read_costs_a_cursor_and_catches_up() -> None:
    async with running() as broker:
        subscriber = await broker.subscriber(b"s", b"a")
        publisher = await broker.connect(b"p", clean=True)
        total = 400
        for n in range(total):
            publisher.publish(b"a", b"%05d" % n + bytes(50_000))
            await publisher.flushed()
            await publisher.next(Puback)
        session = broker.session(b"s")
        out = session.out
        assert session.peer.congested
        assert not session.backlog.live
        assert session.backlog.cursor < total
        assert out.unsent_bytes < AHEAD_BYTES_MAX + 100_000
        kept = sum(len(f.entry.payload) for f in out.flights.values() if f.entry is not None)
        assert kept < AHEAD_BYTES_MAX + 100_000
        got = await subscriber.publishes(total)
        assert [p.payload[:5] for p in got] == [b"%05d" % n for n in range(total)]
        await subscriber.quiet()
        assert broker.is_idle(b"s")


async def test_qos_0_for_a_client_that_does_not_read_is_dropped_and_counted(
    broker: Broker,
) -> None:
    subscriber = await broker.connect(b"s", clean=True)
    await subscriber.subscribe((b"a", 0))
    publisher = await broker.connect(b"p", clean=True)
    sent = 0
    while not broker.hub.figures.dropped_qos0:
        for _ in range(20):
            publisher.publish(b"a", bytes(50_000), 0)
        sent += 20
        await publisher.quiet()
    transport = broker.session(b"s").peer.transport  # type: ignore[attr-defined]
    assert transport.get_write_buffer_size() < 2 << 20
    got = [p for p in await subscriber.until_ping() if type(p) is Publish]
    assert len(got) == sent - broker.hub.figures.dropped_qos0


async def test_retained_messages_for_a_client_that_does_not_read_wait(broker: Broker) -> None:
    publisher = await broker.connect(b"p", clean=True)
    for n in range(300):
        publisher.publish(b"r/%d" % n, bytes(50_000), 0, retain=True)
        if n % 50 == 0:
            await publisher.quiet()
    await publisher.quiet()
    subscriber = await broker.connect(b"s")
    assert await subscriber.subscribe((b"r/+", 0)) == b"\0"
    connection = broker.session(b"s").peer
    assert connection._parts_bytes == 0  # type: ignore[attr-defined]
    assert connection.transport.get_write_buffer_size() < 2 << 20  # type: ignore[attr-defined]
    assert len(await subscriber.publishes(300)) == 300
    await subscriber.quiet()


async def test_a_publisher_is_read_no_faster_than_the_store_commits() -> None:
    async with running(commit_bytes_max=1 << 20) as broker:
        await broker.sleeper(b"s", b"a")
        publisher = await broker.connect(b"p", clean=True)
        gate = broker.store.hang_submit()
        for _ in range(200):
            publisher.publish(b"a", bytes(100_000))
        await gate.reached.wait()
        peer = broker.session(b"p").peer
        await broker.turns(lambda: peer._paused)  # type: ignore[attr-defined]
        assert broker.hub.committer.waiting_bytes < 2 << 20
        gate.release()
        for _ in range(200):
            await publisher.next(Puback)


@pytest.mark.case("HK-20")
async def test_a_transient_session_s_full_queue_drops_the_newest_and_counts_it() -> None:
    async with running(max_inflight=2, max_queued_messages=3) as broker:
        subscriber = await broker.connect(b"s", clean=True)
        await subscriber.subscribe((b"a", 1))
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", *(b"%d" % n for n in range(10)))
        assert broker.hub.figures.dropped_queue == 5
        assert await subscriber.payloads(5) == [b"0", b"1", b"2", b"3", b"4"]
        await subscriber.quiet()
        await publisher.deliver(b"a", b"10")
        assert await subscriber.payloads(1) == [b"10"]


@pytest.mark.case("HK-20")
async def test_a_transient_session_s_queue_is_bounded_in_bytes_too() -> None:
    async with running(max_inflight=1, max_queued_bytes=1000) as broker:
        subscriber = await broker.connect(b"s", clean=True)
        await subscriber.subscribe((b"a", 1))
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", *[bytes(600)] * 5)
        assert broker.hub.figures.dropped_queue == 2
        assert len(await subscriber.publishes(3)) == 3


@pytest.mark.case("HK-20")
async def test_a_durable_session_s_queue_is_the_history_and_drops_nothing() -> None:
    async with running(max_inflight=2, max_queued_messages=3) as broker:
        subscriber = await broker.subscriber(b"s", b"a")
        publisher = await broker.connect(b"p", clean=True)
        payloads = [b"%d" % n for n in range(1000)]
        await publisher.deliver(b"a", *payloads)
        assert broker.hub.figures.dropped_queue == 0
        assert await subscriber.payloads(1000) == payloads


async def test_a_session_at_rest_costs_no_memory() -> None:
    async with running() as broker:
        for n in range(20):
            await broker.sleeper(b"warm%d" % n, b"a/+")
        before = len(broker.hub.router._places.match(b"a/b"))
        for n in range(200):
            await broker.sleeper(b"s%d" % n, b"a/+")
        assert len(broker.hub.router._places.match(b"a/b")) == before
        assert broker.hub.registry.owners == {}
        assert broker.hub.connections == set()
        gc.collect()
        left = [o for o in gc.get_objects() if type(o) is DurableSession and o.hub is broker.hub]
        assert len(left) <= 1  # the last one may still be in a frame


async def test_topics_that_are_invented_for_each_message_are_forgotten(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker_ext.router.ROUTES_MAX", 100)
    monkeypatch.setattr(broker.hub.names, "_names_max", 100)
    await broker.sleeper(b"s", b"never")
    publisher = await broker.connect(b"p", clean=True)
    publisher.send(*(Publish(0, b"t/%d" % n, 0, b"") for n in range(1000)))
    await publisher.quiet()
    assert len(broker.hub.router._routes) <= 100
    assert len(broker.hub.names.known) <= 100


# ----------------------------------------------------------------------------- the clock


async def silence(client: Client, *, ms: int, times: int = 1) -> None:
    for _ in range(times):
        client.broker.clock.advance(ms=ms)
        client.broker.hub._look_for_silence()


async def test_a_client_that_is_silent_for_one_and_a_half_keep_alives_is_closed(
    broker: Broker,
) -> None:
    client = await broker.connect(b"c", keep_alive=10)
    await silence(client, ms=500)
    await silence(client, ms=500, times=29)
    await client.quiet()
    await silence(client, ms=500)
    await silence(client, ms=500, times=29)
    await client.quiet()
    await silence(client, ms=500)
    await silence(client, ms=500, times=31)
    await client.closed()
    assert broker.ends == [(b"c", "keep alive")]


@pytest.mark.case("HK-13")
@pytest.mark.parametrize("ms", [YEAR_MS, -YEAR_MS])
async def test_a_jump_of_the_wall_clock_cuts_nobody_off_and_redelivers_nothing(
    ms: int,
) -> None:
    async with running(session_expiry_interval_s=3600) as broker:
        client = await broker.subscriber(b"c", b"a", keep_alive=10)
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", b"1")
        (packet,) = await client.publishes(1, ack=False)
        await silence(client, ms=500)
        broker.clock.jump(ms=ms)
        await silence(client, ms=500)
        await broker.hub._expire()
        await client.quiet()  # not cut off, and not sent again
        client.send(Puback(packet.packet_id))
        await client.quiet()
        assert await broker.unsettled(b"c") == []
        await silence(client, ms=500)
        await silence(client, ms=500, times=31)
        await client.closed()  # and silence is still noticed
        await client.gone()
        again = await broker.connect(b"c")
        assert again.connack.session_present


@pytest.mark.case("HK-13")
async def test_a_wall_clock_set_back_over_a_restart_expires_nothing_early() -> None:
    async with running(session_expiry_interval_s=3600) as broker:
        await broker.sleeper(b"c", b"a")
        broker.clock.jump(ms=-YEAR_MS)
        await broker.restart()
        await broker.hub._expire()
        again = await broker.connect(b"c")
        assert again.connack.session_present


@pytest.mark.case("HK-13")
async def test_a_wall_clock_set_back_over_a_restart_does_not_stop_expiry(disk: Backend) -> None:
    async with running(disk, session_expiry_interval_s=3600) as broker:
        await broker.sleeper(b"c", b"a")
        await broker.connect(b"here when it stops")
        broker.clock.jump(ms=-YEAR_MS)
        await broker.restart(session_expiry_interval_s=3600)
        broker.clock.advance(ms=3_590_000)
        await broker.hub._expire()
        assert await broker.snapshot(b"c") is not None
        broker.clock.advance(ms=20_000)
        await broker.hub._expire()
        assert await broker.snapshot(b"c") is None
        assert await broker.snapshot(b"here when it stops") is None


async def test_no_keep_alive_means_no_limit(broker: Broker) -> None:
    client = await broker.connect(b"c")
    await silence(client, ms=YEAR_MS, times=3)
    await client.quiet()


async def test_a_connect_that_never_comes_is_not_waited_for(broker: Broker) -> None:
    silent = await broker.dial()
    dribbling = await broker.dial()
    dribbling.send_bytes(b"\x10")
    half = dribbling.connect_packet(b"x" * 100)
    assert half.client_id
    await broker.turns(lambda: len(broker.hub.connections) == 2)
    for _ in range(30):
        await silence(silent, ms=500)
        dribbling.send_bytes(b"\x70" if broker.clock.monotonic() < 1 else b"")
    await silent.closed()
    await dribbling.closed()
    assert broker.hub.figures.connects == 0


@pytest.mark.case("HK-14")
@pytest.mark.case("HK-15")
@pytest.mark.parametrize("restart", [False, True])
async def test_an_expired_session_is_gone_with_everything_it_had(
    disk: Backend, restart: bool
) -> None:
    async with running(disk, session_expiry_interval_s=60) as broker:
        client = await broker.subscriber(b"c", (b"a", 2))
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", b"1", b"2")
        await client.publishes(2, ack=False)
        client.publish(b"x", b"", 2, packet_id=3)
        await client.until_ping()
        await client.cut()
        broker.clock.advance(ms=59_000)
        await broker.hub._expire()
        assert await broker.snapshot(b"c") is not None
        if restart:
            await broker.restart(session_expiry_interval_s=60)
        broker.clock.advance(ms=2000)
        await broker.hub._expire()
        assert await broker.snapshot(b"c") is None
        assert broker.hub.figures.expired == 1
        assert broker.hub.router._places.size == 0
        publisher = await broker.connect(b"p2", clean=True)
        await publisher.deliver(b"a", b"3")
        client = await broker.connect(b"c")
        assert not client.connack.session_present
        await client.quiet()


@pytest.mark.case("HK-15")
async def test_a_connected_session_does_not_expire() -> None:
    async with running(session_expiry_interval_s=60) as broker:
        client = await broker.subscriber(b"c", b"a")
        broker.clock.advance(ms=1_000_000)
        await broker.hub._expire()
        await client.quiet()
        assert await broker.snapshot(b"c") is not None


@pytest.mark.case("HK-08")
async def test_a_subscriber_that_never_acknowledges_is_sent_each_message_once(
    broker: Broker,
) -> None:
    client = await broker.subscriber(b"c", (b"a", 2))
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", b"1")
    await publisher.deliver(b"a", b"2", qos=2)
    await client.publishes(2, ack=False)
    for _ in range(20):
        broker.clock.advance(ms=3_600_000)
        broker.hub._checkpoint()
        await broker.hub._prune()
        await broker.hub._expire()
        await client.quiet()
    assert len(await broker.unsettled(b"c")) == 2


# ---------------------------------------------------------------------------- retention


async def test_history_that_a_connected_session_has_settled_is_pruned(disk: Backend) -> None:
    """Message by message, each settled before the next: no batch ever has a lagging cursor."""
    async with running(disk) as broker:
        client = await broker.subscriber(b"c", b"a")
        publisher = await broker.connect(b"p", clean=True)
        for _ in range(5):
            await publisher.deliver(b"a", bytes(300_000))  # a block each
            await client.publishes(1)
            await client.quiet()
            await broker.hub.committer.drain()
        broker.clock.advance(ms=10_000)
        broker.hub._checkpoint()
        await broker.hub.committer.drain()
        await broker.hub._prune()
        assert broker.hub.figures.pruned_blocks == 5
        await client.quiet()
        await client.cut()
        again = await broker.connect(b"c")
        assert again.connack.session_present
        await again.quiet()


async def test_the_timer_saves_positions_of_some_sessions_at_a_time(
    disk: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "CHECKPOINT_SESSIONS_MAX", 2)
    async with running(disk, checkpoint_interval_s=0.05) as broker:
        clients = [await broker.subscriber(b"c%d" % n, b"a") for n in range(5)]
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", b"1")
        for client in clients:
            await client.publishes(1)
            await client.quiet()
        await broker.hub.committer.drain()
        before = len(broker.store.batches)
        await broker.hub._checkpoint_in_turns()
        await broker.hub.committer.drain()
        checkpoints = [
            sum(isinstance(op, Advance) and op.checkpoint for op in batch.ops)
            for batch in broker.store.batches[before:]
        ]
        assert sum(checkpoints) >= 5
        assert max(checkpoints) <= 2


async def test_history_that_a_sleeping_session_needs_is_kept(disk: Backend) -> None:
    async with running(disk) as broker:
        await broker.sleeper(b"c", b"a")
        client = await broker.subscriber(b"online", b"a")
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", *[bytes(300_000)] * 5)
        await client.publishes(5)
        await client.quiet()
        broker.clock.advance(ms=10_000)
        broker.hub._checkpoint()
        await broker.hub.committer.drain()
        await broker.hub._prune()
        assert broker.hub.figures.pruned_blocks == 0
        again = await broker.connect(b"c")
        assert len(await again.publishes(5)) == 5


async def test_a_session_that_lags_for_ever_holds_only_what_it_has_not_settled(
    disk: Backend,
) -> None:
    async with running(disk, max_inflight=1) as broker:
        client = await broker.subscriber(b"c", b"a")
        publisher = await broker.connect(b"p", clean=True)
        await publisher.deliver(b"a", *[bytes(300_000)] * 20)
        await client.publishes(6)
        await client.any()  # the seventh is under way
        await broker.hub.committer.drain()
        assert not broker.session(b"c").backlog.live
        broker.clock.advance(ms=10_000)
        broker.hub._checkpoint()
        await broker.hub.committer.drain()
        await broker.hub._prune()
        assert 5 <= broker.hub.figures.pruned_blocks <= 6


async def test_what_is_done_by_the_clock_goes_on_beside_traffic() -> None:
    def prepare(broker: Broker) -> None:
        broker.timers = True

    async with running(
        prepare=prepare, checkpoint_interval_s=0.01, prune_interval_s=0.01
    ) as broker:
        client = await broker.subscriber(b"c", b"a")
        publisher = await broker.connect(b"p", clean=True)
        for n in range(30):
            await publisher.deliver(b"a", b"%d" % n)
            assert await client.payloads(1) == [b"%d" % n]
            broker.clock.advance(ms=10)
        await broker.turns(lambda: broker.hub.figures.pruned_blocks)
        await client.quiet()

"""P7: one owner, and the line of CONNECTs. P3: fences. P14: whose session it is."""

from __future__ import annotations

import asyncio
import errno
import gc
from typing import TYPE_CHECKING, Any

import pytest

from broker_ext.wire import (
    Connack,
    Puback,
    Publish,
    Pubrel,
    Suback,
    Subscribe,
    SubscribeFilter,
)
from storage import api
from storage.api import UNCLAIMED, Acquire, Detach
from storage.errors import StoreUnavailable
from tests.broker.mqtt import running, will

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker, Client

UNAVAILABLE, NOT_AUTHORIZED, ID_REJECTED = 3, 5, 2


# ------------------------------------------------------------------------------ the line


@pytest.mark.parametrize("clean", [False, True])
async def test_the_newest_connection_owns_the_client_id(broker: Broker, clean: bool) -> None:
    older = await broker.connect(b"c", clean=clean)
    await older.quiet()  # it is there, as far as the broker can know
    newer = await broker.connect(b"c", clean=clean)
    assert newer.connack.session_present is not clean
    await older.closed()
    await newer.quiet()
    assert list(broker.hub.registry.owners) == [b"c"]
    assert broker.ends == [(b"c", "taken over")]


async def test_an_older_connection_that_its_client_has_reset_is_taken_over(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel knows that it is gone; our loop has not been told yet."""

    def reset() -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    older = await broker.connect(b"c", version=5, expiry=60)
    await older.quiet()
    peer: Any = broker.session(b"c").peer
    monkeypatch.setattr(peer.transport, "write_eof", reset)
    newer = await broker.connect(b"c", version=5)
    assert newer.connack.session_present
    await older.closed()
    await newer.quiet()


async def test_a_takeover_saves_the_acknowledgements_of_its_own_turn(broker: Broker) -> None:
    older = await broker.subscriber(b"c", b"#")
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", b"1", b"2")
    first, second = await older.publishes(2, ack=False)
    older.send(Puback(second.packet_id))
    await older.quiet()
    newer = await broker.connect(b"c")
    (again,) = await newer.publishes(1, ack=False)
    assert (again.payload, again.packet_id, again.dup) == (b"1", first.packet_id, True)
    await newer.quiet()


async def test_a_takeover_waits_for_the_last_write_of_the_older(broker: Broker) -> None:
    older = await broker.subscriber(b"c", b"#")
    publisher = await broker.connect(b"p", clean=True)
    gate = broker.store.hang_submit()
    publisher.publish(b"a", b"1")
    await gate.reached.wait()
    newer = await broker.dial()
    newer.send(newer.connect_packet(b"c"))
    await older.closed()
    gate.release()
    assert (await newer.next(Connack)).session_present
    assert await newer.payloads(1) == [b"1"]


async def test_a_thousand_connects_for_one_id_end_with_one_owner() -> None:
    async with running(takeover_timeout_s=60, max_connects_per_second=1e6) as broker:
        clients = [await broker.dial() for _ in range(1000)]
        for n, client in enumerate(clients):
            client.send(client.connect_packet(b"c", clean=n % 7 == 3))
            client.send(Subscribe(1, (SubscribeFilter(b"a/%d" % (n % 5), 1),)))
        winners = []

        async def fate(client: Client) -> None:
            assert (await client.next(Connack)).reason == 0
            await client.next(Suback)
            winners.append(client)

        tasks = [asyncio.ensure_future(fate(client)) for client in clients]
        await asyncio.gather(*tasks, return_exceptions=True)
        owner = broker.session(b"c")
        assert len(broker.hub.registry.owners) == 1
        assert broker.hub.registry._lines == {}
        assert len(broker.hub.connections) == 1
        assert owner.peer in broker.hub.connections
        assert len(await broker.store.consumers()) == 1
        snapshot = await broker.snapshot(b"c")
        assert snapshot is not None
        assert snapshot.consumer.incarnation == owner.incarnation
        assert dict.fromkeys(owner.subscriptions) == dict.fromkeys(
            s.filter for s in snapshot.subscriptions
        )
        for topic_filter in owner.subscriptions:
            place = broker.hub.router._places.find(topic_filter)
            assert place is not None
            assert place.durable == 1
        assert broker.hub.router._places.size == len(owner.subscriptions)
        await winners[-1].quiet()


async def test_one_that_gave_up_keeps_its_place_until_its_predecessor_is_done() -> None:
    async with running(takeover_timeout_s=0.2) as broker:
        line = broker.hub.registry._lines
        gate = broker.store.hang_submit()
        clients = [await broker.dial() for _ in range(4)]
        for client in clients:
            client.send(client.connect_packet(b"c"))
        await gate.reached.wait()
        for client in clients:  # the first one, whose Acquire hangs, does not wait longer either
            assert (await client.next(Connack)).reason == UNAVAILABLE
            await client.closed()
        assert line, "the first one is still loading"
        last = await broker.dial()
        foremost = line[b"c"]
        last.send(last.connect_packet(b"c"))
        await broker.turns(lambda: line[b"c"] is not foremost)
        assert len(broker.store.batches) == 1, "nobody passes it"
        gate.release()
        assert (await last.next(Connack)).reason == 0
        await last.quiet()
        assert line == {}


@pytest.mark.parametrize("clean", [False, True])
async def test_one_whose_client_left_while_it_waited_takes_nothing_over(
    broker: Broker, clean: bool
) -> None:
    gate = broker.store.hang_submit()
    first = await broker.dial()
    first.send(first.connect_packet(b"c"))
    await gate.reached.wait()
    waiting = await broker.dial()
    waiting.send(waiting.connect_packet(b"c", clean=clean, will=will(b"w")))
    line = broker.hub.registry._lines
    foremost = line[b"c"]
    await broker.turns(lambda: line[b"c"] is not foremost)
    await waiting.cut()
    gate.release()
    assert (await first.next(Connack)).reason == 0
    await first.quiet()
    await broker.turns(lambda: not line)
    assert broker.session(b"c").peer in broker.hub.connections
    assert [type(op) for batch in broker.store.batches for op in batch.ops] == [Acquire]


async def test_a_client_that_leaves_while_its_session_is_loaded_leaves_it_as_it_was(
    broker: Broker,
) -> None:
    await broker.sleeper(b"c", b"#")
    gate = broker.store.hang_submit()
    client = await broker.dial()
    client.send(client.connect_packet(b"c", will=will(b"w")))
    await gate.reached.wait()
    await client.cut()
    gate.release()
    await broker.turns(lambda: not broker.hub.registry._lines)
    assert broker.hub.registry.owners == {}
    snapshot = await broker.snapshot(b"c")
    assert snapshot is not None
    assert snapshot.consumer.detached_ms
    assert [s.filter for s in snapshot.subscriptions] == [b"#"]
    assert await broker.history() == []
    await broker.restart()
    assert broker.hub.opened.wills == ()


async def test_packets_behind_a_connect_wait_for_it_and_are_handled_in_order(
    broker: Broker,
) -> None:
    broker.authenticating = asyncio.Event()
    client = await broker.dial()
    client.send(
        client.connect_packet(b"c"),
        Subscribe(1, (SubscribeFilter(b"a", 1),)),
        Publish(2, b"a", 2, b"x"),
        Publish(4, b"b", 3, b"y"),
        Pubrel(9),
    )
    await asyncio.sleep(0)
    broker.authenticating.set()
    await client.next(Connack)
    kinds = [type(await client.any()).__name__ for _ in range(2)]
    assert kinds[0] == "Suback" or kinds[1] == "Suback"
    got = {type(await client.any()).__name__ for _ in range(3)}
    assert got | set(kinds) == {"Suback", "Puback", "Pubrec", "Pubcomp", "Publish"}


async def test_a_clean_start_deletes_what_was_stored_before_it_is_answered(
    broker: Broker,
) -> None:
    await broker.sleeper(b"c", b"a", b"b")
    gate = broker.store.hang_submit()
    client = await broker.dial()
    client.send(client.connect_packet(b"c", clean=True))
    await gate.reached.wait()
    gate.release()
    assert not (await client.next(Connack)).session_present
    assert await broker.snapshot(b"c") is None
    assert broker.hub.router._places.size == 0
    await client.deliver(b"a", b"1")
    assert await broker.history() == []
    await client.disconnect()
    again = await broker.connect(b"c")
    assert not again.connack.session_present


@pytest.mark.parametrize("clean", [False, True])
async def test_a_connect_that_cannot_be_stored_is_refused_and_changes_nothing(
    broker: Broker, clean: bool, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.sleeper(b"c", b"a")
    before = await broker.snapshot(b"c")
    broker.store.fail_submit(StoreUnavailable("I/O error"))
    client = await broker.dial()
    answer = await client.connect(b"c", clean=clean, will=will(b"w"))
    assert (answer.reason, answer.session_present) == (UNAVAILABLE, False)
    await client.closed()
    assert await broker.snapshot(b"c") == before
    assert await broker.history() == []
    again = await broker.connect(b"c")
    assert again.connack.session_present
    gc.collect()  # a future whose error nobody looked at tells so when it is collected
    assert not [r for r in caplog.records if r.name == "asyncio"]


async def test_a_connect_while_the_store_cannot_be_read_is_refused(broker: Broker) -> None:
    await broker.sleeper(b"c", b"a")
    broker.store.fail_read(StoreUnavailable("I/O error"))
    client = await broker.dial()
    assert (await client.connect(b"c", clean=True)).reason == UNAVAILABLE
    again = await broker.connect(b"c")
    assert again.connack.session_present


async def test_a_stop_while_connects_are_under_way_leaves_no_task(broker: Broker) -> None:
    gate = broker.store.hang_submit()
    clients = [await broker.dial() for _ in range(3)]
    for client in clients:
        client.send(client.connect_packet(b"c"))
    await gate.reached.wait()
    stopping = asyncio.ensure_future(broker.stop())
    await asyncio.sleep(0)
    gate.release()
    await stopping
    await broker.start()


# -------------------------------------------------------------------------------- fences


@pytest.mark.case("HK-18")
@pytest.mark.parametrize("late", ["save", "settle", "subscribe", "unsubscribe", "detach"])
async def test_a_late_write_of_an_older_incarnation_changes_nothing(
    broker: Broker, late: str
) -> None:
    older = await broker.subscriber(b"c", b"a")
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", b"1")
    await older.publishes(1, ack=False)
    session = broker.session(b"c")
    newer = await broker.connect(b"c")
    await newer.publishes(1, ack=False)
    before = await broker.snapshot(b"c")
    # a hand that is faster than the seal: as if the session had not been told
    session.sealed = False
    if late == "save":
        session._remember(9)
    elif late == "settle":
        session.puback(1)
    elif late == "subscribe":
        from broker_ext.session import Grant  # noqa: PLC0415

        assert await session.subscribe([Grant(b"b", 1)]) == [0x80]
    elif late == "unsubscribe":
        assert await session.unsubscribe([b"a"]) == [0x80]
    else:
        session.committer.submit(
            Detach(session.consumer_id, session.incarnation, 1), session._written
        )
    await broker.hub.committer.drain()
    session.sealed = True
    assert await broker.snapshot(b"c") == before
    assert broker.hub.figures.fenced == 1
    await publisher.deliver(b"b", b"2")
    assert await broker.history() == [b"1"]
    await newer.quiet()


async def test_a_session_whose_write_is_fenced_is_closed_and_acknowledges_nothing(
    broker: Broker,
) -> None:
    client = await broker.subscriber(b"c", b"a")
    await broker.hub.committer.apply(Acquire(b"c", b"Z" * 16, b"", 0))
    client.publish(b"a", b"1", 2)
    await client.closed()
    assert not client._packets
    assert broker.hub.figures.fenced


async def test_a_session_that_ended_saves_nothing_more(broker: Broker) -> None:
    """A SUBSCRIBE that still waits for a topic plugin when its client leaves."""
    broker.slow_filters[b"slow"] = asyncio.Event()
    client = await broker.connect(b"c")
    client.send(Subscribe(1, (SubscribeFilter(b"slow", 1),)))
    await client.quiet()
    await client.cut()
    before = len(broker.store.batches)
    broker.slow_filters[b"slow"].set()
    again = await broker.connect(b"c")
    await again.quiet()
    ops = [op for batch in broker.store.batches[before:] for op in batch.ops]
    assert [type(op).__name__ for op in ops] in (["Acquire"], ["Detach", "Acquire"])
    snapshot = await broker.snapshot(b"c")
    assert snapshot is not None
    assert snapshot.subscriptions == ()


# ------------------------------------------------------------------------------- owners


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("clean", [False, True])
async def test_another_user_who_presents_a_client_id_is_refused_and_changes_nothing(
    broker: Broker, online: bool, clean: bool
) -> None:
    owner = await broker.subscriber(b"c", b"a", user=b"alice", will=will(b"w"))
    if not online:
        await broker.crash_and_restart()
    before = await broker.snapshot(b"c")
    thief = await broker.dial()
    answer = await thief.connect(b"c", user=b"mallory", clean=clean, will=will(b"w", b"mine"))
    assert answer.reason == NOT_AUTHORIZED
    await thief.closed()
    assert await broker.snapshot(b"c") == before
    if online:
        await owner.quiet()
    else:
        broker.hub.wills.publish_orphans()  # hers is still there
        listener = await broker.connect(b"l", user=b"alice")
        assert broker.hub.figures.wills == 1
        await listener.quiet()
    again = await broker.connect(b"c", user=b"alice")
    assert again.connack.session_present


async def test_a_client_that_is_not_authorized_is_told_so(broker: Broker) -> None:
    client = await broker.dial()
    assert (await client.connect(b"c", user=b"nobody")).reason == NOT_AUTHORIZED
    await client.closed()
    assert await broker.snapshot(b"c") is None


@pytest.mark.parametrize("clean", [False, True])
async def test_a_record_that_nobody_has_claimed_yet_is_its_first_client_s(
    broker: Broker, clean: bool
) -> None:
    await broker.hub.committer.apply(Acquire(b"c", b"Z" * 16, UNCLAIMED, 0))
    await broker.hub.committer.apply(api.Subscribe(1, b"Z" * 16, (api.Subscription(b"a", 0, 0),)))
    client = await broker.connect(b"c", user=b"alice", clean=clean)
    assert client.connack.session_present is not clean


async def test_an_empty_client_id_is_for_clean_sessions_only(broker: Broker) -> None:
    client = await broker.dial()
    assert (await client.connect(b"")).reason == ID_REJECTED
    await client.closed()
    first = await broker.connect(b"", clean=True)
    second = await broker.connect(b"", clean=True)
    await first.quiet()
    await second.quiet()
    assert len(broker.hub.registry.owners) == 2


async def test_a_client_id_has_a_maximum() -> None:
    async with running(max_client_id_bytes=30) as broker:
        longest = await broker.connect("\N{CRAB}/ x".encode() * 4 + b"12")
        assert longest.connack.reason == 0
        client = await broker.dial()
        assert (await client.connect(b"x" * 31)).reason == ID_REJECTED
        await client.closed()


async def test_client_ids_that_look_alike_are_different_sessions(broker: Broker) -> None:
    names = [b"a", b"A", b"a ", "\u00e9".encode(), "e\u0301".encode(), b"a/b", b"x" * 1024]
    for name in names:
        assert not (await broker.connect(name)).connack.session_present
    assert len(await broker.store.consumers()) == len(names)

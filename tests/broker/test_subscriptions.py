"""P8: subscription changes apply one at a time, are saved before they are granted, or undone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from broker_ext.replay import Replay
from broker_ext.wire import (
    Puback,
    Publish,
    Suback,
    Subscribe,
    SubscribeFilter,
    Unsuback,
    Unsubscribe,
    encode,
)
from storage.errors import ResumeHistoryUnavailable, StoreFull
from tests.broker.mqtt import running

if TYPE_CHECKING:
    from tests.broker.mqtt import Broker
    from tests.storage.harness import Backend


async def stored(broker: Broker, client_id: bytes) -> dict[bytes, int]:
    snapshot = await broker.snapshot(client_id)
    assert snapshot is not None
    return {sub.filter: sub.qos for sub in snapshot.subscriptions}


def counted(broker: Broker, *filters: bytes) -> list[int]:
    """How many durable consumers the router counts for each filter."""
    places = [broker.hub.router._places.find(topic_filter) for topic_filter in filters]
    return [place.durable if place is not None else 0 for place in places]


# ----------------------------------------------------------------------- saved, or undone


async def test_a_suback_waits_for_the_commit(broker: Broker) -> None:
    client = await broker.connect(b"c")
    gate = broker.store.hang_submit()
    client.send(Subscribe(1, (SubscribeFilter(b"a", 2),)))
    await gate.reached.wait()
    await client.quiet()
    gate.release()
    assert (await client.next(Suback)).reasons == b"\x02"
    assert await stored(broker, b"c") == {b"a": 2}


async def test_a_subscribe_that_cannot_be_saved_is_refused_and_changes_nothing(
    broker: Broker,
) -> None:
    client = await broker.subscriber(b"c", (b"kept", 1), (b"passing", 0))
    broker.store.fail_submit(StoreFull("no space"))
    assert await client.subscribe((b"new", 1), (b"kept", 0), (b"passing", 2)) == b"\x80" * 3
    assert await stored(broker, b"c") == {b"kept": 1, b"passing": 0}
    assert counted(broker, b"new", b"kept", b"passing") == [0, 1, 0]
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"new", b"1")
    await publisher.deliver(b"passing", b"2")
    await publisher.deliver(b"kept", b"3")
    packets = await client.publishes(2)
    assert [(p.payload, p.qos) for p in packets] == [(b"2", 0), (b"3", 1)]
    assert await client.subscribe((b"new", 1)) == b"\x01"
    await publisher.deliver(b"new", b"4")
    assert await client.payloads(1) == [b"4"]


async def test_messages_that_come_while_a_refused_subscribe_was_under_way_are_delivered(
    broker: Broker,
) -> None:
    client = await broker.subscriber(b"c", b"kept")
    publisher = await broker.connect(b"p", clean=True)
    gate = broker.store.hang_submit()
    client.send(Subscribe(1, (SubscribeFilter(b"new", 1),)))
    await gate.reached.wait()
    publisher.publish(b"kept", b"1")
    publisher.publish(b"new", b"2")
    await publisher.quiet()
    gate.release(StoreFull("no space"))
    assert (await client.next(Suback)).reasons == b"\x80"
    assert await client.payloads(1) == [b"1"]
    await client.quiet()


async def test_each_filter_of_a_packet_answers_for_itself(broker: Broker) -> None:
    client = await broker.connect(b"c")
    codes = await client.subscribe(
        (b"a", 2), (b"a/#/b", 1), (b"forbidden/x", 1), (b"$share/g+/a", 1), (b"a", 0), (b"b+", 0)
    )
    assert codes == b"\x02\x80\x80\x80\x00\x80"
    assert await stored(broker, b"c") == {b"a": 0}  # the last one holds
    assert counted(broker, b"a") == [0]


async def test_an_unsuback_waits_for_the_commit_and_is_not_sent_if_it_fails(
    broker: Broker,
) -> None:
    client = await broker.subscriber(b"c", b"a", b"b")
    gate = broker.store.hang_submit()
    client.send(Unsubscribe(9, (b"a", b"never", b"a")))
    await gate.reached.wait()
    await client.quiet()
    gate.release()
    await client.next(Unsuback)
    assert await stored(broker, b"c") == {b"b": 1}
    assert counted(broker, b"a", b"b") == [0, 1]

    broker.store.fail_submit(StoreFull("no space"))
    client.send(Unsubscribe(10, (b"b",)))
    await client.closed()  # MQTT 3.1.1 has no other way to say no
    assert not client._packets
    assert await stored(broker, b"c") == {b"b": 1}
    assert counted(broker, b"b") == [1]
    again = await broker.connect(b"c")
    await again.unsubscribe(b"b")
    assert await stored(broker, b"c") == {}
    assert counted(broker, b"b") == [0]
    assert broker.hub.router._places.size == 0


async def test_a_topic_that_was_unsubscribed_is_not_logged_any_more(broker: Broker) -> None:
    client = await broker.subscriber(b"c", b"a")
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", b"1")
    (first,) = await client.publishes(1, ack=False)
    await client.unsubscribe(b"a")
    await publisher.deliver(b"a", b"2")
    await client.quiet()
    assert await broker.history() == [b"1"]
    client.send(Puback(first.packet_id))
    await client.quiet()
    assert await broker.unsettled(b"c") == []


# -------------------------------------------------------------------------------- in order


async def test_changes_of_one_session_apply_in_order_however_slow_the_topic_plugins_are(
    broker: Broker,
) -> None:
    broker.slow_filters[b"slow"] = asyncio.Event()
    client = await broker.connect(b"c")
    client.send(
        Subscribe(1, (SubscribeFilter(b"slow", 1), SubscribeFilter(b"a", 1))),
        Unsubscribe(2, (b"a",)),
        Subscribe(3, (SubscribeFilter(b"a", 2),)),
        Publish(2, b"a", 4, b"x"),
    )
    await client.quiet()
    broker.slow_filters[b"slow"].set()
    assert (await client.next(Suback)).packet_id == 1
    assert (await client.next(Unsuback)).packet_id == 2
    assert (await client.next(Suback)).packet_id == 3
    got = {type(await client.any()), type(await client.any())}
    assert got == {Puback, Publish}
    assert await stored(broker, b"c") == {b"slow": 1, b"a": 2}


@pytest.mark.parametrize("clean", [False, True])
async def test_a_publish_behind_a_subscribe_in_one_chunk_is_delivered(
    broker: Broker, clean: bool
) -> None:
    client = await broker.connect(b"c", clean=clean)
    client.send(Subscribe(1, (SubscribeFilter(b"a", 1),)), Publish(0, b"a", 0, b"x"))
    await client.next(Suback)
    assert await client.payloads(1) == [b"x"]


@pytest.mark.parametrize("version", [4, 5])
async def test_a_subscription_in_memory_is_in_force_as_soon_as_it_is_read(
    broker: Broker, version: int
) -> None:
    """Two clients' bytes arrive in one turn of the loop: the message was sent after it."""
    subscriber = await broker.connect(b"s", version=version, clean=True)
    publisher = await broker.connect(b"p", version=version, clean=True)
    of = {c.session.client_id: c for c in broker.hub.connections if c.session is not None}
    of[b"s"].data_received(encode(Subscribe(1, (SubscribeFilter(b"a", 0),)), version))
    of[b"p"].data_received(encode(Publish(0, b"a", 0, b"x"), version))
    assert (await subscriber.next(Suback)).reasons == b"\0"
    assert (await subscriber.next(Publish)).payload == b"x"
    await publisher.quiet()


async def test_what_follows_a_malformed_packet_is_not_read_and_what_precedes_it_is_done(
    broker: Broker,
) -> None:
    await broker.sleeper(b"s", b"#")
    client = await broker.connect(b"c")
    gate = broker.store.hang_submit()
    client.send(Subscribe(1, (SubscribeFilter(b"a", 1),)), Publish(2, b"a", 2, b"before"))
    client.send_bytes(b"\x36\x05\x00\x01a\x00\x03")  # QoS 3
    client.publish(b"a", b"after")
    await gate.reached.wait()
    gate.release()
    await client.closed()
    assert [type(p) for p in client._packets][:1] == [Suback]
    assert await broker.history() == [b"before"]
    assert await stored(broker, b"c") == {b"a": 1}
    assert broker.hub.figures.malformed == 1


# ------------------------------------------------------------------- nothing lost, nothing twice


@pytest.mark.parametrize("qos", [1, 2])
async def test_subscribing_again_while_messages_flow_loses_nothing_and_repeats_nothing(
    broker: Broker, qos: int
) -> None:
    client = await broker.subscriber(b"c", (b"a", 1))
    publisher = await broker.connect(b"p", clean=True)
    expected: list[bytes] = []
    got: list[bytes] = []
    for round_ in range(5):
        for n in range(20):
            expected.append(b"%d-%d" % (round_, n))
            publisher.publish(b"a", expected[-1], 1)
        client.send(Subscribe(round_ + 1, (SubscribeFilter(b"a", qos),)))
        while len(got) < len(expected):
            packet = await client.any()
            if type(packet) is Publish:
                got.append(packet.payload)
                client.send(Puback(packet.packet_id))
    assert got == expected
    assert all(type(p) is Suback for p in await client.until_ping())
    assert await broker.unsettled(b"c") == []
    again = await broker.connect(b"c")
    await again.quiet()


async def test_subscribing_again_during_a_replay_loses_nothing_and_repeats_nothing(
    broker: Broker,
) -> None:
    await broker.stop()
    await broker.start(max_inflight=10)
    await broker.sleeper(b"c", b"a")
    publisher = await broker.connect(b"p", clean=True)
    payloads = [b"%d" % n for n in range(1000)]
    await publisher.deliver(b"a", *payloads)
    client = await broker.connect(b"c")
    got = await client.payloads(100)
    client.send(Subscribe(1, (SubscribeFilter(b"a", 1), SubscribeFilter(b"new", 1))))
    while len(got) < 1000:
        packet = await client.any()
        if type(packet) is Publish:
            got.append(packet.payload)
            client.send(Puback(packet.packet_id))
    assert got == payloads
    await client.until_ping()
    await publisher.deliver(b"new", b"n")
    assert await client.payloads(1) == [b"n"]


async def test_a_new_filter_gets_nothing_from_before_it_was_subscribed(broker: Broker) -> None:
    await broker.sleeper(b"other", b"b")
    await broker.sleeper(b"c", b"a")
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"b", b"old")
    await publisher.deliver(b"a", b"1")
    client = await broker.dial()
    client.send(client.connect_packet(b"c"), Subscribe(1, (SubscribeFilter(b"b", 1),)))
    await client.any()
    packets = [await client.any() for _ in range(2)]
    assert [p.payload for p in packets if type(p) is Publish] == [b"1"]
    await publisher.deliver(b"b", b"new")
    (packet,) = await client.publishes(1)
    assert packet.payload == b"new"
    await client.quiet()


async def test_a_filter_that_was_removed_and_added_again_starts_anew(broker: Broker) -> None:
    await broker.sleeper(b"c", b"a", b"b")
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a", b"1")
    await publisher.deliver(b"b", b"2")
    client = await broker.dial()
    client.send(
        client.connect_packet(b"c"),
        Unsubscribe(1, (b"a",)),
        Subscribe(2, (SubscribeFilter(b"a", 1),)),
    )
    await broker.turns(lambda: b"c" in broker.hub.registry.owners)
    await broker.hub.committer.drain()
    await publisher.deliver(b"a", b"3")
    await broker.turns(lambda: len(broker.session(b"c").out.flights) >= 2)
    got = [p.payload for p in await client.until_ping() if type(p) is Publish]
    assert b"2" in got
    assert b"3" in got  # and b"1" may have been under way already
    assert len(set(got)) == len(got)


async def test_qos_0_subscriptions_are_part_of_the_session(broker: Broker) -> None:
    client = await broker.subscriber(b"c", (b"a", 0))
    publisher = await broker.connect(b"p", clean=True)
    await client.cut()
    await publisher.deliver(b"a", b"missed")
    await broker.restart()
    publisher = await broker.connect(b"p", clean=True)
    again = await broker.connect(b"c")
    assert again.connack.session_present
    await publisher.deliver(b"a", b"live", qos=2)
    (packet,) = await again.publishes(1)
    assert (packet.payload, packet.qos) == (b"live", 0)
    assert await broker.history() == []


async def test_a_session_may_have_ten_thousand_filters(broker: Broker) -> None:
    client = await broker.connect(b"c")
    for start in range(0, 10_000, 2500):
        wanted = [b"a/%d/+" % n for n in range(start, start + 2500)]
        assert await client.subscribe(*wanted) == b"\x01" * 2500
    await client.cut()
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"a/9999/x", b"1")
    await publisher.deliver(b"a/10000/x", b"2")
    await broker.restart()
    again = await broker.connect(b"c")
    assert await again.payloads(1) == [b"1"]
    assert broker.hub.router._places.size == 10_000
    await again.unsubscribe(*(b"a/%d/+" % n for n in range(10_000)))
    assert broker.hub.router._places.size == 0


async def test_the_router_counts_the_same_after_a_restart(durable_broker: Broker) -> None:
    broker = durable_broker
    await broker.sleeper(b"1", (b"a", 1), (b"b", 2), (b"c", 0))
    await broker.sleeper(b"2", (b"a", 2), (b"b", 0))
    assert counted(broker, b"a", b"b", b"c") == [2, 1, 0]
    await broker.restart()
    assert counted(broker, b"a", b"b", b"c") == [2, 1, 0]
    client = await broker.connect(b"1", clean=True)
    assert counted(broker, b"a", b"b", b"c") == [1, 0, 0]
    await client.quiet()


async def test_a_subscribe_under_way_when_the_session_is_reset_leaves_no_count_behind(
    broker: Broker,
) -> None:
    client = await broker.subscriber(b"c", b"a")
    gate = broker.store.hang_submit()
    client.send(Subscribe(1, (SubscribeFilter(b"b", 1),)))
    await gate.reached.wait()
    broker.session(b"c").lose(
        ResumeHistoryUnavailable(1, 1, b"a")
    )  # as when history turns out to be gone (410)
    gate.release()
    await client.closed()
    assert await broker.snapshot(b"c") is None
    await broker.turns(lambda: counted(broker, b"a", b"b") == [0, 0])
    assert broker.hub.router._places.size == 0


async def test_a_clean_start_while_a_subscribe_is_under_way_leaves_no_count_behind(
    broker: Broker,
) -> None:
    client = await broker.subscriber(b"c", b"a", b"b")
    gate = broker.store.hang_submit()
    client.send(Subscribe(1, (SubscribeFilter(b"c", 1), SubscribeFilter(b"b", 0))))
    await gate.reached.wait()
    newer = await broker.dial()
    newer.send(newer.connect_packet(b"c", clean=True))
    await client.closed()
    gate.release()
    await newer.any()
    await newer.quiet()
    await broker.turns(lambda: counted(broker, b"a", b"b", b"c") == [0, 0, 0])
    assert broker.hub.router._places.size == 0


# ------------------------------------------------------------------------------- retained


@pytest.mark.parametrize("clean", [False, True])
async def test_retained_messages_come_once_for_a_new_subscription_after_its_suback(
    broker: Broker, clean: bool
) -> None:
    publisher = await broker.connect(b"p", clean=True)
    for topic, qos in ((b"a/0", 0), (b"a/1", 1), (b"a/2", 2), (b"b", 1)):
        publisher.publish(topic, topic, qos, retain=True)
    await publisher.until_ping()
    client = await broker.connect(b"c", clean=clean)
    client.send(Subscribe(1, (SubscribeFilter(b"a/+", 1),)))
    await client.next(Suback)
    packets = await client.publishes(3)
    assert sorted((p.topic, p.qos, p.retain) for p in packets) == [
        (b"a/0", 0, True),
        (b"a/1", 1, True),
        (b"a/2", 1, True),
    ]
    await client.quiet()
    assert await client.subscribe((b"a/0", 0), (b"never", 0)) == b"\0\0"
    await client.publishes(1)
    await client.quiet()


async def test_an_empty_retained_message_removes_the_one_of_its_topic(broker: Broker) -> None:
    publisher = await broker.connect(b"p", clean=True)
    publisher.publish(b"a", b"1", retain=True)
    publisher.publish(b"a", b"", retain=True)
    await publisher.next(Puback)
    await publisher.next(Puback)
    await broker.restart()
    client = await broker.connect(b"c")
    await client.subscribe(b"#")
    await client.quiet()


async def test_retained_messages_survive_a_restart(durable_broker: Broker) -> None:
    broker = durable_broker
    publisher = await broker.connect(b"p", clean=True)
    for n in range(1500):
        publisher.publish(b"a/%d" % n, b"%d" % n, 1, retain=True)
    for _ in range(1500):
        await publisher.next(Puback)
    await broker.restart()
    assert len(broker.hub.retained) == 1500
    client = await broker.connect(b"c", clean=True)
    await client.subscribe((b"a/+", 0))
    assert sorted(await client.payloads(1500)) == sorted(b"%d" % n for n in range(1500))


@pytest.mark.parametrize("clean", [False, True])
async def test_more_retained_messages_than_the_window_all_come(clean: bool) -> None:
    async with running(max_inflight=5, max_queued_messages=7) as broker:
        publisher = await broker.connect(b"p", clean=True)
        for n in range(3000):
            publisher.publish(b"a/%d" % n, b"%d" % n, n % 3, retain=True)
        await publisher.until_ping()
        client = await broker.connect(b"c", clean=clean)
        client.send(Subscribe(1, (SubscribeFilter(b"a/#", 2),)))
        await client.next(Suback)
        got = await client.publishes(3000)
        assert len({p.topic for p in got}) == 3000
        assert all(p.retain for p in got)
        await client.quiet()


@pytest.mark.parametrize("how", ["cut", "restart", "crash"])
async def test_a_retained_message_under_way_comes_again_under_its_id(
    broker: Broker, how: str
) -> None:
    publisher = await broker.connect(b"p", clean=True)
    await broker.stop()
    await broker.start()
    publisher = await broker.connect(b"p", clean=True)
    publisher.publish(b"a", b"1", 2, retain=True)
    publisher.publish(b"b", b"2", 1, retain=True)
    await publisher.until_ping()
    client = await broker.connect(b"c")
    await client.subscribe((b"#", 2))
    before = await client.publishes(2, ack=False)
    publisher.publish(b"a", b"3", 1, retain=True)  # the copy under way is held for this client
    await broker.turns(lambda: len(broker.session(b"c").out.flights) == 3)
    await broker.hub.committer.drain()
    if how == "cut":
        await client.cut()
    elif how == "restart":
        await broker.restart()
    else:
        await broker.crash_and_restart()
    again = await broker.connect(b"c")
    after = await again.publishes(3)
    assert [(p.payload, p.packet_id, p.retain, p.dup) for p in after[:2]] == [
        (p.payload, p.packet_id, True, True) for p in before
    ]
    assert (after[2].payload, after[2].retain) == (b"3", False)
    await again.quiet()
    snapshot = await broker.snapshot(b"c")
    assert snapshot is not None
    assert (snapshot.claims, snapshot.held) == ((), {})


async def test_a_retained_message_that_was_replaced_during_the_walk_comes_once(
    broker: Broker,
) -> None:
    await broker.stop()
    await broker.start(max_inflight=1)
    publisher = await broker.connect(b"p", clean=True)
    for n in range(1600):
        publisher.publish(b"a/%04d" % n, b"old", 1, retain=True)
    await publisher.until_ping()
    client = await broker.connect(b"c")
    client.send(Subscribe(1, (SubscribeFilter(b"a/+", 1),)))
    await client.next(Suback)
    publisher.publish(b"a/1599", b"new", 1, retain=True)  # delivered as it is published
    await publisher.until_ping()
    got = await client.publishes(1600)
    assert [p.retain for p in got if p.payload == b"new"] == [False]
    assert await client.until_ping() == []


async def test_retained_messages_beyond_the_limit_are_delivered_and_not_retained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(max_retained_messages=2) as broker:
        listener = await broker.connect(b"l", clean=True)
        await listener.subscribe((b"#", 1))
        publisher = await broker.connect(b"p", clean=True)
        for n in range(5):
            publisher.publish(b"%d" % n, b"%d" % n, 1, retain=True)
        assert await listener.payloads(5) == [b"%d" % n for n in range(5)]
        assert len(broker.hub.retained) == 2
        assert broker.hub.figures.refused_retained == 3
        assert caplog.text.count("retained messages are full") == 1


# ---------------------------------------------------------- leaving amid retained messages


async def retained(broker: Broker, count: int) -> None:
    sender = await broker.connect(clean=True)
    for number in range(count):
        sender.publish(b"r/%04d" % number, b"%d" % number, 1, retain=True)
    await sender.until_ping()
    await broker.hub.committer.drain()


@pytest.mark.parametrize("crash", [False, True])
async def test_who_leaves_amid_retained_messages_gets_the_rest_when_it_resumes(
    disk: Backend, monkeypatch: pytest.MonkeyPatch, crash: bool
) -> None:
    monkeypatch.setattr("broker_ext.durable.AHEAD_MIN", 10)
    async with running(disk, max_inflight=10) as broker:
        await retained(broker, 100)
        client = await broker.subscriber(b"s", b"r/#")
        await client.publishes(15)
        await client.cut()
        if crash:
            await broker.crash_and_restart()
        client = await broker.connect(b"s")
        topics: set[bytes] = set()
        while broker.session(b"s")._walking or not broker.is_idle(b"s"):
            for packet in await client.until_ping():
                client.send(Puback(packet.packet_id))
                topics.add(packet.topic)
        assert {b"r/%04d" % n for n in range(15, 100)} <= topics
        await client.disconnect()
        client = await broker.connect(b"s")
        await client.quiet()  # it has had them all, and that is known


async def test_retained_messages_that_all_fit_cost_no_commit_of_their_own(broker: Broker) -> None:
    await retained(broker, 10)
    client = await broker.connect(b"s")
    before = len(broker.store.batches)
    await client.subscribe(b"r/#")
    await client.payloads(10)
    ops = [{type(op).__name__ for op in b.ops} for b in broker.store.batches[before:]]
    assert ops[:2] == [{"Subscribe", "Advance"}] * 2
    assert not any("Subscribe" in of_batch for of_batch in ops[2:])
    snapshot = await broker.snapshot(b"s")
    assert snapshot is not None
    assert [s.options for s in snapshot.subscriptions] == [0]


@pytest.mark.parametrize("clean", [False, True])
async def test_an_unsubscribe_amid_retained_messages_ends_them(
    monkeypatch: pytest.MonkeyPatch, clean: bool
) -> None:
    monkeypatch.setattr("broker_ext.durable.AHEAD_MIN", 10)
    async with running(max_inflight=10) as broker:
        await retained(broker, 100)
        client = await broker.connect(b"s", clean=clean)
        await client.subscribe(b"r/#")
        await client.publishes(5, ack=False)
        client.send(Unsubscribe(99, (b"r/#",)))
        came = 5
        while True:
            packet = await client.any()
            if isinstance(packet, Unsuback):
                break
            came += 1
        for packet in await client.until_ping():
            assert isinstance(packet, Publish)  # what was under way already
            client.send(Puback(packet.packet_id))
        await client.quiet()
        assert came <= 20
        assert not broker.hub.registry.owners[b"s"]._walks


async def test_a_subscribe_of_a_session_that_keeps_up_costs_the_same_however_many_it_has(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await broker.subscriber(b"c", *(b"f/%d" % n for n in range(100)))
    made: list[object] = []

    def replay(*args: Any, **kwargs: Any) -> Replay:
        made.append(args)
        return Replay(*args, **kwargs)

    monkeypatch.setattr("broker_ext.durable.Replay", replay)
    await client.subscribe(b"another")
    await client.unsubscribe(b"f/7")
    assert made == []
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"another", b"x")
    await publisher.deliver(b"f/7", b"not wanted")
    await publisher.deliver(b"f/8", b"y")
    assert await client.payloads(2) == [b"x", b"y"]


@pytest.mark.parametrize("is_saved", [True, False])
async def test_a_message_is_not_delivered_by_the_old_qos_0_and_by_the_new_subscription(
    broker: Broker, *, is_saved: bool
) -> None:
    """What is published while the new one is being saved."""
    await broker.sleeper(b"other", (b"t/#", 2))
    client = await broker.subscriber(b"c", (b"t/+", 0))
    publisher = await broker.connect(b"p", clean=True)
    gate = broker.store.hang_submit()
    client.send_subscribe((b"t/1", 2))
    await gate.reached.wait()
    publisher.publish(b"t/1", b"once", 2)
    publisher.publish(b"t/2", b"live", 2)
    packet = await client.next(Publish)
    assert (packet.payload, packet.qos) == (b"live", 0)
    gate.release(None if is_saved else StoreFull("no space"))
    assert (await client.next(Suback)).reasons == (b"\x02" if is_saved else b"\x80")
    if is_saved:
        (packet,) = await client.publishes(1)
        assert (packet.payload, packet.qos) == (b"once", 2)
    await client.quiet()

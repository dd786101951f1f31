"""P9: a will is published or deleted by the incarnation that stored it alone."""

from __future__ import annotations

import asyncio
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from broker_ext import registry
from broker_ext.wire import Connack, Properties
from broker_ext.wire.properties import SESSION_EXPIRY_S, WILL_DELAY_S
from storage import engine
from storage.errors import StoreFull, StoreUnavailable
from storage.memory import MemoryStore
from tests.broker.mqtt import running, will

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from broker_ext.session import Session
    from storage.api import Will
    from tests.broker.mqtt import Broker, Client


async def wills(broker: Broker) -> list[bytes]:
    """Payloads of the wills in the store, once everything is written."""
    await broker.hub.committer.drain()
    store: Any = broker.store.inner
    if isinstance(store, MemoryStore):
        found = store._tables.wills.values()
    else:
        found = await store._read(engine.wills)
    return sorted(w.message.payload for w in found)


@pytest.mark.parametrize("clean", [False, True])
async def test_a_will_is_stored_before_connack(broker: Broker, clean: bool) -> None:
    gate = broker.store.hang_submit()
    client = await broker.dial()
    client.send(client.connect_packet(b"c", clean=clean, will=will(b"w")))
    await gate.reached.wait()
    for _ in range(3):
        await broker.turns(lambda: True)
    assert not client._packets
    gate.release()
    await client.next(Connack)
    assert await wills(broker) == [b"gone"]


async def _cut(client: Client) -> None:
    await client.cut()


async def _malformed(client: Client) -> None:
    client.send_bytes(b"\xff\xff")
    await client.closed()


async def _silence(client: Client) -> None:
    hub = client.broker.hub
    for _ in range(3):
        hub._look_for_silence()
        client.broker.clock.advance(ms=100_000)
    await client.closed()


async def _takeover(client: Client) -> None:
    await client.broker.connect(client.client_id)


@pytest.mark.parametrize("end", [_cut, _malformed, _silence, _takeover])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_will_is_published_when_the_connection_ends_without_disconnect(
    broker: Broker, end: Callable[[Client], Awaitable[None]], qos: int
) -> None:
    listener = await broker.subscriber(b"l", (b"w", 2))
    client = await broker.connect(b"c", keep_alive=60, will=will(b"w", b"gone", qos))
    await end(client)
    (packet,) = await listener.publishes(1)
    assert (packet.payload, packet.qos, packet.retain) == (b"gone", qos, False)
    assert await wills(broker) == []
    await listener.quiet()


async def test_a_will_is_deleted_by_disconnect(broker: Broker) -> None:
    listener = await broker.subscriber(b"l", b"w")
    client = await broker.connect(b"c", will=will(b"w"))
    await client.disconnect()
    assert await wills(broker) == []
    await listener.quiet()


async def test_a_retained_will_is_retained(broker: Broker) -> None:
    client = await broker.connect(b"c", will=will(b"w", b"gone", 1, retain=True))
    await client.cut()
    listener = await broker.connect(b"l", clean=True)
    await listener.subscribe(b"w")
    (packet,) = await listener.publishes(1)
    assert (packet.payload, packet.retain) == (b"gone", True)


async def test_a_will_and_its_deletion_share_one_commit(broker: Broker) -> None:
    await broker.sleeper(b"l", b"w")
    client = await broker.connect(b"c", will=will(b"w"))
    before = len(broker.store.batches)
    await client.cut()
    await broker.hub.committer.drain()
    (batch,) = [b for b in broker.store.batches[before:] if b.entries]
    assert [type(op).__name__ for op in batch.ops if type(op).__name__ == "DropWill"] == [
        "DropWill"
    ]


async def test_the_will_of_an_older_incarnation_does_not_touch_the_newer_one(
    broker: Broker,
) -> None:
    listener = await broker.subscriber(b"l", b"w")
    await broker.connect(b"c", will=will(b"w", b"first"))
    second = await broker.connect(b"c", will=will(b"w", b"second"))
    assert await listener.payloads(1) == [b"first"]
    assert await wills(broker) == [b"second"]
    third = await broker.connect(b"c", will=will(b"w", b"third"))
    assert await listener.payloads(1) == [b"second"]
    await second.closed()
    await third.disconnect()
    assert await wills(broker) == []
    await listener.quiet()


# --------------------------------------------------------------------------- after a crash


async def test_after_a_crash_a_will_is_published_once_the_time_to_return_is_over(
    broker: Broker,
) -> None:
    await broker.sleeper(b"l", b"w")
    for name in (b"1", b"2"):
        await broker.connect(name, will=will(b"w", name))
    broker.timers = True
    await broker.crash_and_restart(will_recovery_delay_s=0.05)
    back = await broker.connect(b"2", will=will(b"w", b"2 again"))
    listener = await broker.connect(b"l")
    assert await listener.payloads(1) == [b"1"]
    assert await wills(broker) == [b"2 again"]
    await listener.quiet()
    await back.disconnect()
    await broker.crash_and_restart()
    assert broker.hub.opened.wills == ()


async def test_who_came_back_is_told_when_the_will_that_waited_is_gone(broker: Broker) -> None:
    """So another crash does not bring it back."""
    await broker.connect(b"1", will=will(b"w"))
    await broker.crash_and_restart()
    gate = broker.store.hang_submit(nth=2)  # the first is Acquire
    client = await broker.dial()
    client.send(client.connect_packet(b"1"))
    await gate.reached.wait()
    assert b"1" not in broker.hub.registry.owners
    gate.release()
    await client.next(Connack)
    assert await wills(broker) == []
    await broker.crash_and_restart()
    assert broker.hub.opened.wills == ()


async def test_after_a_crash_during_the_time_to_return_the_will_is_still_there(
    broker: Broker,
) -> None:
    await broker.sleeper(b"l", b"w")
    await broker.connect(b"1", will=will(b"w"))
    await broker.crash_and_restart()
    await broker.crash_and_restart()
    broker.hub.wills.publish_orphans()
    listener = await broker.connect(b"l")
    assert await listener.payloads(1) == [b"gone"]
    assert await wills(broker) == []


async def test_wills_after_a_crash_are_deleted_where_so_configured(broker: Broker) -> None:
    listener = await broker.subscriber(b"l", b"w")
    await broker.connect(b"1", will=will(b"w"))
    await broker.crash_and_restart(publish_wills_after_crash=False)
    broker.hub.wills.publish_orphans()
    listener = await broker.connect(b"l")
    await listener.quiet()
    assert await wills(broker) == []


async def test_a_stop_keeps_wills_as_a_crash_does(durable_broker: Broker) -> None:
    broker = durable_broker
    await broker.sleeper(b"l", b"w")
    await broker.connect(b"1", will=will(b"w"))
    await broker.restart()
    assert [w.client_id for w in broker.hub.opened.wills] == [b"1"]
    broker.hub.wills.publish_orphans()
    listener = await broker.connect(b"l")
    assert await listener.payloads(1) == [b"gone"]
    await listener.quiet()
    await broker.restart()
    assert broker.hub.opened.wills == ()


# ----------------------------------------------------------------------------- will delay


async def delayed(broker: Broker, seconds: int = 30, **options: Any) -> Client:
    """A client ``c`` of MQTT 5 whose will waits; its session is kept for ever."""
    message = will(b"w")._replace(properties=Properties(((WILL_DELAY_S, seconds),)))
    return await broker.connect(b"c", version=5, will=message, **options)


def pass_time(broker: Broker, seconds: int) -> None:
    broker.clock.advance(ms=1000 * seconds)
    broker.hub.wills.publish_due()


@pytest.mark.parametrize("restart", [False, True])
async def test_a_will_waits_for_its_delay(durable_broker: Broker, restart: bool) -> None:
    broker = durable_broker
    await broker.sleeper(b"l", b"w")
    client = await delayed(broker)
    await client.cut()
    pass_time(broker, 20)
    if restart:
        await broker.crash_and_restart(will_recovery_delay_s=1)
    pass_time(broker, 9)
    assert await broker.history() == []
    assert await wills(broker) == [b"gone"]
    pass_time(broker, 1)
    assert await broker.history() == [b"gone"]
    assert await wills(broker) == []
    pass_time(broker, 100)
    assert await broker.history() == [b"gone"]


@pytest.mark.parametrize("restart", [False, True])
async def test_a_client_that_returns_within_the_delay_cancels_its_will(
    durable_broker: Broker, restart: bool
) -> None:
    broker = durable_broker
    await broker.sleeper(b"l", b"w")
    client = await delayed(broker)
    await client.cut()
    pass_time(broker, 29)
    if restart:
        await broker.crash_and_restart()
    client = await broker.connect(b"c", version=5)
    assert await wills(broker) == []
    pass_time(broker, 100)
    await client.cut()
    assert await broker.history() == []


async def test_a_takeover_cancels_a_will_that_would_wait(broker: Broker) -> None:
    """[MQTT5-3.1.3-9]: a new connection to this session before the delay is over."""
    await broker.sleeper(b"l", b"w")
    first = await delayed(broker)
    second = await delayed(broker)
    await first.closed()
    assert await wills(broker) == [b"gone"]
    pass_time(broker, 100)
    assert await broker.history() == []
    await second.cut()
    pass_time(broker, 30)
    assert await broker.history() == [b"gone"]


@pytest.mark.parametrize("connected", [False, True])
async def test_a_clean_start_ends_the_session_and_publishes_the_will(
    broker: Broker, connected: bool
) -> None:
    await broker.sleeper(b"l", b"w")
    client = await delayed(broker)
    if not connected:
        await client.cut()
    await broker.connect(b"c", version=5, clean=True)
    assert await broker.history() == [b"gone"]
    assert await wills(broker) == []


@pytest.mark.parametrize("expiry", [0, 10])
async def test_a_will_waits_no_longer_than_its_session_is_kept(broker: Broker, expiry: int) -> None:
    await broker.sleeper(b"l", b"w")
    client = await delayed(broker, expiry=expiry)
    await client.cut()
    if expiry:
        pass_time(broker, 9)
        assert await broker.history() == []
        pass_time(broker, 1)
    assert await broker.history() == [b"gone"]


async def test_a_will_of_a_session_that_expired_is_published_by_who_finds_it_so(
    broker: Broker,
) -> None:
    await broker.sleeper(b"l", b"w")
    client = await delayed(broker, expiry=10)
    await client.cut()
    broker.clock.advance(ms=10_000)
    await broker.connect(b"c", version=5)  # before anything is done by the clock
    assert await broker.history() == [b"gone"]


async def test_a_session_that_expires_after_a_crash_publishes_its_will(broker: Broker) -> None:
    await broker.sleeper(b"l", b"w")
    await delayed(broker, 1_000, expiry=20)
    await broker.crash_and_restart(will_recovery_delay_s=1)
    broker.hub.wills.publish_orphans()
    broker.clock.advance(ms=20_000)
    assert await broker.history() == []
    await broker.hub._expire()
    assert await broker.history() == [b"gone"]
    assert await wills(broker) == []


async def test_disconnect_with_will_publishes_it_after_the_delay(broker: Broker) -> None:
    await broker.sleeper(b"l", b"w")
    client = await delayed(broker)
    await client.disconnect(4, Properties(((SESSION_EXPIRY_S, 10),)))
    pass_time(broker, 9)
    assert await broker.history() == []
    pass_time(broker, 1)
    assert await broker.history() == [b"gone"]
    client = await delayed(broker)
    await client.disconnect()
    pass_time(broker, 100)
    assert await broker.history() == [b"gone"]


async def test_the_delay_of_a_connection_that_died_with_the_broker_begins_at_the_start(
    durable_broker: Broker,
) -> None:
    broker = durable_broker
    await broker.sleeper(b"l", b"w")
    await delayed(broker)
    for _ in range(3):
        await broker.crash_and_restart(will_recovery_delay_s=1)
        broker.hub.wills.publish_orphans()
        pass_time(broker, 9)
    assert await broker.history() == []
    pass_time(broker, 3)
    assert await broker.history() == [b"gone"]
    await broker.restart()
    assert broker.hub.opened.wills == ()


async def test_a_will_that_was_due_while_the_broker_was_away_waits_for_its_client(
    broker: Broker,
) -> None:
    await broker.sleeper(b"l", b"w")
    client = await delayed(broker)
    await client.cut()
    await broker.stop()
    broker.clock.advance(ms=1_000_000)
    await broker.start()
    pass_time(broker, 9)
    assert await broker.history() == []
    pass_time(broker, 1)
    assert await broker.history() == [b"gone"]


async def test_clients_that_come_and_go_leave_no_deadlines_behind(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker_ext.wills.DUE_MAX", 10)
    broker.hub.wills._due_max = 10
    for _ in range(50):
        await (await delayed(broker, 100_000)).cut()
    assert len(broker.hub.wills._due) <= 12
    pass_time(broker, 100_000)
    assert await wills(broker) == []
    assert broker.hub.figures.wills == 1


# ------------------------------------------------------------------- several of one client


@pytest.fixture(params=[1, -1], ids=["ascending", "descending"])
def sorted_incarnations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store tells of wills in the order of these, whichever that is."""
    numbers = count(128, request.param)
    monkeypatch.setattr(
        registry, "os", SimpleNamespace(urandom=lambda n: bytes([next(numbers)] * n))
    )


async def reconnect_and_crash(broker: Broker, payload: bytes, **options: Any) -> None:
    """The broker dies when the new will is stored, and the one before it not deleted yet."""
    before = await wills(broker)
    gate = broker.store.hang_submit(nth=2)
    client = await broker.dial()
    client.send(client.connect_packet(b"c", will=will(b"w", payload), **options))
    await gate.reached.wait()
    connecting = [c._connecting for c in broker.hub.connections if c._connecting is not None]
    for task in connecting:
        task.cancel()
    await asyncio.wait(connecting)
    await broker.crash()
    await broker.start()
    found = {w.message.payload for w in broker.hub.opened.wills}
    assert found == {*before, payload}


@pytest.mark.usefixtures("sorted_incarnations")
async def test_wills_that_crashes_left_of_one_client_are_published_in_their_order(
    durable_broker: Broker,
) -> None:
    broker = durable_broker
    await broker.sleeper(b"l", b"w")
    await broker.connect(b"c", clean=True, will=will(b"w", b"1"))
    await broker.crash_and_restart()
    for payload in (b"2", b"3"):
        await reconnect_and_crash(broker, payload, clean=True)
    broker.hub.wills.publish_orphans()
    assert await broker.history() == [b"1", b"2", b"3"]
    assert await wills(broker) == []


@pytest.mark.usefixtures("sorted_incarnations")
@pytest.mark.parametrize("dies_first", [False, True])
async def test_a_will_waits_no_longer_than_the_next_one_of_its_client(
    durable_broker: Broker, dies_first: bool
) -> None:
    """Whatever its delay: who was to come back within it was there."""
    broker = durable_broker
    await broker.sleeper(b"l", b"w")
    client = await delayed(broker, 3000)
    if dies_first:
        await broker.crash_and_restart()
    else:
        await client.cut()
    await reconnect_and_crash(broker, b"next", version=5)
    pass_time(broker, 9)
    assert await broker.history() == []
    pass_time(broker, 1)
    assert await broker.history() == [b"gone", b"next"]
    assert await wills(broker) == []


async def test_a_topic_plugin_that_is_slow_does_not_change_the_order_of_wills(
    broker: Broker,
) -> None:
    await broker.sleeper(b"l", b"w")
    answer = asyncio.Event()
    asked: list[bytes] = []

    async def permits(will: Will, session: Session | None) -> bool:
        del session
        asked.append(will.message.payload)
        if len(asked) == 1:
            await answer.wait()
        return True

    broker.hub.permits_will = permits
    for payload in (b"1", b"2", b"3"):
        await (await broker.connect(b"c", will=will(b"w", payload))).cut()
    await (await broker.connect(b"other", will=will(b"w", b"another's"))).cut()
    await broker.turns(lambda: len(asked) == 4)
    assert await broker.history() == [b"another's"]
    answer.set()
    await broker.hub.wills.settle()
    assert await broker.history() == [b"another's", b"1", b"2", b"3"]
    assert await wills(broker) == []


# ------------------------------------------------------------------------ when things fail


async def test_a_connect_whose_will_cannot_be_stored_is_refused_and_has_none(
    broker: Broker,
) -> None:
    for clean in (False, True):
        broker.store.fail_submit(StoreFull("no space"))
        client = await broker.dial()
        assert (await client.connect(b"c", clean=clean, will=will(b"w"))).reason == 3
        await client.closed()
        assert await wills(broker) == []
        assert await broker.history() == []


async def test_a_will_of_a_time_when_the_store_fails_is_published_when_it_is_over(
    broker: Broker,
) -> None:
    await broker.sleeper(b"l", b"w")
    client = await broker.connect(b"c", will=will(b"w"))
    broker.store.fail_submit(StoreUnavailable("I/O error"), times=2)
    await client.cut()
    await broker.hub.committer.drain()
    assert await broker.history() == [b"gone"]
    assert await wills(broker) == []


async def test_a_will_is_published_only_if_the_topic_plugins_permit_it_then(
    broker: Broker,
) -> None:
    await broker.sleeper(b"l", b"#")

    async def permits(will: Will, session: Session | None) -> bool:
        assert session is not None
        assert session.client_id == will.client_id
        return not will.message.topic.startswith(b"forbidden")

    broker.hub.permits_will = permits
    for topic in (b"forbidden", b"free"):
        client = await broker.connect(b"c", will=will(topic, topic))
        await client.cut()
    await broker.turns(lambda: not broker.hub.wills._asking)
    assert await broker.history() == [b"free"]
    assert await wills(broker) == []


async def test_nobody_is_shown_a_will_twice_over_many_crashes() -> None:
    async with running() as other:
        await other.sleeper(b"l", (b"w", 2))
        for n in range(5):
            await other.connect(b"c", will=will(b"w", b"%d" % n, 2))
            await other.crash_and_restart()
            other.hub.wills.publish_orphans()
            await other.hub.committer.drain()
        listener = await other.connect(b"l")
        assert [p.payload for p in await listener.publishes(5)] == [b"%d" % n for n in range(5)]
        await listener.quiet()

"""Shared subscriptions: a group of members, each message for one of them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from broker_ext.operations import groups, sessions
from broker_ext.rules import FilterRule
from broker_ext.shared import Shared, filter_of
from broker_ext.wire import (
    Disconnect,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
)
from broker_ext.wire.properties import RECEIVE_MAX, SHARED_AVAILABLE, SUBSCRIPTION_ID
from storage.api import GROUP, RECEIVED, UNRECORDED
from storage.errors import RecordDamaged, StoreFull
from storage.memory import MemoryStore
from tests.broker.mqtt import PATIENCE_S, running
from tests.storage.faults import lose_tail, restore
from tests.storage.harness import SEALED, scratch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from storage.api import Acquired, Claim, Snapshot
    from tests.broker.mqtt import Broker, Client
    from tests.storage.harness import Backend

JOBS = b"$share/g/t"


@pytest.fixture(params=[4, 5], ids=["3.1.1", "5"])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % n for n in range(start, start + count)]


class Takers:
    """Clients that acknowledge whatever they get."""

    def __init__(self) -> None:
        self.got: dict[bytes, list[bytes]] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self._due: set[tuple[bytes, int]] = set()  # PUBRELs
        self._more = asyncio.Event()

    @property
    def all(self) -> list[bytes]:
        return [payload for got in self.got.values() for payload in got]

    def add(self, *clients: Client) -> None:
        for client in clients:
            self.got.setdefault(client.client_id, [])
            self.tasks.append(asyncio.ensure_future(self._take(client)))

    async def _take(self, client: Client) -> None:
        while True:
            packet = await client.any()
            if type(packet) is Publish:
                self.got[client.client_id].append(packet.payload)
                if packet.qos == 1:
                    client.send(Puback(packet.packet_id))
                elif packet.qos == 2:
                    client.send(Pubrec(packet.packet_id))
                    self._due.add((client.client_id, packet.packet_id))
            elif type(packet) is Pubrel:
                self._due.discard((client.client_id, packet.packet_id))
                client.send(Pubcomp(packet.packet_id))
            self._more.set()

    async def have(self, *payloads: bytes) -> None:
        """Wait for as many; each of them once."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.all) < len(payloads) or self._due:
                self._more.clear()
                await self._more.wait()
        assert sorted(self.all) == sorted(payloads)


@asynccontextmanager
async def taking(*clients: Client) -> AsyncIterator[Takers]:
    takers = Takers()
    takers.add(*clients)
    try:
        yield takers
    finally:
        for task in takers.tasks:
            task.cancel()
        await asyncio.gather(*takers.tasks, return_exceptions=True)


async def record(broker: Broker) -> Snapshot | None:
    """What is stored of the group."""
    await broker.hub.committer.drain()
    store = broker.store.inner
    for consumer in await store.consumers():
        if consumer.client_id.startswith(GROUP):
            snapshot = await store.snapshot(consumer.client_id)
            assert snapshot is not None
            if JOBS in {s.filter for s in snapshot.subscriptions}:
                return snapshot
    return None


async def claims(broker: Broker) -> tuple[Claim, ...]:
    snapshot = await record(broker)
    return () if snapshot is None else snapshot.claims


async def is_settled(broker: Broker) -> None:
    """The group has nothing under way."""
    async with asyncio.timeout(PATIENCE_S):
        while await claims(broker):  # noqa: ASYNC110 - a turn, not a time
            await asyncio.sleep(0)


async def members(broker: Broker, count: int, qos: int = 1, **options: Any) -> list[Client]:
    found = []
    for n in range(count):
        client = await broker.connect(b"member-%d" % n, **options)
        assert await client.subscribe((JOBS, qos)) == bytes([qos])
        found.append(client)
    return found


# ---------------------------------------------------------------------------- who gets what


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("clean", [False, True])
async def test_each_message_is_for_one_member_and_they_have_equal_parts(
    broker: Broker, version: int, qos: int, *, clean: bool
) -> None:
    team = await members(broker, 3, qos, version=version, clean=clean)
    publisher = await broker.connect(b"pub", version=version)
    async with taking(*team) as takers:
        await publisher.deliver(b"t", *numbered(30), qos=qos)
        await takers.have(*numbered(30))
        assert [len(got) for got in takers.got.values()] == [10, 10, 10]
        assert all(got == sorted(got, key=int) for got in takers.got.values())


async def test_members_on_disk_share_what_comes(durable_broker: Broker, version: int) -> None:
    broker = durable_broker
    team = [*await members(broker, 2, 2, version=version)]
    clean = await broker.connect(b"clean", clean=True, version=version)
    await clean.subscribe((JOBS, 1))
    publisher = await broker.connect(b"pub", version=version)
    async with taking(*team, clean) as takers:
        await publisher.deliver(b"t", *numbered(300), qos=2)
        await takers.have(*numbered(300))
        assert min(map(len, takers.got.values())) >= 50
    await is_settled(broker)


async def test_groups_and_ordinary_subscriptions_are_separate(broker: Broker, version: int) -> None:
    both = await broker.connect(b"both", version=version)
    await both.subscribe((JOBS, 1), (b"$share/other/t", 1), (b"t", 2), (b"#", 1))
    other = await broker.connect(b"other", version=version)
    await other.subscribe((JOBS, 1))
    publisher = await broker.connect(b"pub", version=version)
    await publisher.deliver(b"t", b"x", b"y", qos=2)
    async with taking(both, other) as takers:
        await takers.have(*[b"x", b"y"] * 3)
        assert len(takers.got[b"other"]) == 1
    await is_settled(broker)


async def test_delivered_qos_is_the_lower_of_published_and_that_of_the_member(
    broker: Broker, version: int
) -> None:
    team = [await broker.connect(b"q%d" % qos, version=version) for qos in range(3)]
    for qos, client in enumerate(team):
        await client.subscribe((JOBS, qos))
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", b"a", b"b", b"c", qos=2)
    for qos, client in enumerate(team):
        (got,) = await client.publishes(1)
        assert (got.qos, got.dup, got.retain) == (qos, False, False)


async def test_a_member_with_qos_0_gets_its_part_and_no_more(broker: Broker) -> None:
    quick, slow = await members(broker, 2)
    passing = await broker.connect(b"passing")
    await passing.subscribe((JOBS, 0))
    publisher = await broker.connect(b"pub")
    async with taking(quick, passing) as takers:
        await publisher.deliver(b"t", *numbered(30))
        held = await slow.publishes(10, ack=False)
        await takers.have(*(set(numbered(30)) - {p.payload for p in held}))
        assert [len(got) for got in takers.got.values()] == [10, 10]


async def test_a_slow_member_holds_no_more_than_its_window(broker: Broker, version: int) -> None:
    slow, quick = await members(broker, 2, version=version)
    publisher = await broker.connect(b"pub")
    async with taking(quick) as takers:
        await publisher.deliver(b"t", *numbered(1000))
        held = await slow.publishes(100, ack=False)
        await takers.have(*(set(numbered(1000)) - {p.payload for p in held}))
    await slow.quiet()


async def test_what_nobody_has_room_for_waits_as_a_cursor_and_comes_in_order(
    durable_broker: Broker, version: int
) -> None:
    (only,) = await members(durable_broker, 1, version=version)
    publisher = await durable_broker.connect(b"pub")
    await publisher.deliver(b"t", *numbered(2000))
    held = await only.publishes(100, ack=False)
    await only.quiet()
    group = durable_broker.hub.shared.groups[JOBS]
    assert not group.backlog.live
    assert not group.backlog.loose
    only.send(*(Puback(p.packet_id) for p in held))
    got = [p.payload for p in held] + await only.payloads(1900)
    assert got == numbered(2000)


async def test_own_and_shared_deliveries_take_turns_in_a_full_window(broker: Broker) -> None:
    client = await broker.connect(b"dev")
    await client.subscribe((JOBS, 1), (b"own", 1))
    publisher = await broker.connect(b"pub")
    for n in range(400):
        await publisher.deliver(b"own", b"own")
        await publisher.deliver(b"t", b"%d" % n)
    got = await client.publishes(500)
    assert sum(p.topic == b"t" for p in got) > 100
    assert len(await client.publishes(300)) == 300
    await client.quiet()


async def test_where_no_packet_id_is_free_the_group_waits(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    (client,) = await members(broker, 1)
    session = broker.session(b"member-0")
    monkeypatch.setattr("broker_ext.durable.PACKET_IDS", 3)
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", *numbered(6))
    assert session.places == 0
    got = await client.publishes(3, ack=False)
    await client.quiet()
    client.send(*(Puback(p.packet_id) for p in got))
    assert await client.payloads(3) == numbered(3, 3)


async def test_messages_of_before_the_group_are_not_for_it(broker: Broker, version: int) -> None:
    await broker.sleeper(b"sleeper", b"t")
    publisher = await broker.connect(b"pub")
    publisher.publish(b"t", b"old", 1, retain=True)
    await publisher.next(Puback)
    (client,) = await members(broker, 1, version=version)
    await publisher.deliver(b"t", b"new")
    assert await client.payloads(1) == [b"new"]
    await client.quiet()


async def test_topics_stay_with_a_member_where_so_configured() -> None:
    async with running(shared_order="topic") as broker:
        team = [await broker.connect(b"member-%d" % n) for n in range(3)]
        for client in team:
            await client.subscribe((b"$share/g/t/#", 1))
        publisher = await broker.connect(b"pub")
        for n in range(60):
            await publisher.deliver(b"t/%d" % (n % 6), b"%d" % n)
        by_topic: dict[bytes, set[bytes]] = {}
        for client in team:
            got = await client.publishes(20, ack=False)
            for packet in got:
                by_topic.setdefault(packet.topic, set()).add(client.client_id)
            client.send(*(Puback(p.packet_id) for p in got))
        assert all(len(who) == 1 for who in by_topic.values())
        await broker.turns(lambda: not broker.hub.shared.groups[b"$share/g/t/#"].turns.topics)


# ------------------------------------------------------------------------ malformed and refused


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        (b"$share/g/t", b"t"),
        (b"$share/g/a/+/#", b"a/+/#"),
        (b"$share/g//", b"/"),
        (b"$share/g/$share/h/t", b"$share/h/t"),
        (b"$share/", None),
        (b"$share/g", None),
        (b"$share/g/", None),
        (b"$share//t", None),
        (b"$share/g+/t", None),
        (b"$share/#/t", None),
        (b"$share/g/a#", None),
    ],
)
def test_the_filter_behind_a_shared_one(name: bytes, plain: bytes | None) -> None:
    assert filter_of(name) == plain


@pytest.mark.parametrize(
    "name", [b"$share/", b"$share/g", b"$share/g/", b"$share//t", b"$share/+/t"]
)
async def test_a_malformed_shared_filter_is_refused(
    broker: Broker, version: int, name: bytes
) -> None:
    client = await broker.connect(b"dev", version=version)
    codes = await client.subscribe((name, 1), (JOBS, 1))
    assert codes == (b"\x8f\x01" if version == 5 else b"\x80\x01")


async def test_the_topic_plugins_are_asked_for_the_filter(broker: Broker, version: int) -> None:
    client = await broker.connect(b"dev", version=version)
    codes = await client.subscribe((b"$share/g/forbidden/x", 1), (b"$share/forbidden/x", 1))
    assert codes == (b"\x87\x01" if version == 5 else b"\x80\x01")


async def test_no_local_on_a_shared_subscription_is_a_protocol_error(broker: Broker) -> None:
    client = await broker.connect(b"dev", version=5)
    client.send_subscribe((JOBS, 1 | 0x04))
    assert (await client.next(Disconnect)).reason == 0x82
    await client.closed()
    assert not broker.hub.shared.groups


async def test_connack_does_not_say_that_they_are_not_available(broker: Broker) -> None:
    client = await broker.connect(b"dev", version=5)
    assert client.connack.properties is not None
    assert client.connack.properties.get(SHARED_AVAILABLE) is None


async def test_each_member_has_its_own_options(broker: Broker) -> None:
    keeps = await broker.connect(b"keeps", version=5)
    await keeps.subscribe((JOBS, 1 | 0x08), properties=Properties(((SUBSCRIPTION_ID, 7),)))
    plain = await broker.connect(b"plain", version=5)
    await plain.subscribe((JOBS, 1))
    publisher = await broker.connect(b"pub")
    for _ in range(2):
        publisher.publish(b"t", b"x", 1, retain=True)
        await publisher.next(Puback)
    (one,) = await keeps.publishes(1)
    assert (one.retain, one.properties) == (True, Properties(((SUBSCRIPTION_ID, 7),)))
    (two,) = await plain.publishes(1)
    assert not two.retain


async def test_what_one_member_may_not_have_goes_to_another() -> None:
    def prepare(broker: Broker) -> None:
        broker.slow = True

    async with running(prepare=prepare) as broker:
        broker.hub.router.guarded = True
        team = await members(broker, 2)
        refused, allowed = (broker.hub.registry.owners[c.client_id] for c in team)

        async def may_not(topic: bytes) -> bool:
            return topic != b"t"

        refused.may_receive = may_not
        publisher = await broker.connect(b"pub")
        async with taking(*team) as takers:
            await publisher.deliver(b"t", *numbered(20))
            await takers.have(*numbered(20))
            assert len(takers.got[allowed.client_id]) == 20
            allowed.may_receive = may_not
            await publisher.deliver(b"t", b"nobody's")
            await publisher.quiet()
            await is_settled(broker)
        assert broker.hub.shared.groups[JOBS].backlog.live


async def test_a_message_that_is_too_large_for_one_member_goes_to_another(broker: Broker) -> None:
    from broker_ext.wire.properties import PACKET_BYTES_MAX  # noqa: PLC0415

    small = await broker.connect(
        b"small", version=5, properties=Properties(((PACKET_BYTES_MAX, 100),))
    )
    await small.subscribe((JOBS, 1))
    large = await broker.connect(b"large", version=5)
    await large.subscribe((JOBS, 1))
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", *[bytes(200)] * 4)
    assert len(await large.publishes(4)) == 4
    await large.disconnect()
    await publisher.deliver(b"t", bytes(200), b"small")
    assert await small.payloads(1) == [b"small"]
    assert broker.hub.figures.too_large == 1
    await is_settled(broker)


# ------------------------------------------------------------------------------ members leave


@pytest.mark.parametrize("leaves", ["cut", "disconnect", "clean start", "taken over"])
async def test_qos_1_that_was_not_acknowledged_goes_to_another_member_at_once(
    durable_broker: Broker, version: int, leaves: str
) -> None:
    broker = durable_broker
    first, second = await members(broker, 2, version=version)
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", *numbered(20))
    got = await first.publishes(10, ack=False)
    first.send(Puback(got[0].packet_id))
    await first.quiet()
    async with taking(second) as takers:
        await takers.have(*(set(numbered(20)) - {p.payload for p in got}))
        takers.got[second.client_id].clear()
        if leaves == "cut":
            await first.cut()
        elif leaves == "disconnect":
            await first.disconnect()
        else:
            takers.add(
                await broker.connect(
                    first.client_id, version=version, clean=leaves == "clean start"
                )
            )
        await takers.have(*(p.payload for p in got[1:]))
        assert all(payloads == sorted(payloads, key=int) for payloads in takers.got.values())
    await is_settled(broker)


async def test_what_goes_to_another_member_is_a_first_publish_under_its_own_id(
    broker: Broker, version: int
) -> None:
    first, second = await members(broker, 2, version=version)
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", b"one", b"two")
    (one,) = await first.publishes(1, ack=False)
    (two,) = await second.publishes(1, ack=False)
    await first.cut()
    (again,) = await second.publishes(1, ack=False)
    assert (again.payload, again.dup) == (one.payload, False)
    assert again.packet_id != two.packet_id


async def test_qos_1_of_a_member_that_is_alone_comes_back_with_its_id_and_dup(
    durable_broker: Broker, version: int
) -> None:
    broker = durable_broker
    (first,) = await members(broker, 1, version=version)
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", *numbered(3))
    got = await first.publishes(3, ack=False)
    for restart in (False, True):
        await first.cut()
        if restart:
            await broker.crash_and_restart()
        first = await broker.connect(b"member-0", version=version)
        again = await first.publishes(3, ack=False)
        assert [(p.payload, p.packet_id) for p in again] == [(p.payload, p.packet_id) for p in got]
        assert all(p.dup for p in again)
    first.send(*(Puback(p.packet_id) for p in got))
    await is_settled(broker)
    await first.quiet()


@pytest.mark.parametrize("restart", [False, True])
async def test_qos_2_that_was_sent_waits_for_its_member(
    durable_broker: Broker, version: int, *, restart: bool
) -> None:
    """[MQTT-4.8.2-4]"""
    broker = durable_broker
    first, second = await members(broker, 2, 2, version=version)
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", *numbered(6), qos=2)
    sent, received, released = await first.publishes(3, ack=False)
    first.send(Pubrec(received.packet_id), Pubrec(released.packet_id))
    await first.next(Pubrel)
    await first.next(Pubrel)
    assert len(await second.payloads(3)) == 3
    await first.cut()
    if restart:
        await broker.crash_and_restart()
        second = await broker.connect(b"member-1", version=version)
        publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", b"later", qos=2)
    assert await second.payloads(1) == [b"later"]
    await second.quiet()
    first = await broker.connect(b"member-0", version=version)
    packets = [await first.any() for _ in range(3)]
    assert sorted(p.packet_id for p in packets if type(p) is Pubrel) == sorted(
        [received.packet_id, released.packet_id]
    )
    (again,) = (p for p in packets if type(p) is Publish)
    assert (again.packet_id, again.payload, again.dup) == (sent.packet_id, sent.payload, True)
    first.send(Pubcomp(received.packet_id), Pubcomp(released.packet_id), Pubrec(again.packet_id))
    await first.next(Pubrel)
    first.send(Pubcomp(again.packet_id))
    await first.quiet()
    await is_settled(broker)


@pytest.mark.parametrize("ends", ["clean start", "expires", "transient", "restart"])
async def test_qos_2_that_was_sent_is_for_nobody_else_when_its_session_ends(
    durable_broker: Broker, ends: str
) -> None:
    """[MQTT-4.8.2-5]"""
    broker = durable_broker
    second = (await members(broker, 2, 2))[1]
    await (await broker.connect(b"member-0", clean=True)).disconnect()
    first = await broker.connect(
        b"first", version=5, clean=ends in {"transient", "restart"}, expiry=10 * (ends == "expires")
    )
    if ends == "clean start":
        first = await broker.connect(b"first")
    await first.subscribe((JOBS, 2))
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", *numbered(4), qos=2)
    (sent, received) = await first.publishes(2, ack=False)
    first.send(Pubrec(received.packet_id))
    await first.next(Pubrel)
    assert len(await second.payloads(2)) == 2
    await second.quiet()
    await broker.hub.committer.drain()
    await first.cut()
    if ends == "clean start":
        await broker.connect(b"first", clean=True)
    elif ends == "expires":
        assert [c.member for c in await claims(broker)] not in ([], [UNRECORDED])
        broker.clock.advance(ms=11_000)
        await broker.hub._expire()
    elif ends == "restart":
        await broker.crash_and_restart()
        second = await broker.connect(b"member-1")
    await is_settled(broker)
    await second.quiet()
    del sent


async def test_a_member_that_unsubscribes_finishes_what_was_sent(
    durable_broker: Broker, version: int
) -> None:
    """[MQTT-3.10.4-3]"""
    broker = durable_broker
    first, second = await members(broker, 2, 2, version=version)
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", *numbered(4), qos=2)
    got = await first.publishes(2, ack=False)
    await second.payloads(2)
    await first.unsubscribe(JOBS)
    await publisher.deliver(b"t", *numbered(4, 4), qos=2)
    assert await second.payloads(4) == numbered(4, 4)
    first.send(Pubrec(got[0].packet_id))
    await first.next(Pubrel)
    await first.cut()
    await broker.crash_and_restart()
    first = await broker.connect(b"member-0", version=version)
    assert (await first.next(Pubrel)).packet_id == got[0].packet_id
    again = await first.next(Publish)
    assert (again.packet_id, again.dup) == (got[1].packet_id, True)
    first.send(Pubcomp(got[0].packet_id), Pubrec(again.packet_id))
    await first.next(Pubrel)
    first.send(Pubcomp(again.packet_id))
    await is_settled(broker)
    await first.quiet()


async def test_the_last_member_may_finish_before_the_record_goes(durable_broker: Broker) -> None:
    broker = durable_broker
    (only,) = await members(broker, 1, 2)
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", *numbered(2), qos=2)
    got = await only.publishes(2, ack=False)
    await only.unsubscribe(JOBS)
    await publisher.deliver(b"t", b"for nobody", qos=2)
    only.send(Pubrec(got[0].packet_id))
    await only.next(Pubrel)
    await only.cut()
    await broker.crash_and_restart()
    assert await claims(broker)
    only = await broker.connect(b"member-0")
    only.send(Pubcomp((await only.next(Pubrel)).packet_id))
    only.send(Pubrec((await only.next(Publish)).packet_id))
    only.send(Pubcomp((await only.next(Pubrel)).packet_id))
    await only.quiet()
    assert await record(broker) is None
    assert not broker.hub.shared.groups
    assert await broker.history() in (numbered(2), [])


async def test_what_was_claimed_and_not_sent_goes_to_another_whatever_its_qos(
    durable_broker: Broker,
) -> None:
    broker = durable_broker
    slow, quick = await members(broker, 2, 2)
    publisher = await broker.connect(b"pub")
    session = broker.session(b"member-0")
    session.peer.congested = True
    group = broker.hub.shared.groups[JOBS]
    async with taking(quick) as takers:
        await publisher.deliver(b"t", b"a", qos=2)
        await takers.have(b"a")
        session.peer.congested = False
        gate = broker.store.hang_submit()
        publisher.publish(b"t", b"b", 2)
        await gate.reached.wait()
        assert session.member is not None
        assert session.member.flights
        session.peer.congested = True
        gate.release()
        await publisher.next(Pubrec)
        assert session.member.ready
        assert takers.all == [b"a"]
        await slow.cut()
        await takers.have(b"a", b"b")
    await is_settled(broker)
    assert group.backlog.live


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_member_that_refuses_a_message_is_the_last_to_get_it(
    broker: Broker, qos: int
) -> None:
    """[MQTT-4.8.2-6]"""
    first, second = await members(broker, 2, 2, version=5)
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", *numbered(2), qos=qos)
    (got,) = await first.publishes(1, ack=False)
    first.send(Puback(got.packet_id, 0x83) if qos == 1 else Pubrec(got.packet_id, 0x83))
    await first.quiet()
    assert len(await second.payloads(1)) == 1
    await first.cut()
    await second.quiet()
    await is_settled(broker)


# --------------------------------------------------------------------------------- durability


async def test_a_group_survives_with_nobody_connected(disk: Backend, version: int) -> None:
    async with running(disk) as broker:
        team = await members(broker, 2, version=version)
        for client in team:
            await client.disconnect()
        publisher = await broker.connect(b"pub")
        await publisher.deliver(b"t", *numbered(50))
        await broker.restart()
        publisher = await broker.connect(b"pub")
        await publisher.deliver(b"t", *numbered(50, 50))
        await broker.crash_and_restart()
        clean = await broker.connect(b"clean", clean=True, version=version)
        await clean.subscribe((JOBS, 1))
        got = await clean.payloads(60)
        assert got == numbered(60)
        first = await broker.connect(b"member-0", version=version)
        async with taking(first, clean) as takers:
            await takers.have(*numbered(40, 60))
        await is_settled(broker)


async def test_a_group_of_transient_members_costs_no_disk(broker: Broker, version: int) -> None:
    team = await members(broker, 2, 2, version=version, clean=True)
    publisher = await broker.connect(b"pub")
    async with taking(*team) as takers:
        await publisher.deliver(b"t", *numbered(20), qos=2)
        await takers.have(*numbered(20))
    assert await broker.history() == []
    assert await record(broker) is None
    for client in team:
        await client.disconnect()
    assert not broker.hub.shared.groups


async def test_transient_members_hand_on_and_queue_in_memory(broker: Broker) -> None:
    first, second = await members(broker, 2, 1, clean=True)
    publisher = await broker.connect(b"pub", clean=True)
    await publisher.deliver(b"t", *numbered(1300))
    assert broker.hub.figures.dropped_queue == 100
    await first.publishes(100, ack=False)
    await first.cut()
    got = await second.payloads(1200)
    assert sorted(map(int, got)) == list(range(1200))
    await second.quiet()
    assert not broker.hub.shared.groups[JOBS].backlog.memory_bytes


async def test_a_group_becomes_durable_with_its_first_durable_member(broker: Broker) -> None:
    (first,) = await members(broker, 1, 2, clean=True)
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", *numbered(2), qos=2)
    held = await first.publishes(2, ack=False)
    durable = await broker.connect(b"durable")
    await durable.subscribe((JOBS, 2))
    assert await broker.history() == []
    for packet in held:
        first.send(Pubrec(packet.packet_id))
        first.send(Pubcomp((await first.next(Pubrel)).packet_id))
    await publisher.deliver(b"t", *numbered(2, 2), qos=2)
    assert await broker.history() == numbered(2, 2)
    async with taking(first, durable) as takers:
        await takers.have(*numbered(2, 2))
    await durable.disconnect()
    await first.disconnect()
    await publisher.deliver(b"t", b"kept", qos=2)
    durable = await broker.connect(b"durable")
    assert await durable.payloads(1) == [b"kept"]
    assert await durable.unsubscribe(JOBS) == b""
    await durable.quiet()
    assert await record(broker) is None


@pytest.mark.parametrize("qos", [1, 2])
async def test_what_waited_in_memory_is_stored_before_it_goes_to_a_durable_member(
    broker: Broker, qos: int
) -> None:
    """Else a crash forgets a packet id that its client has, and gives it to another message."""
    window = Properties(((RECEIVE_MAX, 1),))
    first = await broker.connect(b"first", version=5, clean=True, properties=window)
    await first.subscribe((JOBS, qos))
    publisher = await broker.connect(b"pub", clean=True)
    await publisher.deliver(b"t", *numbered(3), qos=qos)
    await first.publishes(1, ack=False)
    durable = await broker.connect(b"durable")
    await durable.subscribe((JOBS, qos))
    sent = await durable.publishes(2, ack=False)
    assert [packet.payload for packet in sent] == numbered(2, 1)
    await broker.crash_and_restart()
    durable = await broker.connect(b"durable")
    again = await durable.publishes(2, ack=False)
    assert again == [packet._replace(flags=packet.flags | 8) for packet in sent]  # DUP


@pytest.mark.parametrize("ends", ["unsubscribes", "starts clean", "expires", "asks for QoS 0"])
async def test_the_record_goes_with_the_last_durable_member(broker: Broker, ends: str) -> None:
    client = await broker.connect(b"dev", version=5, expiry=10)
    await client.subscribe((JOBS, 1))
    publisher = await broker.connect(b"pub")
    assert await record(broker) is not None
    if ends == "unsubscribes":
        await client.unsubscribe(JOBS)
    elif ends == "asks for QoS 0":
        await client.subscribe((JOBS, 0))
        await publisher.deliver(b"t", b"x")
        assert (await client.publishes(1))[0].qos == 0
    if ends != "unsubscribes":
        await client.disconnect()
    if ends == "starts clean":
        client = await broker.connect(b"dev", clean=True)
    elif ends == "expires":
        broker.clock.advance(ms=11_000)
        await broker.hub._expire()
    assert await record(broker) is None
    assert not broker.hub.shared.groups
    assert not broker.hub.shared.counts
    await publisher.deliver(b"t", b"for nobody")
    assert b"for nobody" not in await broker.history()


@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_a_suback_waits_for_the_record_of_the_group(broker: Broker, nth: int) -> None:
    client = await broker.connect(b"dev")
    gate = broker.store.hang_submit(nth=nth)
    client.send_subscribe((JOBS, 1))
    await gate.reached.wait()
    await client.quiet()
    gate.release()
    await client.next(Suback)
    assert await record(broker) is not None


@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_a_subscribe_whose_group_cannot_be_saved_changes_nothing(
    broker: Broker, nth: int
) -> None:
    client = await broker.connect(b"dev")
    broker.store.fail_submit(StoreFull("no space"), nth=nth)
    assert await client.subscribe((JOBS, 1)) == b"\x80"
    assert not broker.hub.shared.counts
    await broker.turns(lambda: broker.hub.committer.failing_since is None)
    assert await record(broker) is None
    assert not broker.hub.shared.groups
    assert await client.subscribe((JOBS, 1)) == b"\x01"
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", b"x")
    assert await client.payloads(1) == [b"x"]


async def test_a_record_that_a_crash_left_behind_goes_at_start(durable_broker: Broker) -> None:
    broker = durable_broker
    (only,) = await members(broker, 1)
    await only.disconnect()
    group = broker.hub.shared.groups[JOBS]
    session = await broker.connect(b"member-0")
    owner = broker.session(b"member-0")
    # the crash is between the two writes of an UNSUBSCRIBE
    from storage.api import Unsubscribe  # noqa: PLC0415

    await broker.hub.committer.apply(
        Unsubscribe(owner.consumer_id, owner.incarnation, (group.name,))
    )
    assert await record(broker) is not None
    await broker.crash_and_restart()
    assert await record(broker) is None
    del session


async def test_what_the_group_had_is_pruned_although_members_sleep(broker: Broker) -> None:
    team = await members(broker, 2)
    await team[0].disconnect()
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", *numbered(20))
    assert len(await team[1].payloads(20)) == 20
    await is_settled(broker)
    broker.hub._checkpoint()
    await broker.hub.committer.drain()
    broker.clock.advance(ms=1)
    await broker.hub._prune()
    assert await broker.history() == []
    await publisher.deliver(b"t", *numbered(20, 20))
    await team[1].disconnect()
    broker.clock.advance(ms=1)
    await broker.hub._prune()
    assert len(await broker.history()) == 20
    client = await broker.connect(b"member-0")
    assert client.connack.session_present
    assert await client.payloads(20) == numbered(20, 20)


async def test_a_group_that_lost_history_goes_on_with_what_is_left(
    durable_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    broker = durable_broker
    (only,) = await members(broker, 1)
    await only.disconnect()
    publisher = await broker.connect(b"pub")
    for n in range(20):
        await publisher.deliver(b"t", b"%d" % n)
    await broker.restart(max_messages=5)
    await broker.hub._prune()
    await broker.restart()
    assert broker.hub.figures.gaps == 1
    assert "skips a gap" in caplog.text
    only = await broker.connect(b"member-0")
    assert only.connack.session_present
    assert await only.payloads(5) == numbered(5, 15)
    await only.quiet()


async def test_a_delivery_that_lost_its_message_is_told_and_passed_over(
    durable_broker: Broker,
) -> None:
    broker = durable_broker
    (only,) = await members(broker, 1, 2)
    publisher = await broker.connect(b"pub")
    for n in range(4):
        await publisher.deliver(b"t", b"%d" % n, qos=2)
    await only.publishes(4, ack=False)
    await only.cut()
    await broker.restart(max_messages=2)
    await broker.hub._prune()
    only = await broker.connect(b"member-0")
    got = await only.publishes(2)
    assert [p.payload for p in got] == numbered(2, 2)
    assert all(p.dup for p in got)
    await only.quiet()
    assert broker.hub.figures.gaps >= 1
    await is_settled(broker)


async def test_received_is_committed_before_pubrel(durable_broker: Broker) -> None:
    broker = durable_broker
    (only,) = await members(broker, 1, 2)
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", b"x", qos=2)
    (got,) = await only.publishes(1, ack=False)
    gate = broker.store.hang_submit()
    only.send(Pubrec(got.packet_id))
    await gate.reached.wait()
    await only.quiet()
    gate.release()
    await only.next(Pubrel)
    (claim,) = await claims(broker)
    assert [d.state for d in claim.deliveries] == [RECEIVED]
    assert claim.member == broker.session(b"member-0").consumer_id


async def test_no_delivery_before_its_claim_is_committed(broker: Broker, version: int) -> None:
    team = await members(broker, 2, version=version)
    publisher = await broker.connect(b"pub")
    gate = broker.store.hang_submit()
    publisher.publish(b"t", b"x", 1)
    await gate.reached.wait()
    for client in team:
        await client.quiet()
    gate.release()
    await publisher.next(Puback)
    async with taking(*team) as takers:
        await takers.have(b"x")


async def test_a_write_that_is_refused_makes_the_group_read_its_record_again(
    broker: Broker,
) -> None:
    first, second = await members(broker, 2, 2)
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", *numbered(2), qos=2)
    (sent,) = await first.publishes(1, ack=False)
    await second.payloads(1)
    await broker.hub.committer.drain()
    from storage.api import Acquire  # noqa: PLC0415

    client_id = broker.hub.shared.groups[JOBS].record.client_id
    await broker.hub.committer.apply(Acquire(client_id, b"x" * 16, GROUP, broker.clock.now_ms()))
    await publisher.deliver(b"t", b"3", qos=2)
    await broker.turns(lambda: broker.hub.figures.fenced)
    again = await first.next(Publish)
    assert (again.packet_id, again.dup, again.payload) == (sent.packet_id, True, sent.payload)
    first.send(Pubrec(sent.packet_id))
    async with taking(first, second) as takers:
        await takers.have(b"3")
        await publisher.deliver(b"t", *numbered(10, 10), qos=2)
        await takers.have(b"3", *numbered(10, 10))
        await is_settled(broker)
    assert broker.hub.figures.fenced == 1


async def test_members_that_leave_while_the_history_is_read_lose_nothing(
    durable_broker: Broker,
) -> None:
    broker = durable_broker
    (only,) = await members(broker, 1)
    await only.disconnect()
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", *numbered(1000))
    await broker.restart()  # nothing of it is in memory now
    read = broker.store.hang_read(nth=2)
    only = await broker.connect(b"member-0")
    await read.reached.wait()
    await only.cut()
    read.release()
    group = broker.hub.shared.groups[JOBS]
    await broker.turns(lambda: group.backlog.working is None)
    only = await broker.connect(b"member-0")
    assert await only.payloads(1000) == numbered(1000)


async def test_a_member_with_qos_0_that_leaves_before_the_commit_costs_nothing(
    broker: Broker,
) -> None:
    (durable,) = await members(broker, 1)
    await durable.disconnect()
    passing = await broker.connect(b"passing", clean=True)
    await passing.subscribe((JOBS, 0))
    publisher = await broker.connect(b"pub")
    gate = broker.store.hang_submit()
    publisher.publish(b"t", b"x", 1)
    await gate.reached.wait()
    await passing.cut()
    gate.release()
    await publisher.next(Puback)
    durable = await broker.connect(b"member-0")
    assert await durable.payloads(1) == [b"x"]
    await is_settled(broker)


async def test_what_was_settled_is_pruned_when_everybody_has_left(broker: Broker) -> None:
    team = await members(broker, 2)
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", *numbered(20))
    for client in team:
        await client.payloads(10)
        await client.disconnect()
    await broker.hub.committer.drain()
    broker.clock.advance(ms=1)
    await broker.hub._prune()
    assert await broker.history() == []


@pytest.mark.parametrize("restart", [False, True])
async def test_a_group_that_was_away_gets_the_last_value_of_each_topic(
    disk: Backend, *, restart: bool
) -> None:
    rules = (FilterRule(b"t/#", keep_latest=True),)
    async with running(disk, filters=rules) as broker:
        name = b"$share/g/t/#"
        await broker.sleeper(b"dev", name)
        publisher = await broker.connect(b"pub")
        for n in range(10):
            await publisher.deliver(b"t/%d" % (n % 2), b"%d" % n)
        await publisher.disconnect()
        if restart:
            await broker.crash_and_restart()
        client = await broker.connect(b"dev")
        assert await client.payloads(2) == [b"8", b"9"]
        await client.quiet()


@pytest.mark.parametrize("kind", ["lmdb, topics sealed", "sqlite, topics sealed"])
async def test_what_a_group_shares_is_sealed_like_every_topic(kind: str) -> None:
    with scratch() as path:
        async with running(SEALED[kind](path)) as broker:
            client = await broker.connect(b"dev")
            await client.subscribe((b"$share/crew/plans/secret/#", 2))
            publisher = await broker.connect(b"pub")
            await publisher.deliver(b"plans/secret/1", b"x", qos=2)
            await client.publishes(1, ack=False)
            await broker.crash_and_restart()
            assert b"$share/crew/plans/secret/#" in broker.hub.shared.groups
            client = await broker.connect(b"dev")
            assert await client.payloads(1) == [b"x"]
        files = [file.read_bytes() for file in path.rglob("*") if file.is_file()]
        assert len(files) > 1
        assert not any(word in raw for raw in files for word in (b"plans/secret", b"crew"))


# ------------------------------------------------------------------------------ checked resume


async def left_behind(broker: Broker) -> None:
    """A group with twenty messages that nobody has had, and one that its member has under way."""
    (only,) = await members(broker, 1, 2)
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", b"0", qos=2)
    await only.publishes(1, ack=False)
    await only.cut()
    await publisher.deliver(b"t", *numbered(20, 1), qos=2)
    await publisher.disconnect()
    await broker.stop()


async def test_a_group_of_another_generation_goes_on_and_is_bound(broker: Broker) -> None:
    await left_behind(broker)
    assert isinstance(broker.store.inner, MemoryStore)
    restore(broker.store.inner, "f" * 32)
    await broker.start()
    assert broker.hub.figures.rebound == 1
    only = await broker.connect(b"member-0")
    assert only.connack.session_present
    assert await only.payloads(21) == numbered(21)
    await is_settled(broker)
    found = await record(broker)
    assert found is not None
    assert found.consumer.generation == "f" * 32


async def test_a_group_of_another_generation_begins_again_where_so_configured(
    broker: Broker,
) -> None:
    await left_behind(broker)
    assert isinstance(broker.store.inner, MemoryStore)
    restore(broker.store.inner, "f" * 32)
    await broker.start(on_generation_change="reset")
    assert broker.hub.figures.resets == {"generation-changed": 1}
    assert await claims(broker) == ()
    # its member is reset for itself, and gone with it is the last that the group had
    only = await broker.connect(b"member-0")
    assert not only.connack.session_present
    assert await record(broker) is None
    assert not broker.hub.router.route(b"t").log


async def test_a_group_ahead_of_the_head_begins_again_at_the_head(broker: Broker) -> None:
    await left_behind(broker)
    assert isinstance(broker.store.inner, MemoryStore)
    consumers = broker.store.inner._tables.consumers
    client_id = next(name for name in consumers if name.startswith(GROUP))
    ahead = replace(consumers[client_id].consumer, cursor=21)
    consumers[client_id] = replace(consumers[client_id], consumer=ahead)
    lose_tail(broker.store.inner, 10)
    await broker.start()
    assert broker.hub.figures.resets == {"position-ahead": 1}
    other = await broker.connect(b"other", clean=True)
    await other.subscribe((JOBS, 2))
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", b"new", qos=2)
    assert await other.payloads(1) == [b"new"]


async def test_a_group_whose_record_was_left_out_by_a_repair_begins_again(broker: Broker) -> None:
    await left_behind(broker)
    assert isinstance(broker.store.inner, MemoryStore)
    consumers = broker.store.inner._tables.consumers
    gone = consumers.pop(next(name for name in consumers if name.startswith(GROUP)))
    del broker.store.inner._tables.names[gone.consumer.id]
    await broker.start()
    assert broker.hub.figures.resets == {"record-missing": 1}
    only = await broker.connect(b"member-0")
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", b"new", qos=2)
    assert await only.payloads(1) == [b"new"]
    await is_settled(broker)


async def test_a_group_whose_record_is_damaged_begins_again_and_the_others_go_on(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.sleeper(b"dev", JOBS, b"$share/h/u")
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", b"1")
    await publisher.deliver(b"u", b"2")
    found = await record(broker)
    assert found is not None
    await broker.stop()
    acquire = Shared._acquire

    async def damaged(shared: Shared, client_id: bytes) -> Acquired:
        if client_id == found.consumer.client_id:
            raise RecordDamaged(found.consumer.id)
        return await acquire(shared, client_id)

    monkeypatch.setattr(Shared, "_acquire", damaged)
    await broker.start()
    assert "cannot be read" in caplog.text
    assert broker.hub.figures.resets == {"record-missing": 1}
    client = await broker.connect(b"dev")
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", b"3")
    assert sorted(await client.payloads(2)) == [b"2", b"3"]
    await client.quiet()


# ---------------------------------------------------------------------------------- operators


async def test_an_operator_sees_how_far_groups_are_behind(broker: Broker) -> None:
    (only,) = await members(broker, 1, 2)
    await only.subscribe((b"$share/h/t", 1))
    clean = await broker.connect(b"clean", clean=True)
    await clean.subscribe((b"$share/i/other", 1))
    publisher = await broker.connect(b"pub")
    await publisher.deliver(b"t", *numbered(3), qos=2)
    await only.publishes(6, ack=False)
    page = await groups(broker.hub, limit=2)
    assert [row["name"] for row in page["groups"]] == ["$share/g/t", "$share/h/t"]
    assert page["groups"][0] == {
        "name": "$share/g/t",
        "durable": True,
        "members": 1,
        "durable_members": 1,
        "lag": 0,
        "waiting": 0,
        "under_way": 3,
    }
    rest = await groups(broker.hub, after=page["next"])
    assert [row["name"] for row in rest["groups"]] == ["$share/i/other"]
    assert (rest["next"], rest["groups"][0]["durable"]) == ("", False)
    await only.cut()
    await publisher.deliver(b"t", b"more")
    left = (await groups(broker.hub))["groups"]
    assert [(row["members"], row["lag"], row["waiting"]) for row in left[:2]] == [
        (0, 1, 0),  # what was sent with QoS 2 waits for its member
        (0, 1, 3),
    ]
    assert all(row["client_id"][0] != "\0" for row in (await sessions(broker.hub))["sessions"])


async def test_what_is_read_for_one_who_left_waits_for_one_with_more_than_its_window(
    broker: Broker,
) -> None:
    """It is not undeliverable: it came back with a smaller window than it left with."""
    for name in (b"n", b"m"):
        member = await broker.connect(name, version=5)
        await member.subscribe((JOBS, 2))
        if name == b"n":
            await member.disconnect()
    publisher = await broker.connect(b"p", clean=True)
    await publisher.deliver(b"t", *numbered(20), qos=2)
    left = await member.publishes(20, ack=False)
    await member.cut()
    await publisher.deliver(b"t", *numbered(10, 20))
    await broker.restart()
    gate = broker.store.hang_read()
    other = await broker.connect(b"n", version=5)
    await gate.reached.wait()
    await other.cut()
    window = Properties(((RECEIVE_MAX, 3),))
    member = await broker.connect(b"m", version=5, properties=window)
    gate.release()
    got = await member.publishes(30)
    assert [p.packet_id for p in got[:20]] == [p.packet_id for p in left]
    assert [p.payload for p in got] == numbered(30)
    assert broker.hub.figures.too_large == 0

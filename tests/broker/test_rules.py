"""What the configuration says of topics (``filters``), and of messages that break connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from broker_ext.rules import FilterRule, Newest, Rules, filter_rules
from broker_ext.wire import Properties, Puback, Pubcomp, Publish, Pubrec, Pubrel
from broker_ext.wire.properties import RECEIVE_MAX
from storage.api import Entry
from storage.errors import StoreUnavailable
from storage.outbox import SESSIONS, Failure
from tests.broker.mqtt import running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.broker.mqtt import Broker, Client
    from tests.storage.harness import Backend

LATEST = (FilterRule(b"dash/#", keep_latest=True),)


# ----------------------------------------------------------------------------- configuration


def test_rules_are_read_from_the_configuration() -> None:
    rules = filter_rules(
        {"dash/#": {"expire_after": 60, "keep": "latest"}, "a/+": {"expire_after": 0.5}}
    )
    assert rules == (FilterRule(b"dash/#", 60_000, True), FilterRule(b"a/+", 500))


@pytest.mark.parametrize(
    ("filters", "why"),
    [
        ({"a/#/b": {"keep": "latest"}}, "no topic filter"),
        ({"$share/g/a": {"keep": "latest"}}, "no topic filter"),
        ({"": {"keep": "latest"}}, "no topic filter"),
        ({"a": {}}, "nothing else"),
        ({"a": None}, "nothing else"),
        ({"a": {"keep_latest": True}}, "nothing else"),
        ({"a": {"keep": "last"}}, "it must be latest"),
        ({"a": {"keep": None}}, "it must be latest"),
        ({"a": {"expire_after": 0}}, "above 0"),
        ({"a": {"expire_after": -1}}, "above 0"),
        ({"a": {"expire_after": True}}, "above 0"),
        ({"a": {"expire_after": "60"}}, "above 0"),
        ({"a": {"expire_after": float("nan")}}, "above 0"),
        ({"a": {"expire_after": 1e12}}, "above 0"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(filters: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        filter_rules(filters)


def test_of_several_rules_the_shortest_time_counts() -> None:
    rules = Rules(
        (
            FilterRule(b"a/#", 5000),
            FilterRule(b"a/b", 1000),
            FilterRule(b"+/b", keep_latest=True),
            FilterRule(b"#", 9000),
        )
    )
    assert rules.expire_after_ms(b"a/b") == 1000
    assert rules.expire_after_ms(b"a/c") == 5000
    assert rules.expire_after_ms(b"c") == 9000
    assert rules.expire_after_ms(b"$SYS/c") == 0
    assert rules.keeps_latest(b"a/b")
    assert not rules.keeps_latest(b"a/c")
    assert rules.newest is not None
    assert Rules().newest is None


def test_what_is_not_known_is_not_superseded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker_ext.rules.NEWEST_MAX", 3)
    newest = Newest([b"#"])
    for offset, topic in enumerate((b"a", b"b", b"c", b"a", b"d"), 1):
        newest.note(topic, offset)
    assert not newest.supersedes(Entry(1, b"a", b"", 1)), "too many topics: it is delivered"
    newest.note(b"d", 4)
    assert newest.supersedes(Entry(4, b"d", b"", 1)), "what was found later is not older"
    assert not newest.supersedes(Entry(5, b"d", b"", 1))


# ------------------------------------------------------------------------------ keep: latest


@pytest.fixture
async def latest(disk: Backend) -> AsyncIterator[Broker]:
    async with running(disk, filters=LATEST) as broker:
        yield broker


async def values(broker: Broker, topic: bytes, first: int, last: int) -> None:
    publisher = await broker.connect()
    await publisher.deliver(topic, *[b"%d" % n for n in range(first, last + 1)])
    await publisher.disconnect()


def told(packets: list[Publish]) -> list[tuple[bytes, bytes]]:
    return [(packet.topic, packet.payload) for packet in packets]


@pytest.mark.parametrize("restarts", ["no", "restart", "crash"])
async def test_who_was_away_gets_the_last_value_of_each_topic(
    latest: Broker, restarts: str
) -> None:
    """Also when nothing of it is in memory any more."""
    await latest.sleeper(b"dash", b"dash/#", b"log")
    await values(latest, b"dash/1", 1, 300)
    await values(latest, b"log", 1, 3)
    await values(latest, b"dash/2", 1, 200)
    await values(latest, b"dash/1", 301, 310)
    if restarts == "restart":
        await latest.restart()
    if restarts == "crash":
        await latest.crash_and_restart()
    client = await latest.connect(b"dash")
    assert client.connack.session_present
    assert told(await client.publishes(5)) == [
        (b"log", b"1"),
        (b"log", b"2"),
        (b"log", b"3"),
        (b"dash/2", b"200"),
        (b"dash/1", b"310"),
    ]
    await client.quiet()
    assert latest.hub.figures.superseded == 508
    await latest.turns(lambda: latest.is_idle(b"dash"))
    snapshot = await latest.snapshot(b"dash")
    assert snapshot is not None
    assert snapshot.claims == ()
    await values(latest, b"dash/1", 311, 313)
    assert await client.payloads(3) == [b"311", b"312", b"313"], "who is there gets each of them"


async def test_who_reads_slowly_gets_the_last_value_too(latest: Broker) -> None:
    """What is claimed ahead and not sent is passed over; what was sent stays under way."""
    client = await latest.subscriber(
        b"dash", b"dash/#", version=5, properties=Properties(((RECEIVE_MAX, 2),))
    )
    await values(latest, b"dash/1", 1, 50)
    first = await client.publishes(2, ack=False)
    await client.quiet()
    assert [packet.payload for packet in first] == [b"1", b"2"]
    for packet in first:
        client.send(Puback(packet.packet_id))
    assert await client.payloads(1) == [b"50"]
    await client.quiet()
    assert latest.hub.figures.superseded == 47
    await latest.turns(lambda: latest.is_idle(b"dash"))


async def test_what_was_sent_is_sent_again_though_it_is_superseded(latest: Broker) -> None:
    client = await latest.subscriber(b"dash", (b"dash/#", 2), version=5)
    publisher = await latest.connect()
    await publisher.deliver(b"dash/1", b"1", b"2", qos=2)
    first = await client.publishes(2, ack=False)
    await client.cut()
    await publisher.deliver(b"dash/1", b"3", b"4", qos=2)
    one_at_a_time = Properties(((RECEIVE_MAX, 1),))  # so that the second one waits
    client = await latest.connect(b"dash", version=5, properties=one_at_a_time)
    again = await client.publishes(3)
    assert [(p.payload, p.dup) for p in again] == [(b"1", True), (b"2", True), (b"4", False)]
    assert [p.packet_id for p in again[:2]] == [p.packet_id for p in first]


async def test_others_who_have_the_topic_in_a_wider_filter_get_the_last_value(
    latest: Broker,
) -> None:
    """A rule is of the topic, not of the subscription."""
    await latest.sleeper(b"all", b"#")
    await values(latest, b"dash/1", 1, 20)
    client = await latest.connect(b"all")
    assert await client.payloads(1) == [b"20"]


async def test_the_cursor_never_passes_what_is_not_claimed_or_superseded(latest: Broker) -> None:
    """A crash in the middle of catching up loses no last value."""
    await latest.sleeper(b"dash", b"dash/#")
    for topic in range(30):
        await values(latest, b"dash/%d" % topic, 1, 10)
    client = await latest.connect(b"dash")
    await client.publishes(7, ack=False)
    await latest.crash_and_restart()
    await values(latest, b"dash/3", 11, 12)
    client = await latest.connect(b"dash")
    got: dict[bytes, bytes] = {}
    while len(got) < 30 or got[b"dash/3"] != b"12":
        (packet,) = await client.publishes(1)
        got[packet.topic] = packet.payload
    assert set(got.values()) == {b"10", b"12"}
    await client.quiet()


async def test_a_last_value_that_was_pruned_is_told(disk: Backend) -> None:
    async with running(disk, filters=LATEST, max_messages=5) as broker:
        await broker.sleeper(b"dash", b"dash/#")
        await broker.sleeper(b"log", b"log")
        await values(broker, b"dash/1", 1, 20)
        await values(broker, b"log", 1, 20)
        await broker.hub.committer.drain()
        await broker.hub._prune()
        client = await broker.connect(b"dash")
        assert not client.connack.session_present


# ------------------------------------------------------------------------------ expire_after


@pytest.mark.parametrize("version", [4, 5])
async def test_what_waited_too_long_is_not_delivered(disk: Backend, version: int) -> None:
    rules = (FilterRule(b"dash/#", 60_000),)
    async with running(disk, filters=rules) as broker:
        client = await broker.subscriber(b"dash", b"#", version=version)
        await client.disconnect()
        await values(broker, b"dash/1", 1, 3)
        await values(broker, b"log", 1, 1)
        broker.clock.advance(ms=1000 * 40)
        await values(broker, b"dash/1", 4, 5)
        broker.clock.advance(ms=1000 * 21)
        client = await broker.connect(b"dash", version=version)
        assert await client.payloads(3) == [b"1", b"4", b"5"]
        await client.quiet()
        assert broker.hub.figures.expired_messages == 3


async def test_a_deadline_of_the_publisher_that_is_sooner_stays(disk: Backend) -> None:
    rules = (FilterRule(b"dash/#", 60_000),)
    async with running(disk, filters=rules) as broker:
        await broker.sleeper(b"dash", b"#")
        publish = broker.hub.router.publish
        now_ms = broker.clock.now_ms()
        publish(b"dash/1", b"soon", 1, expires_ms=now_ms + 10_000)
        publish(b"dash/1", b"late", 1, expires_ms=now_ms + 100_000)
        await broker.hub.committer.drain()
        found = await broker.store.inner.fetch([1, 2])
        assert [entry.expires_ms - now_ms for entry in found] == [10_000, 60_000]


async def test_a_retained_message_is_kept_whatever_the_rule_says(disk: Backend) -> None:
    rules = (FilterRule(b"dash/#", 60_000),)
    async with running(disk, filters=rules) as broker:
        await broker.sleeper(b"dash", b"#")
        broker.hub.router.publish(b"dash/1", b"on", 1, retain=True)
        await broker.hub.committer.drain()
        broker.clock.advance(ms=1000 * 100)
        client = await broker.subscriber(b"other", b"dash/#")
        assert await client.payloads(1) == [b"on"]


# --------------------------------------------------------------------- max_delivery_attempts


@pytest.fixture
async def strict(disk: Backend) -> AsyncIterator[Broker]:
    async with running(disk, max_delivery_attempts=3) as broker:
        yield broker


POISON = b"poison"


async def consume(client: Client) -> tuple[list[bytes], bool]:
    """Take messages as a client does that ends when it sees the poisonous one, or when nothing
    comes any more. What was taken, and whether it ended that way."""
    taken: list[bytes] = []
    for packet in await client.until_ping():
        if type(packet) is not Publish:
            continue
        if packet.payload == POISON:
            await client.cut()
            return taken, True
        taken.append(packet.payload)
        client.send(Puback(packet.packet_id))
    return taken, False


async def until_done(broker: Broker, client_id: bytes = b"dev") -> tuple[list[bytes], int]:
    """Come back until nothing is left. What was taken, and how often the client went."""
    taken: list[bytes] = []
    breaks = 0
    for _ in range(20):
        client = await broker.connect(client_id)
        while True:
            some, broke = await consume(client)
            taken += some
            if broke:
                breaks += 1
                break
            if not some and broker.is_idle(client_id):
                await client.disconnect()
                return taken, breaks
    raise AssertionError("it never ends")


async def letters(broker: Broker) -> list[tuple[bytes, Failure, int]]:
    await broker.hub.committer.drain()
    found = await broker.store.inner.outbox.dead_letters(SESSIONS)
    return [(m.message.payload, m.failure, m.attempts) for m in found if m.message is not None]


async def test_a_message_that_breaks_its_client_is_a_dead_letter(
    strict: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """Its neighbours, which were under way each time, take no blame."""
    await strict.sleeper(b"dev", b"t")
    publisher = await strict.connect()
    before, after = [b"a%d" % n for n in range(5)], [b"b%d" % n for n in range(50)]
    await publisher.deliver(b"t", *before, POISON, *after)
    taken, breaks = await until_done(strict)
    assert breaks == 3
    assert sorted(set(taken)) == sorted({*before, *after}), "nothing else is missing"
    assert await letters(strict) == [(POISON, Failure.UNDELIVERABLE, 3)]
    assert strict.hub.figures.undeliverable == 1
    assert "3 times while entry 6 was under way" in caplog.text
    assert "poison" not in caplog.text
    assert await strict.unsettled(b"dev") == []


async def test_a_client_that_acknowledges_late_blames_the_right_one(strict: Broker) -> None:
    """It acknowledges what it was sent when it has taken all of it: so the first one that is not
    acknowledged is innocent, until they are sent one at a time."""
    await strict.sleeper(b"dev", b"t")
    await (await strict.connect()).deliver(b"t", b"a", b"b", POISON, b"c")
    breaks = 0
    client = await strict.connect(b"dev")
    while not (strict.hub.figures.undeliverable and strict.is_idle(b"dev")):
        got = [packet for packet in await client.until_ping() if type(packet) is Publish]
        if any(packet.payload == POISON for packet in got):
            breaks += 1
            await client.cut()
            client = await strict.connect(b"dev")
            continue
        for packet in got:
            client.send(Puback(packet.packet_id))
    assert breaks == 4, "one to begin with, three that are its own"
    assert await letters(strict) == [(POISON, Failure.UNDELIVERABLE, 3)]


async def test_what_was_received_takes_no_blame(strict: Broker) -> None:
    """QoS 2: the PUBREC of the first one came, so it is the second one that breaks the client."""
    await strict.sleeper(b"dev", (b"t", 2))
    await (await strict.connect()).deliver(b"t", b"x", POISON, qos=2)
    client = await strict.connect(b"dev")
    first, _ = await client.publishes(2, ack=False)
    client.send(Pubrec(first.packet_id))
    await client.next(Pubrel)
    for deliveries in (2, 3, 4):
        await client.cut()
        client = await strict.connect(b"dev")
        await client.next(Pubrel)
        if deliveries < 4:
            (again,) = await client.publishes(1, ack=False)
            assert again.payload == POISON
    await strict.turns(lambda: strict.hub.figures.undeliverable)
    assert await letters(strict) == [(POISON, Failure.UNDELIVERABLE, 3)]
    assert await strict.unsettled(b"dev") == [first.packet_id]


async def test_it_is_so_after_restarts_and_crashes_too(strict: Broker) -> None:
    await strict.sleeper(b"dev", b"t")
    await (await strict.connect()).deliver(b"t", b"a", POISON, b"b")
    for n in range(3):
        client = await strict.connect(b"dev")
        while (packet := (await client.publishes(1, ack=False))[0]).payload != POISON:
            client.send(Puback(packet.packet_id))
        await client.cut()
        await strict.hub.committer.drain()
        await (strict.restart() if n else strict.crash_and_restart())
    taken, breaks = await until_done(strict)
    assert breaks == 0
    assert taken == [b"b"]
    assert await letters(strict) == [(POISON, Failure.UNDELIVERABLE, 3)]


async def test_without_the_option_it_is_delivered_for_ever(broker: Broker) -> None:
    await broker.sleeper(b"dev", b"t")
    await (await broker.connect()).deliver(b"t", POISON)
    for _ in range(6):
        client = await broker.connect(b"dev")
        await client.publishes(1, ack=False)
        await client.cut()
    assert await letters(broker) == []


async def test_who_leaves_in_good_order_blames_nothing(strict: Broker) -> None:
    await strict.sleeper(b"dev", b"t")
    await (await strict.connect()).deliver(b"t", b"x")
    for _ in range(6):
        client = await strict.connect(b"dev")
        await client.publishes(1, ack=False)
        await client.disconnect()
    for _ in range(2):
        await strict.restart()
        client = await strict.connect(b"dev")
        await client.publishes(1, ack=False)
    await client.cut()
    client = await strict.connect(b"dev")
    assert [p.payload for p in await client.publishes(1)] == [b"x"]
    assert await letters(strict) == []


async def test_an_mqtt_5_client_may_say_that_it_cannot_take_it(strict: Broker) -> None:
    """A DISCONNECT with a reason of 0x80 or above is a connection that broke."""
    client = await strict.subscriber(b"dev", b"t", version=5)
    await (await strict.connect()).deliver(b"t", POISON)
    for _ in range(3):
        await client.publishes(1, ack=False)
        await client.disconnect(0x99)
        client = await strict.connect(b"dev", version=5)
    await strict.turns(lambda: strict.is_idle(b"dev"))
    await client.quiet()
    assert await letters(strict) == [(POISON, Failure.UNDELIVERABLE, 3)]


async def test_a_qos_2_message_that_was_received_is_not_given_up(strict: Broker) -> None:
    client = await strict.subscriber(b"dev", (b"t", 2))
    await (await strict.connect()).deliver(b"t", b"x", qos=2)
    (packet,) = await client.publishes(1, ack=False)
    client.send(Pubrec(packet.packet_id))
    await client.next(Pubrel)
    for _ in range(5):
        await client.cut()
        client = await strict.connect(b"dev")
        await client.next(Pubrel)
    assert await letters(strict) == []


async def test_a_held_message_may_be_a_dead_letter(strict: Broker) -> None:
    publisher = await strict.connect()
    publisher.publish(b"t", POISON, 1, retain=True)
    await publisher.next(Puback)
    client = await strict.subscriber(b"dev", b"t")
    for _ in range(3):
        await client.publishes(1, ack=False)
        await client.cut()
        client = await strict.connect(b"dev")
    await strict.turns(lambda: strict.is_idle(b"dev"))
    await client.quiet()
    assert await letters(strict) == [(POISON, Failure.UNDELIVERABLE, 3)]
    snapshot = await strict.snapshot(b"dev")
    assert snapshot is not None
    assert snapshot.held == {}


# ----------------------------------------------------------- the same in shared subscriptions

GROUP = b"$share/g/t"


class Team:
    """Members of a group that break when they see the poisonous message, and come back."""

    def __init__(self, broker: Broker, qos: int, *, clean: bool = False) -> None:
        self.broker = broker
        self.qos = qos
        self.clean = clean
        self.here: dict[bytes, Client] = {}
        self.taken: list[bytes] = []
        self.breaks = 0

    async def join(self, *names: bytes, subscribe: bool = True) -> None:
        for name in names:
            client = self.here[name] = await self.broker.connect(name, clean=self.clean)
            if subscribe or self.clean:
                await client.subscribe((GROUP, self.qos))

    async def work(self, name: bytes, *, late: bool = False) -> None:
        """What a member does with all it is sent. late: it acknowledges all of it at the end."""
        client = self.here[name]
        due: list[Any] = []
        for packet in await client.until_ping():
            if type(packet) is Pubrel:
                due.append(Pubcomp(packet.packet_id))
            elif packet.payload == POISON:
                self.breaks += 1
                await client.cut()
                await self.join(name, subscribe=False)
                return
            else:
                self.taken.append(packet.payload)
                kind = Puback if packet.qos == 1 else Pubrec
                due.append(kind(packet.packet_id))
            if not late:
                client.send(*due)
                due.clear()
        client.send(*due)

    async def until_done(self, *, late: bool = False) -> None:
        for _ in range(100):
            for name in list(self.here):
                await self.work(name, late=late)
            await self.broker.hub.committer.drain()
            if not await stored_of_group(self.broker) and await letters(self.broker):
                return
        raise AssertionError("it never ends")


async def stored_of_group(broker: Broker) -> list[Any]:
    record = broker.hub.shared.groups[GROUP].record
    snapshot = await broker.snapshot(record.client_id)
    assert snapshot is not None
    group = broker.hub.shared.groups[GROUP]
    waiting: list[Any] = [*group.backlog.loose, *group.undeliverable]
    return waiting + [d for claim in snapshot.claims for d in claim.deliveries]


BEFORE, AFTER = [b"a%d" % n for n in range(5)], [b"b%d" % n for n in range(50)]


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_message_that_breaks_members_is_a_dead_letter(
    strict: Broker, qos: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever members had it; the other messages of the group go on."""
    team = Team(strict, qos)
    await team.join(b"one", b"two", b"three")
    publisher = await strict.connect()
    await publisher.deliver(b"t", *BEFORE, POISON, *AFTER, qos=qos)
    await team.until_done()
    assert team.breaks == 3
    assert sorted(set(team.taken)) == sorted({*BEFORE, *AFTER}), "nothing else is missing"
    assert await letters(strict) == [(POISON, Failure.UNDELIVERABLE, 3)]
    assert strict.hub.figures.undeliverable == 1
    assert "broke 3 times while entry 6 was under way" in caplog.text
    assert "poison" not in caplog.text
    await publisher.deliver(b"t", b"more", qos=qos)
    for name in team.here:
        await team.work(name)
    assert team.taken[-1] == b"more"


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("stop", ["restart", "crash_and_restart"])
async def test_what_breaks_members_is_counted_over_restarts(
    strict: Broker, qos: int, stop: str
) -> None:
    team = Team(strict, qos)
    await team.join(b"one", b"two")
    await (await strict.connect()).deliver(b"t", b"a", POISON, b"b", qos=qos)
    for breaks in (1, 2, 3):
        while team.breaks < breaks:
            for name in team.here:
                await team.work(name)
        await strict.hub.committer.drain()
        await getattr(strict, stop)()
        await team.join(*team.here, subscribe=False)
    await team.until_done()
    assert team.breaks == 3
    assert set(team.taken) == {b"a", b"b"}
    assert await letters(strict) == [(POISON, Failure.UNDELIVERABLE, 3)]


@pytest.mark.parametrize("qos", [1, 2])
async def test_members_that_acknowledge_late_blame_the_right_one(strict: Broker, qos: int) -> None:
    """What was under way when a connection broke is sent one at a time, to whomever."""
    team = Team(strict, qos)
    await team.join(b"one", b"two")
    await (await strict.connect()).deliver(b"t", *BEFORE, POISON, *AFTER, qos=qos)
    await team.until_done(late=True)
    assert team.breaks in {3, 4}, "one to begin with, three that are its own"
    assert set(team.taken) == {*BEFORE, *AFTER}
    assert await letters(strict) == [(POISON, Failure.UNDELIVERABLE, 3)]


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("poison_is_own", [True, False])
async def test_of_what_a_member_was_sent_besides_the_right_one_is_blamed(
    strict: Broker, qos: int, poison_is_own: bool
) -> None:
    """The session's own deliveries and those of the group are sent to one client."""
    client = await strict.connect(b"dev")
    await client.subscribe((GROUP, qos), (b"own", 1))
    publisher = await strict.connect()
    topics = [b"own", b"t"] if poison_is_own else [b"t", b"own"]
    for topic, payload in zip(topics, (POISON, b"x"), strict=True):
        await publisher.deliver(topic, payload, qos=qos)
    breaks, taken = 0, []
    while not (await letters(strict) and taken):
        for packet in await client.until_ping():
            if type(packet) is not Publish:
                continue
            if packet.payload == POISON:
                breaks += 1
                await client.cut()
                client = await strict.connect(b"dev")
                break
            taken.append(packet.payload)
            client.send((Puback if packet.qos == 1 else Pubrec)(packet.packet_id))
    assert breaks == 3
    assert set(taken) == {b"x"}
    assert await letters(strict) == [(POISON, Failure.UNDELIVERABLE, 3)]


async def test_a_transient_member_that_breaks_blames_it_too(strict: Broker) -> None:
    durable = await strict.connect(b"durable")
    await durable.subscribe((GROUP, 1))
    await durable.disconnect()
    team = Team(strict, 1, clean=True)
    await team.join(b"one", b"two")
    await (await strict.connect()).deliver(b"t", *BEFORE, POISON, *AFTER)
    await team.until_done()
    assert team.breaks == 3
    assert set(team.taken) == {*BEFORE, *AFTER}
    assert await letters(strict) == [(POISON, Failure.UNDELIVERABLE, 3)]


async def test_members_that_leave_in_good_order_blame_nothing(strict: Broker) -> None:
    client = await strict.connect(b"dev")
    await client.subscribe((GROUP, 1))
    await (await strict.connect()).deliver(b"t", b"x")
    for _ in range(6):
        await client.publishes(1, ack=False)
        await client.disconnect()
        client = await strict.connect(b"dev")
    assert [p.payload for p in await client.publishes(1)] == [b"x"]
    assert await letters(strict) == []


async def test_the_letter_of_a_group_that_ends_is_written(strict: Broker) -> None:
    """Its last member breaks, and its session is deleted before the message was read again."""
    client = await strict.connect(b"dev")
    await client.subscribe((GROUP, 1))
    await (await strict.connect()).deliver(b"t", POISON)
    for _ in range(2):
        await client.publishes(1, ack=False)
        await client.cut()
        client = await strict.connect(b"dev")
    await client.publishes(1, ack=False)
    read = strict.store.hang_read()
    await client.cut()
    await read.reached.wait()
    await strict.connect(b"dev", clean=True)
    read.release()
    await strict.turns(lambda: not strict.hub.shared.groups)
    assert await letters(strict) == [(POISON, Failure.UNDELIVERABLE, 3)]


async def test_a_dead_letter_of_a_group_is_tried_again_when_it_could_not_be_read(
    strict: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    client = await strict.connect(b"dev")
    await client.subscribe((GROUP, 1))
    await (await strict.connect()).deliver(b"t", POISON)
    for _ in range(2):
        await client.publishes(1, ack=False)
        await client.cut()
        client = await strict.connect(b"dev")
    await client.publishes(1, ack=False)
    read = strict.store.hang_read()
    await client.cut()
    await read.reached.wait()
    read.release(StoreUnavailable("the disk is away"))
    group = strict.hub.shared.groups[GROUP]
    await strict.turns(lambda: "cannot read" in caplog.text)
    assert group.undeliverable
    group.checkpoint()
    await strict.turns(lambda: not group.undeliverable)
    assert await letters(strict) == [(POISON, Failure.UNDELIVERABLE, 3)]


async def test_the_first_of_what_was_under_way_is_blamed_and_all_of_it_goes_alone(
    strict: Broker,
) -> None:
    """Also after a restart; and nothing else is sent beside it, nor handed to its member."""
    client = await strict.connect(b"dev")
    await client.subscribe((GROUP, 1), (b"own", 1))
    publisher = await strict.connect()
    await publisher.deliver(b"t", b"a", b"b")
    await client.publishes(2, ack=False)
    await client.cut()
    await strict.hub.committer.drain()
    assert [d.attempts for d in (await stored_of_group(strict))[-2:]] == [1, 0]
    await strict.restart()
    client = await strict.connect(b"dev")
    (first,) = await client.publishes(1, ack=False)
    publisher = await strict.connect()
    await publisher.deliver(b"own", b"x")
    await client.quiet()
    other = await strict.connect(b"other")
    await other.subscribe((GROUP, 1))
    await publisher.deliver(b"t", *(b"c%d" % n for n in range(90)))
    await other.publishes(90, ack=False)  # though it has less room than the first one, by now
    client.send(Puback(first.packet_id))
    (second,) = await client.publishes(1, ack=False)
    assert {first.payload, second.payload} == {b"a", b"b"}
    await client.quiet()
    client.send(Puback(second.packet_id))
    assert await client.payloads(1) == [b"x"]


async def test_what_is_sent_alone_of_the_session_goes_without_the_group(strict: Broker) -> None:
    client = await strict.connect(b"dev")
    await client.subscribe((GROUP, 1), (b"own", 1))
    publisher = await strict.connect()
    await publisher.deliver(b"own", b"a", b"b")
    await client.publishes(2, ack=False)
    await client.cut()
    client = await strict.connect(b"dev")
    (first,) = await client.publishes(1, ack=False)
    await publisher.deliver(b"t", b"x")
    await client.quiet()
    client.send(Puback(first.packet_id))
    assert set(await client.payloads(2)) == {b"b", b"x"}


async def test_a_crash_before_the_letter_of_a_group_is_written_costs_nothing(
    strict: Broker,
) -> None:
    client = await strict.connect(b"dev")
    await client.subscribe((GROUP, 2))
    await (await strict.connect()).deliver(b"t", POISON, qos=2)
    for _ in range(2):
        await client.publishes(1, ack=False)
        await client.cut()
        client = await strict.connect(b"dev")
    await client.publishes(1, ack=False)
    read = strict.store.hang_read()
    await client.cut()
    await read.reached.wait()
    await strict.hub.committer.drain()
    await strict.crash()
    read.release(StoreUnavailable("it is gone"))
    await strict.start()
    client = await strict.connect(b"dev")
    await strict.turns(lambda: not strict.hub.shared.groups[GROUP].rows.stored)
    await client.quiet()
    assert await letters(strict) == [(POISON, Failure.UNDELIVERABLE, 3)]


async def test_a_transient_member_blames_what_it_was_sent_first(strict: Broker) -> None:
    """A message of the group waits for its claim; one of its own is sent meanwhile."""
    await strict.sleeper(b"durable", (GROUP, 1))
    publisher = await strict.connect(clean=True)
    client = await strict.connect(b"dev", clean=True)
    await client.subscribe((GROUP, 1), (b"own", 1))
    gate = strict.store.hang_submit()
    publisher.publish(b"t", b"x")
    await gate.reached.wait()
    publisher.publish(b"own", b"y")
    assert [p.payload for p in await client.publishes(1, ack=False)] == [b"y"]
    gate.release()
    assert [p.payload for p in await client.publishes(1, ack=False)] == [b"x"]
    await client.cut()
    await strict.hub.committer.drain()
    assert [f.attempts for f in strict.hub.shared.groups[GROUP].backlog.loose] == [0]


async def test_what_a_transient_member_has_of_its_own_waits_too(strict: Broker) -> None:
    await strict.sleeper(b"durable", (GROUP, 1))
    publisher = await strict.connect(clean=True)
    client = await strict.connect(b"dev", clean=True)
    await client.subscribe((GROUP, 1))
    await publisher.deliver(b"t", b"a")
    await client.publishes(1, ack=False)
    await client.cut()
    client = await strict.connect(b"dev", clean=True)
    await client.subscribe((GROUP, 1), (b"own", 1))
    (alone,) = await client.publishes(1, ack=False)
    assert alone.payload == b"a"
    await publisher.deliver(b"own", b"x")
    await client.quiet()
    client.send(Puback(alone.packet_id))
    assert await client.payloads(1) == [b"x"]

"""A position of the client's own: SUBSCRIBE with User Properties reads the history from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from broker_ext.feed import FEEDS_MAX
from broker_ext.wire import Disconnect, Properties, Puback, Publish, Suback
from broker_ext.wire.properties import (
    MESSAGE_EXPIRY_S,
    REASON_STRING,
    RECEIVE_MAX,
    SUBSCRIPTION_ID,
    USER_PROPERTY,
)
from storage.errors import StoreUnavailable
from tests.broker.mqtt import running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from storage.api import Position
    from tests.broker.mqtt import Broker, Client

REFUSED = 0x83


@pytest.fixture
async def kept() -> AsyncIterator[Broker]:
    """A broker that always logs k/#."""
    async with running(history_filters=("k/#",), retain_for_s=1000.0) as broker:
        yield broker


def asking(*pairs: tuple[bytes, bytes], **more: Any) -> Properties:
    identifier = ((SUBSCRIPTION_ID, more["identifier"]),) if more else ()
    return Properties((*identifier, *((USER_PROPERTY, pair) for pair in pairs)))


def after(position: Position | tuple[str, int], **more: Any) -> Properties:
    generation, offset = (
        position if isinstance(position, tuple) else (position.generation, position.offset)
    )
    return asking(
        (b"resume-generation", generation.encode()),
        (b"resume-position", str(offset).encode()),
        **more,
    )


def last(count: int, **more: Any) -> Properties:
    return asking((b"previous-count", str(count).encode()), **more)


def place(packet: Publish) -> tuple[str, int] | None:
    """The position that a delivery carries."""
    pairs = dict(packet.properties.all(USER_PROPERTY)) if packet.properties else {}
    if b"position" not in pairs:
        return None
    return pairs[b"generation"].decode(), int(pairs[b"position"])


async def reader(broker: Broker, **options: Any) -> Client:
    return await broker.connect(b"r", clean=True, version=5, **options)


async def publisher(broker: Broker) -> Client:
    return await broker.connect(b"p", clean=True, version=5)


async def ask(client: Client, properties: Properties, *filters: Any) -> Suback:
    client.send_subscribe(*filters, properties=properties)
    return await client.next(Suback)


def verdict(suback: Suback) -> tuple[bytes, dict[bytes, bytes]]:
    assert suback.properties is not None
    return suback.properties.get(REASON_STRING), dict(suback.properties.all(USER_PROPERTY))


async def test_a_client_goes_on_from_its_own_position(kept: Broker) -> None:
    broker = kept
    sender = await publisher(broker)
    for number in range(10):
        await sender.deliver(b"k/%d" % (number % 3), b"%d" % number, qos=1 + number % 2)
    client = await reader(broker)
    suback = await ask(client, last(4), (b"k/#", 2))
    assert suback.reasons == b"\2"
    got = await client.publishes(4)
    assert [p.payload for p in got] == [b"6", b"7", b"8", b"9"]
    assert [p.qos for p in got] == [1, 2, 1, 2]
    generation = broker.hub.opened.log.generation
    assert [place(p) for p in got] == [(generation, n) for n in (7, 8, 9, 10)]
    await client.cut()
    await sender.deliver(b"k/0", b"while away")
    client = await reader(broker)
    assert (await ask(client, after((generation, 8)), (b"k/#", 2))).reasons == b"\2"
    await sender.deliver(b"k/0", b"live")
    got = await client.publishes(4)
    assert [(p.payload, place(p)) for p in got] == [
        (b"8", (generation, 9)),
        (b"9", (generation, 10)),
        (b"while away", (generation, 11)),
        (b"live", (generation, 12)),
    ]
    assert not any(p.retain or p.dup for p in got)
    await client.quiet()


async def test_a_position_holds_over_a_restart(disk: Any) -> None:
    async with running(disk, history_filters=("k/#",), retain_for_s=1000.0) as broker:
        sender = await publisher(broker)
        await sender.deliver(b"k/1", *(b"%d" % n for n in range(5)))
        client = await reader(broker)
        await ask(client, last(5), b"k/#")
        got = await client.publishes(5, ack=False)
        position = place(got[2])
        assert position is not None
        await broker.crash_and_restart()
        client = await reader(broker)
        assert (await ask(client, after(position), b"k/#")).reasons == b"\1"
        assert await client.payloads(2) == [b"3", b"4"]


async def test_who_does_not_ask_is_told_no_position(kept: Broker) -> None:
    client = await reader(kept)
    unrelated = asking((b"resume", b"maybe"), (b"position", b"7"))
    assert (await ask(client, unrelated, (b"k/#", 1))).reasons == b"\1"
    sender = await publisher(kept)
    await sender.deliver(b"k/1", b"m")
    (packet,) = await client.publishes(1)
    assert packet.properties is None


async def test_a_delivery_keeps_its_properties_identifiers_and_options(kept: Broker) -> None:
    client = await reader(kept)
    properties = last(0, identifier=5)
    assert (await ask(client, properties, (b"k/#", 1 | 0x08))).reasons == b"\1"
    sender = await publisher(kept)
    sent = Properties(((MESSAGE_EXPIRY_S, 60), (USER_PROPERTY, (b"position", b"theirs"))))
    sender.publish(b"k/1", b"m", 1, retain=True, properties=sent)
    (packet,) = await client.publishes(1)
    assert packet.retain
    assert packet.properties is not None
    assert packet.properties.get(SUBSCRIPTION_ID) == 5
    assert packet.properties.get(MESSAGE_EXPIRY_S) == 60
    assert packet.properties.all(USER_PROPERTY) == (
        (b"position", b"1"),
        (b"generation", kept.hub.opened.log.generation.encode()),
        (b"position", b"theirs"),
    )


async def test_qos_0_messages_come_live_without_a_position(kept: Broker) -> None:
    client = await reader(kept)
    await ask(client, last(0), (b"k/#", 2))
    sender = await publisher(kept)
    await sender.deliver(b"k/1", b"0", qos=0)
    await sender.deliver(b"k/1", b"1", qos=1)
    got = sorted(await client.publishes(2), key=lambda p: p.payload)
    assert [(p.qos, place(p) is None) for p in got] == [(0, True), (1, False)]
    await client.quiet()


async def test_a_granted_qos_0_reads_the_history_too(kept: Broker) -> None:
    sender = await publisher(kept)
    await sender.deliver(b"k/1", b"1", qos=2)
    client = await reader(kept)
    assert (await ask(client, last(1), (b"k/#", 0))).reasons == b"\0"
    (packet,) = await client.publishes(1)
    assert (packet.qos, place(packet)) == (0, (kept.hub.opened.log.generation, 1))


async def test_no_local_holds_for_what_is_read(kept: Broker) -> None:
    client = await reader(kept)
    await client.deliver(b"k/1", b"own")
    sender = await publisher(kept)
    await sender.deliver(b"k/1", b"other")
    await ask(client, last(2), (b"k/#", 1 | 0x04))
    assert await client.payloads(1) == [b"other"]
    await client.deliver(b"k/1", b"own again")
    await client.quiet()


async def test_what_waits_for_a_slow_reader_is_a_position(kept: Broker) -> None:
    sender = await publisher(kept)
    for _ in range(20):
        await sender.deliver(b"k/1", *(bytes(100) for _ in range(100)))
    client = await reader(kept, properties=Properties(((RECEIVE_MAX, 2),)))
    await ask(client, last(2_000), b"k/#")
    got = await client.publishes(2, ack=False)
    await client.quiet()
    session: Any = kept.hub.registry.owners[b"r"]
    assert not session._queue
    for packet in got:
        client.send(Puback(packet.packet_id))
    got += await client.publishes(1_998)
    offsets = [found[1] for p in got if (found := place(p)) is not None]
    assert offsets == list(range(1, 2_001))


# ----------------------------------------------------------------------------- what is refused


async def test_a_position_whose_messages_are_gone_is_refused() -> None:
    async with running(history_filters=("k/#",), max_messages=3) as broker:
        sender = await publisher(broker)
        for number in range(10):
            await sender.deliver(b"k/1", b"%d" % number)
        await broker.hub._prune()
        await broker.restart()  # so that none is left in memory
        client = await reader(broker)
        generation = broker.hub.opened.log.generation
        suback = await ask(client, after((generation, 3)), b"k/#", b"k/2")
        assert suback.reasons == bytes((REFUSED, REFUSED))
        text, pairs = verdict(suback)
        assert text == b"resume: 410 history-pruned"
        assert pairs == {b"resume": b"410 history-pruned", b"position": b"3", b"floor": b"7"}
        assert (await ask(client, after((generation, 3)), b"k/2")).reasons == b"\1"  # lost nothing
        assert (await ask(client, after((generation, 7)), b"k/#")).reasons == b"\1"
        assert await client.payloads(3) == [b"7", b"8", b"9"]
        assert broker.hub.figures.feeds_refused == 1


async def test_a_position_of_another_generation_or_ahead_is_refused(kept: Broker) -> None:
    client = await reader(kept)
    generation = kept.hub.opened.log.generation
    suback = await ask(client, after(("0" * 32, 0)), b"k/#")
    assert suback.reasons == bytes((REFUSED,))
    text, pairs = verdict(suback)
    assert text == b"resume: 409 generation-changed"
    assert pairs[b"generation"] == generation.encode()
    suback = await ask(client, after((generation, 1)), b"k/#")
    assert verdict(suback)[0] == b"resume: 409 position-ahead"
    assert not kept.hub.registry.owners[b"r"].subscriptions


async def test_a_filter_that_is_not_always_logged_cannot_be_resumed(kept: Broker) -> None:
    await kept.sleeper(b"s", b"#")
    sender = await publisher(kept)
    await sender.deliver(b"other", b"m")
    client = await reader(kept)
    suback = await ask(client, after((kept.hub.opened.log.generation, 0)), b"other")
    assert verdict(suback)[0] == b"resume: 410 history-pruned"
    assert (await ask(client, last(1), b"other")).reasons == b"\1"  # what there is
    assert await client.payloads(1) == [b"m"]


@pytest.mark.parametrize(
    ("pairs", "what"),
    [
        (((b"resume-position", b"7"),), b"incomplete"),
        (((b"resume-generation", b"0"),), b"incomplete"),
        (((b"previous-count", b"1"), (b"resume-position", b"7")), b"incomplete"),
        (((b"previous-count", b"1"), (b"previous-count", b"1")), b"asked-twice"),
        (((b"previous-count", b"-1"),), b"not-a-number"),
        (((b"previous-count", b""),), b"not-a-number"),
        (((b"previous-count", "٣".encode()),), b"not-a-number"),
        (((b"previous-count", b"9" * 500),), b"not-a-number"),
        (((b"previous-count", b"100001"),), b"previous-count-too-large"),
        (((b"resume-generation", b"0"), (b"resume-position", b"0x7")), b"not-a-number"),
    ],
)
async def test_what_cannot_be_understood_is_refused(
    kept: Broker, pairs: tuple[tuple[bytes, bytes], ...], what: bytes
) -> None:
    client = await reader(kept)
    suback = await ask(client, asking(*pairs), b"k/#", b"forbidden")
    assert suback.reasons == bytes((REFUSED, 0x87))
    assert verdict(suback)[0] == b"resume: 400 " + what
    await client.quiet()


async def test_a_session_that_is_kept_has_a_position_of_its_own(kept: Broker) -> None:
    client = await kept.connect(b"d", version=5)
    suback = await ask(client, last(0), b"k/#")
    assert suback.reasons == bytes((REFUSED,))
    assert verdict(suback)[0] == b"resume: 400 stored-session"


async def test_only_what_the_client_may_subscribe_is_read(kept: Broker) -> None:
    kept.hub.router.guarded = True
    sender = await publisher(kept)
    await kept.sleeper(b"s", b"#")
    await sender.deliver(b"secret", b"m")
    await sender.deliver(b"open", b"m")
    client = await reader(kept)
    suback = await ask(client, last(2), b"#", b"forbidden/x")
    assert suback.reasons == b"\1\x87"
    assert [p.topic for p in await client.publishes(1)] == [b"open"]
    await client.quiet()


async def test_readers_of_one_client_are_bounded(kept: Broker) -> None:
    client = await reader(kept)
    for number in range(FEEDS_MAX):
        assert (await ask(client, last(0), b"k/%d" % number)).reasons == b"\1"
    assert (await ask(client, last(0), b"k/x")).reasons[0] == 0x97
    assert await client.unsubscribe(b"k/0") == b"\0"
    assert (await ask(client, last(0), b"k/x")).reasons == b"\1"


# ------------------------------------------------------------------------------ how it ends


async def test_a_loss_while_reading_ends_the_connection_with_the_verdict() -> None:
    async with running(history_filters=("k/#",), max_messages=20) as broker:
        sender = await publisher(broker)
        await sender.deliver(b"k/1", *(bytes(100_000) for _ in range(10)))
        await broker.restart()
        sender = await publisher(broker)
        client = await reader(broker, properties=Properties(((RECEIVE_MAX, 1),)))
        await ask(client, last(10), b"k/#")
        (packet,) = await client.publishes(1, ack=False)
        for _ in range(60):  # more than is kept in memory
            await sender.deliver(b"k/1", *(bytes(10_000) for _ in range(10)))
        await broker.hub._prune()
        client.send(Puback(packet.packet_id))
        while not isinstance(packet := await client.any(), Disconnect):
            client.send(Puback(packet.packet_id))
        assert packet.reason == REFUSED
        assert packet.properties is not None
        assert packet.properties.get(REASON_STRING) == b"resume: 410 history-pruned"
        await client.closed()


async def test_a_store_that_does_not_answer_refuses_or_closes(kept: Broker) -> None:
    sender = await publisher(kept)
    await sender.deliver(b"k/1", b"m")
    await kept.restart()
    client = await reader(kept)
    kept.store.fail_read(StoreUnavailable("I/O error"))
    suback = await ask(client, after((kept.hub.opened.log.generation, 0)), b"k/#")
    assert suback.reasons == b"\x80"
    kept.store.heal()
    assert (await ask(client, last(1), b"k/#")).reasons == b"\1"
    assert await client.payloads(1) == [b"m"]


async def test_a_filter_is_served_by_the_newest_subscribe(kept: Broker) -> None:
    client = await reader(kept)
    sender = await publisher(kept)
    await client.subscribe(b"k/1")
    await ask(client, last(0), b"k/1", b"k/2")
    await sender.deliver(b"k/1", b"by position")
    (packet,) = await client.publishes(1)
    assert place(packet) is not None
    await client.subscribe(b"k/1")
    await sender.deliver(b"k/1", b"as ever")
    (packet,) = await client.publishes(1)
    assert place(packet) is None
    await sender.deliver(b"k/2", b"by position")
    (packet,) = await client.publishes(1)
    assert place(packet) is not None
    assert await client.unsubscribe(b"k/2", b"k/1", b"k/1") == b"\0\0\x11"
    await sender.deliver(b"k/1", b"to nobody")
    await sender.deliver(b"k/2", b"to nobody")
    await client.quiet()


async def test_a_reader_leaves_nothing_behind(broker: Broker) -> None:
    for end in ("disconnect", "cut", "takeover"):
        client = await reader(broker)
        await ask(client, last(0), b"a/#", b"b")
        assert broker.hub.router._places.size == 2
        if end == "takeover":
            await broker.connect(b"r", clean=True)
            await client.closed()
        else:
            await getattr(client, end)()
        assert broker.hub.router._places.size == 0
        assert not broker.hub.history._open

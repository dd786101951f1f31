"""What amqtt's plugins may call and look at: ``BrokerContext``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from amqtt.broker import RetainedApplicationMessage

from broker_ext.seam import shown as showing
from broker_ext.wire import Puback
from tests.seam.amqtt_broker import running

if TYPE_CHECKING:
    from pathlib import Path

    from tests.seam.amqtt_broker import Running


def shown(broker: Running) -> dict[str, list[tuple[str | None, int]]]:
    """``context.subscriptions`` by client id."""
    return {
        topic_filter: [(session.client_id, qos) for session, qos in sessions]
        for topic_filter, sessions in broker.context.subscriptions.items()
    }


async def test_broadcast_message_reaches_the_connected_and_waits_for_the_sleeping(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as broker:
        sleeper = await broker.subscriber(b"sleeper", (b"a", 1))
        await sleeper.disconnect()
        awake = await broker.subscriber(b"awake", (b"a", 2), clean=True)
        await broker.context.broadcast_message("a", b"as granted")
        await broker.context.broadcast_message("a", b"at most once", 0)
        await broker.context.broadcast_message("a", b"at least once", 1)
        got = await awake.publishes(3)
        assert [(p.payload, p.qos) for p in got] == [
            (b"as granted", 2),
            (b"at most once", 0),
            (b"at least once", 1),
        ]
        sleeper = await broker.connect(b"sleeper")
        got = await sleeper.publishes(3)
        assert sorted((p.payload, p.qos) for p in got) == [
            (b"as granted", 1),
            (b"at least once", 1),
            (b"at most once", 0),
        ]


async def test_broadcast_message_is_stored_when_it_returns(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await broker.subscriber(b"device", (b"a", 1))
        await broker.context.broadcast_message("a", b"x")
        chunk = await broker.hub.store.read(0, lambda _: 2, entries_max=10, bytes_max=1000)
        assert [entry.payload for entry, _ in chunk.entries] == [b"x"]


NO_TOPICS = ["", "a/#", "a/+", "a\0b", "\ud800"]
LONG = {"long": 65_536 * "x", "long in bytes": 21_846 * "\u20ac"}


@pytest.mark.parametrize(
    "topic", [*NO_TOPICS, *(pytest.param(topic, id=name) for name, topic in LONG.items())]
)
async def test_nothing_is_published_to_what_is_no_topic_name(tmp_path: Path, topic: str) -> None:
    async with running(tmp_path) as broker:
        with pytest.raises(ValueError, match=r"."):
            await broker.context.broadcast_message(topic, b"x")
        with pytest.raises(ValueError, match=r"."):
            await broker.context.retain_message(topic, b"x")


@pytest.mark.parametrize("qos", [-1, 3, 4])
async def test_nothing_is_published_with_what_is_no_qos(tmp_path: Path, qos: int) -> None:
    async with running(tmp_path) as broker:
        await broker.subscriber(b"device", (b"a", 1))
        with pytest.raises(ValueError, match="QoS"):
            await broker.context.broadcast_message("a", b"x", qos)
        with pytest.raises(ValueError, match="QoS"):
            await broker.context.retain_message("a", b"x", qos)


async def test_retain_message_is_kept_shown_and_delivered(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await broker.context.retain_message("a", b"kept", 1)
        message = broker.context.retained_messages["a"]
        assert (message.data, message.qos) == (b"kept", 1)
        client = await broker.subscriber(b"device", (b"a", 2))
        (packet,) = await client.publishes(1)
        assert (packet.payload, packet.qos, packet.retain) == (b"kept", 1, True)
        await broker.context.retain_message("a", b"")
        assert "a" not in broker.context.retained_messages
        assert await client.subscribe((b"a", 2)) == b"\x02"
        await client.quiet()
    async with running(tmp_path) as broker:
        assert dict(broker.context.retained_messages) == {}


async def test_retained_messages_show_what_clients_retained_and_what_was_stored(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as broker:
        client = await broker.connect(b"device")
        for topic in (b"a", b"b"):
            client.publish(topic, b"of " + topic, retain=True)
            await client.next(Puback)
        client.publish(b"a", b"", retain=True)
        await client.next(Puback)
        assert list(broker.context.retained_messages) == ["b"]
    async with running(tmp_path) as broker:
        message = broker.context.retained_messages["b"]
        assert (message.topic, message.data, message.qos) == ("b", b"of b", 1)


async def test_a_retained_message_names_the_session_of_its_publisher(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await broker.connect(b"device", clean=True)
        client.publish(b"a", b"x", retain=True)
        await client.next(Puback)
        message = broker.context.retained_messages["a"]
        assert message.source_session is broker.context.get_session("device")
        await client.disconnect()
        await broker.context.retain_message("b", b"x")
        assert broker.context.retained_messages["b"].source_session is None
    async with running(tmp_path) as broker:
        session = broker.context.retained_messages["a"].source_session
        assert session is not None
        assert session.client_id == "device"


async def test_amqtts_monitor_takes_away_what_amqtt_would_not_keep(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await broker.subscriber(b"device", (b"a", 1))
        await client.disconnect()
        async with asyncio.timeout(10):
            while broker.context.get_session("device") is not None:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
        assert shown(broker) == {}
        again = await broker.connect(b"device")  # anonymous, and as durable as any other
        assert again.connack.session_present


async def test_what_a_plugin_puts_into_retained_messages_is_retained(tmp_path: Path) -> None:
    """As amqtt's SessionDBPlugin does when it restores."""
    async with running(tmp_path) as broker:
        retained = broker.context.retained_messages
        retained["a"] = RetainedApplicationMessage(None, "a", b"put", 1)
        retained["b"] = RetainedApplicationMessage(None, "b", b"put", None)
        assert sorted(retained) == ["a", "b"]
        del retained["b"]
        with pytest.raises(KeyError):
            del retained["b"]
        client = await broker.subscriber(b"device", (b"#", 1))
        assert await client.payloads(1) == [b"put"]
        await client.quiet()
    async with running(tmp_path) as broker:
        assert list(broker.context.retained_messages) == ["a"]


async def test_sessions_and_subscriptions_show_the_connected_and_those_at_rest(
    tmp_path: Path,
) -> None:
    plugins = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": False}}
    async with running(tmp_path, plugins=plugins) as broker:
        context = broker.context
        one = await broker.subscriber(b"one", (b"a", 1), (b"b", 2), user=b"u")
        two = await broker.subscriber(b"two", (b"a", 0), user=b"u", clean=True)
        assert {s.client_id for s in context.sessions} == {"one", "two"}
        assert shown(broker) == {"a": [("one", 1), ("two", 0)], "b": [("one", 2)]}
        view = context.get_session("one")
        assert view is not None
        assert view.username == "u"
        assert context.get_session("three") is None

        await one.subscribe((b"b", 0))
        await one.unsubscribe(b"a")
        assert shown(broker) == {"a": [("two", 0)], "b": [("one", 0)]}

        await one.disconnect()
        await two.disconnect()
        await broker.left(b"one")
        await broker.left(b"two")
        await broker.broker._cleanup_session("two")  # as amqtt's monitor does with a clean one
        assert [s.client_id for s in context.sessions] == ["one"]
        assert shown(broker) == {"b": [("one", 0)]}
        view = context.get_session("one")
        assert view is not None
        assert view.transitions.state == "disconnected"
        assert view.last_disconnect_time is not None

        await broker.connect(b"one", user=b"u")
        view = context.get_session("one")
        assert view is not None
        assert view.transitions.state == "connected"
        assert shown(broker) == {"b": [("one", 0)]}


async def test_sessions_at_rest_that_are_shown_have_a_maximum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(showing, "AT_REST_SHOWN_MAX", 3)
    plugins = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": False}}
    async with running(tmp_path, plugins=plugins) as broker:
        for number in range(5):
            client = await broker.subscriber(b"%d" % number, (b"a", 1), user=b"u")
            await client.disconnect()
            await broker.left(b"%d" % number)
        assert [s.client_id for s in broker.context.sessions] == ["2", "3", "4"]
        assert shown(broker) == {"a": [("2", 1), ("3", 1), ("4", 1)]}
        await broker.context.add_subscription("x", None, None)
        assert [s.client_id for s in broker.context.sessions] == ["3", "4", "x"]
        again = await broker.connect(b"0", user=b"u")  # shown or not, it is stored
        assert again.connack.session_present


async def test_messages_in_flight_are_counted_in_the_session(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await broker.subscriber(b"device", (b"a", 1))
        client.publish(b"a", b"x")
        client.publish(b"b", b"x", qos=2)
        await client.until_ping()
        view = broker.context.get_session("device")
        assert view is not None
        assert (view.inflight_out_count, view.inflight_in_count) == (1, 1)


async def test_add_subscription_for_a_connected_client(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await broker.connect(b"device")
        await broker.context.add_subscription("device", "a/#", 1)
        assert shown(broker) == {"a/#": [("device", 1)]}
        await broker.context.broadcast_message("a/b", b"x")
        assert await client.payloads(1) == [b"x"]
        await client.disconnect()
        await broker.context.broadcast_message("a/b", b"y")
        client = await broker.connect(b"device")
        assert await client.payloads(1) == [b"y"]


async def test_add_subscription_for_a_client_nobody_has_seen(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        context = broker.context
        await context.add_subscription("device", None, None)
        assert [s.client_id for s in context.sessions] == ["device"]
        await context.add_subscription("device", "a", 1)
        await context.add_subscription("device", "b", 2)
        await context.add_subscription("device", "b", 0)
        await context.broadcast_message("a", b"x", 1)
        await context.broadcast_message("b", b"not kept", 1)
    async with running(tmp_path) as broker:
        client = await broker.connect(b"device", user=b"u")
        assert client.connack.session_present
        assert await client.payloads(1) == [b"x"]
        await broker.context.broadcast_message("b", b"y", 1)
        (packet,) = await client.publishes(1)
        assert (packet.payload, packet.qos) == (b"y", 0)


async def test_add_subscription_for_a_session_at_rest_keeps_its_owner(tmp_path: Path) -> None:
    plugins = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": False}}
    async with running(tmp_path, plugins=plugins) as broker:
        client = await broker.subscriber(b"device", (b"a", 1), user=b"alice")
        await client.disconnect()
        await broker.left(b"device")
        await broker.context.broadcast_message("a", b"1")
        await broker.context.add_subscription("device", "b", 1)
        await broker.context.broadcast_message("b", b"2")
        other = await broker.dial()
        assert (await other.connect(b"device", user=b"bob")).reason == 5
        client = await broker.connect(b"device", user=b"alice")
        assert await client.payloads(2) == [b"1", b"2"]


@pytest.mark.parametrize(
    ("client_id", "topic_filter", "qos"),
    [
        *(("device", f, 1) for f in ("", "a#", "a/#/b", "+a", "a\0", "a" * 65_536, "$share/g/a")),
        *(("device", "a", qos) for qos in (-1, 3)),
        *((c, "a", 1) for c in ("", "c\0", "c" * 1025)),
    ],
)
async def test_add_subscription_refuses_what_no_client_could_send(
    tmp_path: Path, client_id: str, topic_filter: str, qos: int
) -> None:
    async with running(tmp_path) as broker:
        await broker.connect(b"device")
        await broker.context.add_subscription(client_id, topic_filter, qos)
        assert shown(broker) == {}
        assert await broker.hub.store.snapshot(client_id.encode()) in (
            None,
            await broker.hub.store.snapshot(b"device"),
        )


async def test_what_a_plugin_queues_for_a_session_at_rest_is_delivered(tmp_path: Path) -> None:
    """As amqtt's SessionDBPlugin does when it restores; but it is no retained message."""
    async with running(tmp_path) as broker:
        await broker.context.add_subscription("device", "a", 1)
        view = broker.context.get_session("device")
        assert view is not None
        for number in (1, 0):
            queued: Any = RetainedApplicationMessage(None, "a", b"queued", number)
            await view.retained_messages.put(queued)
        client = await broker.connect(b"device")
        got = await client.publishes(2)
        assert sorted((p.payload, p.qos, p.retain) for p in got) == [
            (b"queued", 0, False),
            (b"queued", 1, False),
        ]
        await client.disconnect()
        await (await broker.connect(b"device")).quiet()


async def test_after_the_stop_contexts_do_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        context = broker.context
        await broker.subscriber(b"device", (b"a", 1))
    await context.broadcast_message("a", b"late")
    await context.retain_message("a", b"late")
    await context.add_subscription("other", "a", 1)
    async with running(tmp_path) as broker:
        assert dict(broker.context.retained_messages) == {}
        await (await broker.connect(b"device")).quiet()
        assert not (await broker.connect(b"other")).connack.session_present

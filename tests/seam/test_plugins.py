"""amqtt's own plugins beside ours: authentication, topics, $SYS, loggers, events."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from amqtt.broker import Broker, BrokerContext
from amqtt.mqtt.connect import ConnectPacket
from amqtt.mqtt.publish import PublishPacket
from amqtt.plugins.base import BasePlugin
from amqtt.plugins.topic_checking import TopicAccessControlListPlugin

from broker_ext import DurableSessionPlugin
from broker_ext.wire import Puback, Pubcomp, Pubrec, Pubrel
from tests.broker.mqtt import will
from tests.seam.amqtt_broker import ANONYMOUS, running

if TYPE_CHECKING:
    from pathlib import Path

    from amqtt.session import Session

FILE = "amqtt.plugins.authentication.FileAuthPlugin"
ANONYMOUS_PLUGIN = next(iter(ANONYMOUS))
NOT_AUTHORIZED = 5


# ---------------------------------------------------------------------------- authentication


async def test_anonymous_clients_are_accepted_where_they_are_allowed(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await broker.connect(b"device")
        view = broker.context.get_session("device")
        assert view is not None
        assert view.is_anonymous
        await client.disconnect()
        assert (await broker.connect(b"device")).connack.session_present


async def test_anonymous_clients_are_refused_where_they_are_not(tmp_path: Path) -> None:
    plugins = {ANONYMOUS_PLUGIN: {"allow_anonymous": False}}
    async with running(tmp_path, plugins=plugins) as broker:
        client = await broker.dial()
        assert (await client.connect(b"device")).reason == NOT_AUTHORIZED
        await client.closed()
        named = await broker.connect(b"device", user=b"somebody")
        assert not named.connack.session_present


async def test_without_an_authentication_plugin_nobody_is_accepted(tmp_path: Path) -> None:
    async with running(tmp_path, plugins={}) as broker:
        client = await broker.dial()
        assert (await client.connect(b"device")).reason == NOT_AUTHORIZED


@pytest.mark.parametrize(
    ("user", "password", "code"),
    [
        (b"alice", b"alicealice", 0),
        (b"alice", b"wrong", NOT_AUTHORIZED),
        (b"alice", None, NOT_AUTHORIZED),
        (b"mallory", b"alicealice", NOT_AUTHORIZED),
        (None, None, NOT_AUTHORIZED),
    ],
)
async def test_file_auth(
    tmp_path: Path, password_file: Path, user: bytes | None, password: bytes | None, code: int
) -> None:
    plugins = {FILE: {"password_file": str(password_file)}}
    async with running(tmp_path, plugins=plugins) as broker:
        client = await broker.dial()
        assert (await client.connect(b"device", user=user, password=password)).reason == code


# ------------------------------------------------------------------------------------ topics


class Lists(TopicAccessControlListPlugin):
    """The plugin with the option that its Config lacks."""

    @dataclass
    class Config:  # noqa: D106 - the base's
        publish_acl: dict[str, list[str]] = field(default_factory=dict)
        subscribe_acl: dict[str, list[str]] = field(default_factory=dict)
        receive_acl: dict[str, list[str]] = field(default_factory=dict)


def lists(**acl: dict[str, list[str]]) -> dict[str, Any]:
    everything = {user: ["#"] for user in ("alice", "bob")}
    given = {"publish_acl": everything, "subscribe_acl": everything, "receive_acl": everything}
    return {
        ANONYMOUS_PLUGIN: {"allow_anonymous": False},
        "tests.seam.test_plugins.Lists": given | acl,
    }


async def test_a_message_that_may_not_be_published_is_acknowledged_and_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "amqtt_durable")
    plugins = lists(publish_acl={"alice": ["allowed/#"]})
    async with running(tmp_path, plugins=plugins) as broker:
        bob = await broker.subscriber(b"bob", (b"#", 2), user=b"bob")
        alice = await broker.connect(b"alice", user=b"alice")
        for _ in range(3):
            await alice.deliver(b"secret/a", b"hidden", qos=1)
        await alice.deliver(b"secret/a", b"hidden", qos=2)
        alice.publish(b"secret/a", b"hidden", qos=0)
        await alice.deliver(b"allowed/a", b"1", qos=1)
        await alice.deliver(b"allowed/a", b"2", qos=2)
        assert await bob.payloads(2) == [b"1", b"2"]
    assert caplog.text.count("not allowed to publish to TOPIC secret/a") == 1


async def test_a_will_that_may_not_be_published_is_dropped(tmp_path: Path) -> None:
    plugins = lists(publish_acl={"alice": ["allowed/#"], "bob": ["#"]})
    async with running(tmp_path, plugins=plugins) as broker:
        bob = await broker.subscriber(b"bob", (b"#", 1), user=b"bob")
        for topic in (b"secret/a", b"allowed/a"):
            alice = await broker.connect(topic, user=b"alice", will=will(topic, topic))
            alice._writer.transport.abort()
            await broker.left(topic)
        assert await bob.payloads(1) == [b"allowed/a"]
        await bob.quiet()


async def test_a_filter_that_may_not_be_subscribed_is_refused(tmp_path: Path) -> None:
    plugins = lists(subscribe_acl={"alice": ["allowed/#"]})
    async with running(tmp_path, plugins=plugins) as broker:
        alice = await broker.connect(b"alice", user=b"alice")
        assert await alice.subscribe((b"#", 1), (b"allowed/a", 1), (b"x", 0)) == b"\x80\x01\x80"


@pytest.mark.parametrize("clean", [True, False])
async def test_what_may_not_be_received_is_not_delivered_live(tmp_path: Path, clean: bool) -> None:
    plugins = lists(receive_acl={"alice": ["allowed/#"]})
    async with running(tmp_path, plugins=plugins) as broker:
        alice = await broker.subscriber(b"alice", (b"#", 2), user=b"alice", clean=clean)
        bob = await broker.connect(b"bob", user=b"bob")
        for number in range(20):
            topic = b"allowed/a" if number % 2 else b"secret/a"
            await bob.deliver(topic, b"%d" % number, qos=number % 3)
        got = sorted(int(p) for p in await alice.payloads(10))
        assert got == list(range(1, 20, 2))
        await alice.quiet()


async def test_what_may_not_be_received_is_not_delivered_from_the_backlog(tmp_path: Path) -> None:
    plugins = lists(receive_acl={"alice": ["allowed/#"]})
    async with running(tmp_path, plugins=plugins) as broker:
        alice = await broker.subscriber(b"alice", (b"#", 1), user=b"alice")
        await alice.disconnect()
        bob = await broker.connect(b"bob", user=b"bob")
        for number in range(300):
            topic = b"allowed/a" if number % 3 == 0 else b"secret/a"
            bob.publish(topic, b"%d" % number)
        for _ in range(300):
            await bob.next(Puback)
        alice = await broker.connect(b"alice", user=b"alice")
        assert alice.connack.session_present
        assert await alice.payloads(100) == [b"%d" % n for n in range(0, 300, 3)]
        await bob.deliver(b"secret/a", b"hidden")
        await bob.deliver(b"allowed/a", b"shown")
        assert await alice.payloads(1) == [b"shown"]


async def test_a_retained_message_that_may_not_be_received_is_not_delivered(
    tmp_path: Path,
) -> None:
    plugins = lists(receive_acl={"alice": ["allowed/#"], "bob": ["#"]})
    async with running(tmp_path, plugins=plugins) as broker:
        bob = await broker.connect(b"bob", user=b"bob")
        for topic in (b"secret/a", b"allowed/a"):
            bob.publish(topic, topic, retain=True)
            await bob.next(Puback)
        alice = await broker.subscriber(b"alice", (b"#", 1), user=b"alice")
        assert await alice.payloads(1) == [b"allowed/a"]
        await alice.quiet()


# -------------------------------------------------------------------------------- $SYS, logs


async def test_sys_topics_arrive_and_their_values_are_sane(tmp_path: Path) -> None:
    plugins = {**ANONYMOUS, "amqtt.plugins.sys.broker.BrokerSysPlugin": {"sys_interval": 1}}
    async with running(tmp_path, plugins=plugins) as broker:
        reader = await broker.subscriber(b"reader", (b"$SYS/#", 1), (b"#", 0))
        publisher = await broker.connect(b"publisher", clean=True)
        await publisher.deliver(b"a", b"1", b"2", b"3")
        values: dict[bytes, bytes] = {}
        async with asyncio.timeout(20):
            while b"$SYS/broker/uptime/formatted" not in values or not int(
                values.get(b"$SYS/broker/messages/publish/received", b"0")
            ):
                packet: Any = await reader.any()
                values[packet.topic] = packet.payload
                assert packet.qos == 0
        assert values[b"$SYS/broker/version"].startswith(b"aMQTT version 0.12")
        assert int(values[b"$SYS/broker/clients/connected"]) == 2
        assert int(values[b"$SYS/broker/messages/publish/received"]) == 3
        assert int(values[b"$SYS/broker/load/bytes/received"]) > 0
        assert int(values[b"$SYS/broker/load/bytes/sent"]) > 0
        assert broker.hub.committer.last == 0  # none of it is logged


async def test_the_loggers_log_and_we_show_no_payload_and_no_password(
    tmp_path: Path, password_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    plugins = {
        FILE: {"password_file": str(password_file)},
        "amqtt.plugins.logging_amqtt.EventLoggerPlugin": {},
        "amqtt.plugins.logging_amqtt.PacketLoggerPlugin": {},
    }
    async with running(tmp_path, plugins=plugins) as broker:
        alice = await broker.subscriber(
            b"alice",
            (b"a", 2),
            user=b"alice",
            password=b"alicealice",
            will=will(b"w", b"top secret will"),
        )
        alice.publish(b"a", b"top secret payload", qos=2)
        await alice.any()
        await alice.any()
        alice.send_bytes(b"\xf0\x00top secret garbage")
        await alice.closed()
        stranger = await broker.dial()
        await stranger.connect(b"x", user=b"alice", password=b"guessed password")
        again = await broker.connect(b"alice", user=b"alice", password=b"alicealice")
        await again.publishes(1)
    ours = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("amqtt_durable"))
    assert ours
    for secret in ("top secret", "alicealice", "guessed"):
        assert secret not in ours
    events = "\n".join(r.getMessage() for r in caplog.records if "Logger" in r.name)
    for event in ("client_connected", "client_disconnected", "client_subscribed", "post_start"):
        assert f"'on_broker_{event}' EVENT FIRED" in events
    assert "alice <-in-- PublishPacket" in events
    assert "alice -out-> PublishPacket" in events
    assert "<-in-- ConnectPacket" in events


# ------------------------------------------------------------------------------------ events


async def test_every_event_reaches_a_plugin_with_its_arguments(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        recorder = broker.recorder
        names = [name for name, _ in recorder.events]
        assert names == ["broker_pre_start", "broker_post_start"]
        client = await broker.connect(b"device", keep_alive=30)
        connected = await recorder.wait_for("broker_client_connected")
        assert connected["client_id"] == "device"
        view: Session = connected["client_session"]
        assert view.client_id == "device"
        assert view.clean_session is False
        assert view.keep_alive == 30
        assert view.remote_address == "127.0.0.1"
        assert view.transitions.state == "connected"

        await client.subscribe((b"a/#", 1))
        subscribed = await recorder.wait_for("broker_client_subscribed")
        assert subscribed == {"client_id": "device", "topic": "a/#", "qos": 1}

        client.publish(b"a/b", b"x", qos=1, retain=True)
        for event in ("broker_message_received", "broker_message_broadcast"):
            got = await recorder.wait_for(event)
            assert got["client_id"] == "device"
            message = got["message"]
            assert (message.topic, message.data, message.qos) == ("a/b", b"x", 1)
            assert message.publish_packet.retain_flag
        retained = await recorder.wait_for("broker_retained_message")
        assert retained["client_id"] is None
        assert retained["retained_message"].topic == "a/b"
        assert retained["retained_message"].data == b"x"

        def about(kind: type) -> Any:
            return lambda arguments: isinstance(arguments["packet"], kind)

        received = await recorder.wait_for("mqtt_packet_received", about(ConnectPacket))
        assert received["packet"].client_id == "device"
        received = await recorder.wait_for("mqtt_packet_received", about(PublishPacket))
        assert received["packet"].data == b"x"
        assert received["session"] is view
        sent = await recorder.wait_for("mqtt_packet_sent", about(PublishPacket))
        assert sent["packet"].topic_name == "a/b"
        assert sent["session"] is view

        await client.any()
        await client.any()
        await client.unsubscribe(b"a/#")
        unsubscribed = await recorder.wait_for("broker_client_unsubscribed")
        assert unsubscribed == {"client_id": "device", "topic": "a/#"}

        await client.disconnect()
        gone = await recorder.wait_for("broker_client_disconnected")
        assert gone["client_id"] == "device"
        assert gone["client_session"] is view
        assert view.transitions.state == "disconnected"
        assert view.password is None
    names = [name for name, _ in recorder.events]
    assert names[-2:] == ["broker_pre_shutdown", "broker_post_shutdown"]


class Clumsy(BasePlugin[BrokerContext]):
    """A plugin whose handler is no coroutine and fails."""

    def on_durable_session_reset(self, **_: object) -> None:
        raise RuntimeError("a plugin of somebody else")


async def test_a_session_that_is_reset_is_an_event(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await broker.subscriber(b"device", (b"a", 1))
        await client.disconnect()
        await broker.left(b"device")
        await broker.context.broadcast_message("a", b"of another generation")
    (tmp_path / "history.sqlite.identity.json").unlink()  # as where a backup was restored
    plugins = {**ANONYMOUS, "tests.seam.test_plugins.Clumsy": {}}
    options = {"on_generation_change": "reset"}
    async with running(tmp_path, plugins=plugins, options=options) as broker:
        client = await broker.connect(b"device")
        assert not client.connack.session_present
        told = await broker.recorder.wait_for("durable_session_reset")
        assert told["client_id"] == "device"
        assert told["reason"]
        assert isinstance(told["position"], int)
        assert isinstance(told["floor"], int)
        await client.quiet()


async def test_a_message_that_is_not_permitted_is_received_but_not_broadcast(
    tmp_path: Path,
) -> None:
    plugins = lists(publish_acl={"bob": ["#"]})
    async with running(tmp_path, plugins=plugins) as broker:
        alice = await broker.connect(b"alice", user=b"alice")
        await alice.deliver(b"a", b"x")
        await broker.recorder.wait_for("broker_message_received")
        await alice.quiet()
        assert "broker_message_broadcast" not in [name for name, _ in broker.recorder.events]


async def test_all_four_packets_of_a_qos_2_delivery_are_told_both_ways(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await broker.subscriber(b"device", (b"a", 2))
        number = client.publish(b"a", b"x", qos=2)
        seen: set[type] = set()
        while len(seen) < 4:
            packet: Any = await client.any()
            seen.add(type(packet))
            if isinstance(packet, Pubrec):
                client.send(Pubrel(number))
            elif isinstance(packet, Pubrel):
                client.send(Pubcomp(packet.packet_id))
            elif not isinstance(packet, Pubcomp):
                client.send(Pubrec(packet.packet_id))
        await client.quiet()
        for event in ("mqtt_packet_received", "mqtt_packet_sent"):
            told = {type(a["packet"]).__name__ for n, a in broker.recorder.events if n == event}
            assert {"PublishPacket", "PubrecPacket", "PubrelPacket", "PubcompPacket"} <= told


async def test_a_plugin_that_fails_in_an_event_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as broker:

        def fail(*_: object) -> None:
            raise RuntimeError("a plugin of somebody else")

        monkeypatch.setattr(broker.recorder, "_note", fail)
        client = await broker.subscriber(b"device", (b"a", 1))
        client.publish(b"a", b"x")
        await client.publishes(1)
        monkeypatch.undo()


async def test_a_plugin_finds_ours_by_its_context(tmp_path: Path) -> None:
    async with running(tmp_path) as instance:
        context: Any = instance.broker.plugins_manager.app_context
        assert DurableSessionPlugin.of(context).history is instance.hub.history
    bare = Broker({"plugins": {}})
    context = bare.plugins_manager.app_context
    with pytest.raises(LookupError, match="the broker has no DurableSessionPlugin"):
        DurableSessionPlugin.of(context)

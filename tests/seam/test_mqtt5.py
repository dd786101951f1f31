"""MQTT 5 clients of a real amqtt broker: its listeners, its plugins, its contexts."""

from __future__ import annotations

import asyncio
import select
import socket
from typing import TYPE_CHECKING, Any

import pytest
from amqtt.broker import BrokerContext
from amqtt.plugins.base import BasePlugin
from websockets.asyncio.client import connect as connect_websocket

from broker_ext.authentication import Accepted, Challenge
from broker_ext.older import as_older
from broker_ext.wire import (
    Auth,
    Connack,
    Connect,
    Decoder,
    Disconnect,
    Properties,
    Puback,
    Pubrec,
    Subscribe,
    SubscribeFilter,
    encode,
)
from broker_ext.wire.properties import (
    AUTHENTICATION_DATA,
    AUTHENTICATION_METHOD,
    REQUEST_RESPONSE_INFORMATION,
    RESPONSE_INFORMATION,
    SESSION_EXPIRY_S,
    TOPIC_ALIAS,
    TOPIC_ALIAS_MAX,
    USER_PROPERTY,
)
from tests.seam.amqtt_broker import ANONYMOUS, running
from tests.seam.test_plugins import FILE, lists

if TYPE_CHECKING:
    from pathlib import Path


def properties(*pairs: tuple[int, Any]) -> Properties:
    return Properties(pairs)


@pytest.mark.parametrize(
    ("user", "password", "code"),
    [
        (b"alice", b"alicealice", 0),
        (b"alice", b"wrong", 0x86),
        (b"alice", None, 0x86),
        (None, b"alicealice", 0x86),
        (None, None, 0x87),
    ],
)
async def test_file_auth_is_the_same(
    tmp_path: Path, password_file: Path, user: bytes | None, password: bytes | None, code: int
) -> None:
    plugins = {FILE: {"password_file": str(password_file)}}
    async with running(tmp_path, plugins=plugins) as broker:
        client = await broker.dial()
        connack = await client.connect(b"device", version=5, user=user, password=password)
        assert connack.reason == code


async def test_topic_plugins_say_what_they_do_not_permit(tmp_path: Path) -> None:
    plugins = lists(publish_acl={"alice": ["allowed/#"]}, subscribe_acl={"alice": ["allowed/#"]})
    async with running(tmp_path, plugins=plugins) as broker:
        alice = await broker.connect(b"alice", version=5, user=b"alice")
        assert await alice.subscribe((b"allowed/a", 2), (b"x", 0)) == bytes([2, 0x87])
        alias = properties((TOPIC_ALIAS, 1))
        alice.publish(b"secret/a", b"hidden", 1, packet_id=1, properties=alias)
        assert await alice.next(Puback) == Puback(1, 0x87)
        alice.publish(b"", b"hidden", 2, packet_id=2, properties=alias)
        assert await alice.next(Pubrec) == Pubrec(2, 0x87)
        alice.publish(b"", b"hidden", 0, properties=alias)
        alice.publish(b"allowed/a", b"1", 0, properties=alias)
        assert await alice.payloads(1) == [b"1"]
        await alice.quiet()


async def test_events_show_what_amqtt_knows_of_a_client(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        recorder = broker.recorder
        asked = properties((TOPIC_ALIAS_MAX, 5), (USER_PROPERTY, (b"a", b"b")))
        client = await broker.connect(
            b"device", version=5, clean=True, expiry=100, properties=asked
        )
        connected = await recorder.wait_for("broker_client_connected")
        assert connected["client_session"].clean_session is False  # it outlives its connection
        assert await client.subscribe((b"a/#", 0x2D)) == bytes([1])
        alias = properties((TOPIC_ALIAS, 3), (USER_PROPERTY, (b"k", b"v")))
        other = await broker.connect(b"other", version=5, clean=True)
        for topic in (b"a/long", b""):
            other.publish(topic, b"x", 1, properties=alias)
        got = await recorder.wait_for("broker_message_received")
        assert (got["message"].topic, got["message"].data) == ("a/long", b"x")
        assert [p.topic for p in await client.publishes(2)] == [b"a/long", b""]  # an alias of ours
        await client.unsubscribe(b"a/#")
        await client.disconnect(4)
        await recorder.wait_for("broker_client_disconnected")
        for event, expected in (
            ("mqtt_packet_received", {"Connect", "Subscribe", "Publish", "Puback", "Disconnect"}),
            ("mqtt_packet_sent", {"Connack", "Suback", "Publish", "Puback", "Unsuback"}),
        ):
            packets = [a["packet"] for name, a in recorder.events if name == event]
            assert {f"{name}Packet" for name in expected} <= {type(p).__name__ for p in packets}
            topics = {p.topic_name for p in packets if type(p).__name__ == "PublishPacket"}
            assert topics == {"a/long"}


def test_a_packet_is_shown_as_3_1_1_can_say_it() -> None:
    def shown(*packets: Any, server: bool = True) -> list[Any]:
        version = 0 if isinstance(packets[0], Connect) else 4
        return Decoder(server=server, version=version).feed(b"".join(map(as_older, packets)))

    some = properties((SESSION_EXPIRY_S, 5))
    assert shown(Connect(5, b"a", password=b"p", properties=some)) == [
        Connect(4, b"a", username=b"", password=b"p")
    ]
    assert shown(Connack(False, 0x8C), server=False) == [Connack(False, 3)]
    assert shown(Connack(True, 0, some), server=False) == [Connack(True, 0)]
    subscribe = Subscribe(1, (SubscribeFilter(b"a", 0x2E),), properties((11, 3)))
    assert shown(subscribe) == [Subscribe(1, (SubscribeFilter(b"a", 2),))]
    assert shown(Auth(0x18, properties((AUTHENTICATION_METHOD, b"m"))), Disconnect(4)) == [
        Disconnect()
    ]


class Riddle(BasePlugin[BrokerContext]):
    """A plugin that provides a method: it believes who answers "friend"."""

    authentication_method = "riddle"

    def authentication_exchange(self, *, client_id: str) -> RiddleExchange:
        return RiddleExchange(client_id)


class RiddleExchange:
    def __init__(self, client_id: str) -> None:
        self.client_id = client_id

    async def proceed(self, data: bytes | None) -> Challenge | Accepted | None:
        if data is None:
            return Challenge(b"who?")
        return Accepted(b"alice") if data == b"friend" else None


async def test_a_plugin_provides_an_authentication_method(tmp_path: Path) -> None:
    plugins = {
        "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": False},
        "tests.seam.test_mqtt5.Riddle": {},
    }

    def method(name: bytes, data: bytes | None = None) -> Properties:
        more = () if data is None else ((AUTHENTICATION_DATA, data),)
        return properties((AUTHENTICATION_METHOD, name), *more)

    async with running(tmp_path, plugins=plugins) as broker:
        for answer, reason in ((b"friend", 0), (b"foe", 0x87)):
            client = await broker.dial()
            client.reads(5)
            client.send(client.connect_packet(b"dev", version=5, properties=method(b"riddle")))
            assert await client.next(Auth) == Auth(0x18, method(b"riddle", b"who?"))
            client.send(Auth(0x18, method(b"riddle", answer)))
            assert (await client.next(Connack)).reason == reason
        client = await broker.dial()
        connack = await client.connect(b"dev", version=5, properties=method(b"unknown"))
        assert connack.reason == 0x8C


async def test_configured_words_reach_the_client(tmp_path: Path) -> None:
    options = {"response_information": "answers/{client_id}", "topic_alias_maximum": 3}
    asked = properties((REQUEST_RESPONSE_INFORMATION, 1))
    async with running(tmp_path, options=options, session_expiry_interval=60) as broker:
        client = await broker.connect(b"dev", version=5, properties=asked)
        assert client.connack.properties is not None
        assert client.connack.properties.get(RESPONSE_INFORMATION) == b"answers/dev"
        assert client.connack.properties.get(TOPIC_ALIAS_MAX) == 3
        assert client.connack.properties.get(SESSION_EXPIRY_S) == 60


async def test_a_session_that_amqtt_stops_is_told_so(tmp_path: Path) -> None:
    async with running(tmp_path, plugins=ANONYMOUS) as broker:
        client = await broker.connect(b"dev", version=5)
        _, handler = broker.broker._sessions["dev"]
        await handler.stop()
        assert (await client.next(Disconnect)).reason == 0x98


async def test_one_that_goes_on_sending_reads_why_its_connection_ended(tmp_path: Path) -> None:
    """TCP would reset the connection under it if the socket were closed at once."""
    async with running(tmp_path, plugins=ANONYMOUS) as broker:
        wire = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", broker.port()), 5)
        with wire:

            def talk() -> bytes:
                wire.sendall(encode(Connect(5, b"dev", True), 5))
                wire.recv(1000)
                wire.sendall(b"\x82\x00")  # a SUBSCRIBE without a body
                select.select([wire], [], [], 5)
                for _ in range(20):
                    wire.sendall(bytes(100_000))
                said = b""
                while data := wire.recv(1000):
                    said += data
                return said

            (told,) = Decoder(server=False, version=5).feed(await asyncio.to_thread(talk))
        assert isinstance(told, Disconnect)
        assert told.reason == 0x81


async def test_mqtt_5_over_a_websocket(tmp_path: Path) -> None:
    listeners = {"default": {"type": "ws", "bind": "127.0.0.1:0"}}
    async with running(tmp_path, listeners=listeners) as broker:
        url = f"ws://127.0.0.1:{broker.port()}"
        async with connect_websocket(url, subprotocols=["mqtt"]) as web:  # type: ignore[list-item]
            await web.send(encode(Connect(5, b"dev", True), 5))
            decoder = Decoder(server=False, version=5)
            (connack,) = decoder.feed(await web.recv())  # type: ignore[arg-type]
            assert isinstance(connack, Connack)
            assert connack.properties is not None


@pytest.mark.parametrize("version", [4, 5])
async def test_one_that_is_refused_and_goes_on_sending_reads_why(
    tmp_path: Path, version: int
) -> None:
    anonymous = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": False}}
    async with running(tmp_path, plugins=anonymous) as broker:
        wire = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", broker.port()), 5)
        with wire:

            def talk() -> bytes:
                wire.sendall(encode(Connect(version, b"dev", True), version))
                said = b""
                while data := wire.recv(1000):
                    said += data
                for _ in range(20):
                    wire.sendall(bytes(1000))  # raises where the socket is closed
                return said

            said = await asyncio.to_thread(talk)
        assert said == (b"\x20\x02\x00\x05" if version == 4 else b"\x20\x03\x00\x87\x00")


async def test_add_subscription_does_not_keep_a_session_longer(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await broker.connect(b"dev", version=5, expiry=1000)
        await client.disconnect()
        await broker.left(b"dev")
        await broker.hub.committer.drain()
        before = await broker.hub.store.snapshot(b"dev")
        await asyncio.sleep(0.01)  # time goes on
        await broker.context.add_subscription("dev", "a", 1)
        await broker.hub.committer.drain()
        after = await broker.hub.store.snapshot(b"dev")
        assert before is not None
        assert after is not None
        assert [s.filter for s in after.subscriptions] == [b"a"]
        assert after.consumer.expiry_s == 1000
        assert after.consumer.detached_ms == before.consumer.detached_ms

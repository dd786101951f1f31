"""Eclipse paho-mqtt."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from interop.mqtt5.device import HOST, PATIENCE_S, Answer, Device, Got, Options, until

if TYPE_CHECKING:
    from paho.mqtt.reasoncodes import ReasonCode

__all__ = ["PahoDevice", "answer", "connect_properties", "got", "publish_properties"]


def connect_properties(options: Options) -> Properties:
    properties = Properties(PacketTypes.CONNECT)
    properties.SessionExpiryInterval = options.expiry_s
    if options.window:
        properties.ReceiveMaximum = options.window
    return properties


def will_properties(options: Options) -> Properties:
    properties = Properties(PacketTypes.WILLMESSAGE)
    if options.will is not None:
        properties.WillDelayInterval = options.will.delay_s
    return properties


def publish_properties(expiry_s: int | None, user: tuple[tuple[str, str], ...]) -> Properties:
    properties = Properties(PacketTypes.PUBLISH)
    if expiry_s is not None:
        properties.MessageExpiryInterval = expiry_s
    if user:
        properties.UserProperty = list(user)
    return properties


def answer(flags: mqtt.ConnectFlags, reason: ReasonCode, properties: Properties | None) -> Answer:
    return Answer(
        flags.session_present,
        reason.value,
        getattr(properties, "ReasonString", ""),
        dict(getattr(properties, "UserProperty", ())),
    )


def got(message: Any) -> Got:
    """Of paho's message, and of aiomqtt's."""
    return Got(
        str(message.topic),
        bytes(message.payload),
        message.qos,
        bool(message.retain),
        tuple(getattr(message.properties, "UserProperty", ())),
        getattr(message.properties, "MessageExpiryInterval", None),
    )


class PahoDevice(Device):
    """Its callbacks come in a thread of paho's."""

    def __init__(self, port: int, client_id: str) -> None:
        super().__init__(port, client_id)
        self._client: mqtt.Client | None = None
        self._granted: list[int] = []
        self._suback = threading.Event()

    def connect(self, options: Options) -> None:
        client = self._client = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            self.client_id,
            protocol=mqtt.MQTTv5,
            reconnect_on_failure=False,
        )
        client.max_inflight_messages_set(100)
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_subscribe = self._on_subscribe
        client.on_message = lambda _client, _data, message: self.got.append(got(message))
        if options.will is not None:
            topic, payload, _ = options.will
            client.will_set(topic, payload, 1, properties=will_properties(options))
        client.connect(
            HOST,
            self.port,
            keepalive=30,
            clean_start=options.clean,
            properties=connect_properties(options),
        )
        client.loop_start()

    def _on_connect(
        self,
        _client: mqtt.Client,
        _data: Any,
        flags: mqtt.ConnectFlags,
        reason: ReasonCode,
        properties: Properties | None,
    ) -> None:
        self.answers.append(answer(flags, reason, properties))

    def _on_disconnect(
        self,
        _client: mqtt.Client,
        _data: Any,
        flags: mqtt.DisconnectFlags,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        if flags.is_disconnect_packet_from_server:
            self.ends.append(reason.value)

    def _on_subscribe(
        self, _client: mqtt.Client, _data: Any, _mid: int, reasons: list[ReasonCode], *_: Any
    ) -> None:
        self._granted = [reason.value for reason in reasons]
        self._suback.set()

    def subscribe(self, topic_filter: str, qos: int) -> int:
        assert self._client is not None
        self._suback.clear()
        self._client.subscribe(topic_filter, qos)
        assert self._suback.wait(PATIENCE_S), "no SUBACK"
        return self._granted[0]

    def publish(
        self,
        topic: str,
        *payloads: bytes,
        qos: int = 1,
        expiry_s: int | None = None,
        user: tuple[tuple[str, str], ...] = (),
    ) -> None:
        assert self._client is not None
        properties = publish_properties(expiry_s, user)
        sent = [
            self._client.publish(topic, payload, qos, properties=properties) for payload in payloads
        ]
        until(lambda: all(info.is_published() for info in sent), "not everything is acknowledged")

    def down(self) -> None:
        if self._client is not None:
            self._client.disconnect()
            self._client.loop_stop()
            self._client = None

    def cut(self) -> None:
        assert self._client is not None
        wire: Any = self._client.socket()
        wire.shutdown(socket.SHUT_RDWR)
        self._client.loop_stop()
        self._client = None

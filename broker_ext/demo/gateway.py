"""The gateway: one paho client with clean_session=False that wants every reading of the fleet.

It stands for an application whose memory survives while its network does not: the same client
object comes back, so that a QoS 2 message that was half received is completed.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import TYPE_CHECKING, NamedTuple

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from broker_ext.demo.broker import HOST
from broker_ext.demo.clock import now_ms
from broker_ext.demo.facts import Arrival, Connection
from broker_ext.demo.readings import FILTER, read

if TYPE_CHECKING:
    from paho.mqtt.properties import Properties
    from paho.mqtt.reasoncodes import ReasonCode

__all__ = ["Gateway"]

LINGER_NONE = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: the close is a reset


class _Message(NamedTuple):
    """A message as it came; it is read after the run, not while it is being counted."""

    topic: str
    body: bytes
    qos: int
    dup: bool
    at_ms: int
    connection: int


class Gateway:
    """The consumer of the demo. Its lists are written by paho's thread and read by anybody."""

    def __init__(self, seed: int, port: int) -> None:
        self.connections: list[Connection] = []
        self.subscribed = threading.Event()
        self.connected = False
        self._seed = seed
        self._messages: list[_Message] = []
        self._distinct: set[tuple[str, bytes]] = set()
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id="demo-gateway",
            clean_session=False,
            protocol=paho.MQTTv311,
        )
        self._client.reconnect_delay_set(1, 1)
        self._client.on_connect = self._on_connect
        self._client.on_disconnect = self._on_disconnect
        self._client.on_subscribe = self._on_subscribe
        self._client.on_message = self._on_message
        self._client.connect_async(HOST, port)

    def start(self) -> None:
        """Connect, and subscribe when there is no session that says so already."""
        self._client.loop_start()

    def cut(self) -> None:
        """Lose the connection as a pulled cable loses it: a reset, no DISCONNECT, no return."""
        self._close_connection()
        sock = self._client.socket()
        if isinstance(sock, socket.socket):
            with contextlib.suppress(OSError):  # it is gone already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
                sock.shutdown(socket.SHUT_RDWR)
        self._client.loop_stop()

    def come_back(self) -> None:
        """Connect again after a cut, with the same session."""
        self._client.connect_async(HOST, self._client.port)
        self._client.loop_start()

    def stop(self) -> None:
        """Disconnect and end paho's thread."""
        self._client.disconnect()
        self._client.loop_stop()

    @property
    def delivered(self) -> int:
        """Different messages delivered so far."""
        return len(self._distinct)

    def arrivals(self) -> list[Arrival]:
        """Give what arrived to the judge."""
        return [
            Arrival(
                read(self._seed, one.topic, one.body),
                one.at_ms,
                one.connection,
                one.qos,
                one.dup,
            )
            for one in self._messages
        ]

    def _close_connection(self) -> None:
        self.connected = False
        if self.connections and self.connections[-1].down_ms is None:
            self.connections[-1] = self.connections[-1]._replace(down_ms=now_ms())

    # paho's thread, from here on

    def _on_connect(
        self,
        client: paho.Client,
        _userdata: object,
        flags: paho.ConnectFlags,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        if reason.is_failure:
            return
        self.connections.append(Connection(now_ms(), flags.session_present, None))
        self.connected = True
        if not flags.session_present:
            client.subscribe(FILTER, 2)

    def _on_disconnect(
        self,
        _client: paho.Client,
        _userdata: object,
        _flags: paho.DisconnectFlags,
        _reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        self._close_connection()

    def _on_subscribe(
        self,
        _client: paho.Client,
        _userdata: object,
        _mid: int,
        reasons: list[ReasonCode],
        _properties: Properties | None,
    ) -> None:
        if not any(reason.is_failure for reason in reasons):
            self.subscribed.set()

    def _on_message(
        self, _client: paho.Client, _userdata: object, message: paho.MQTTMessage
    ) -> None:
        body = bytes(message.payload)
        self._messages.append(
            _Message(
                message.topic,
                body,
                message.qos,
                message.dup,
                now_ms(),
                len(self.connections) - 1,
            )
        )
        self._distinct.add((message.topic, body))

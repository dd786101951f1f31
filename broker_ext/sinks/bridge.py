"""A bridge: each message is published to another MQTT broker, QoS 1 or 2, by paho.

Rule 1. A message is done when its PUBACK or PUBCOMP came; a reason code of 0x80 or above is no
        acknowledgement.
Rule 2. One connection, in the order of the history. When it is lost the bridge comes back (1 s ..
        60 s), and what was under way goes first, with DUP = 1 and its packet id, in its order.
Rule 3. With MQTT 5 the other broker keeps the session while the bridge is away, so QoS 2 is exactly
        once over lost connections (of one that answers CONNECT when it listens). It is at least
        once over a restart of *this* broker, and with MQTT 3.1.1: its session is clean each time,
        because packet ids start again with a process, and a broker that remembers an old one would
        take a new message for its repetition.
Rule 4. A message that makes the other broker close the connection, LOSSES_MAX times in a row with
        nothing acknowledged in between, has failed (indeterminate): it waits for its next attempt,
        and those behind it go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from broker_ext.sinks.sender import DONE, Outgoing, Sent
from broker_ext.sinks.settings import read_secret, tls_context
from broker_ext.wire import MalformedPacket, read_forwarded
from broker_ext.wire.properties import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    PAYLOAD_FORMAT,
    RESPONSE_TOPIC,
    USER_PROPERTY,
)
from storage.api import RETAINED
from storage.outbox import Failure

if TYPE_CHECKING:
    from paho.mqtt.reasoncodes import ReasonCode

    from broker_ext.sinks.settings import BridgeSettings
    from storage.api import Entry
    from storage.clock import Clock

__all__ = ["Bridge", "failure_of"]

log = logging.getLogger("amqtt_durable.sinks")

BACK_OFF_S: Final = (1.0, 60.0)
SESSION_S: Final = 24 * 3600
"""How long the other broker is asked to keep the session (MQTT 5)."""
LOSSES_MAX: Final = 3
MISC_S: Final = 1.0
"""How often paho looks at its keep alive."""

_NOT_FOUND: Final = 0x92
_QUOTA_EXCEEDED: Final = 0x97
_REJECTED: Final = frozenset({0x87, 0x90, 0x95, 0x99})
"""Not authorized, topic name invalid, packet too large, payload format invalid."""


def failure_of(reason: int) -> Failure:
    """What a reason code of PUBACK or PUBCOMP says about a message. Pure."""
    if reason < 0x80:
        return Failure.NONE
    if reason == _QUOTA_EXCEEDED:
        return Failure.THROTTLED
    return Failure.REJECTED if reason in _REJECTED else Failure.INDETERMINATE


class _Flight(NamedTuple):
    out: Outgoing
    settled: asyncio.Future[Sent]


class _Client(mqtt.Client):
    """paho (2.1, 2.2) answers a PUBREC that refuses with PUBREL, as one that takes, and does not
    tell; so the reason is read where paho reads the packet. refused: packet id -> reason."""

    refused: dict[int, int]

    def _handle_pubrec(self) -> MQTTErrorCode:
        packet = bytes(self._in_packet["packet"])
        if len(packet) > 2 and packet[2] >= 0x80:
            self.refused[int.from_bytes(packet[:2], "big")] = packet[2]
        return super()._handle_pubrec()


class Bridge:
    """The sender of one bridge sink. paho runs in the event loop, without a thread of its own: so
    it has sent again what was under way when the CONNACK is told, and nothing comes before that."""

    ordered = True

    def __init__(self, settings: BridgeSettings, clock: Clock, *, client_id: str) -> None:
        self.window = settings.inflight
        self._settings = settings
        self._clock = clock
        self._client_id = settings.client_id or client_id
        self._password: str | None = None
        self._client: _Client
        self._is_new = True
        self._flying: dict[int, _Flight] = {}
        self._waiting: list[_Flight] = []
        self._losses = 0
        self._connected = asyncio.Event()
        self._answer: asyncio.Future[str] | None = None
        self._lost = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._watched: int | None = None
        self._connecting = False
        self._told = ""
        self._loop = asyncio.get_running_loop()

    # -------------------------------------------------------------------- the connection

    async def open(self) -> None:
        if self._settings.password_file:
            path = self._settings.password_file
            try:
                self._password = read_secret("password_file", path).decode()
            except UnicodeDecodeError:  # its text would have a part of it
                raise ValueError(f"password_file {path}: it is not UTF-8") from None
        self._client = self._made()
        self._keeping = asyncio.ensure_future(self._keep_connected())

    def _made(self) -> _Client:
        settings = self._settings
        is_5 = settings.version == 5
        client = _Client(
            CallbackAPIVersion.VERSION2,
            self._client_id,
            clean_session=None if is_5 else True,
            protocol=mqtt.MQTTv5 if is_5 else mqtt.MQTTv311,
            reconnect_on_failure=False,
        )
        client.refused = {}
        client.max_inflight_messages_set(0)  # the window is ours
        client.max_queued_messages_set(0)
        client.connect_timeout = settings.timeout
        if settings.username:
            client.username_pw_set(settings.username, self._password)
        if settings.tls is not None:
            client.tls_set_context(tls_context(settings.tls))
        properties = None
        if is_5:
            properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.SessionExpiryInterval = SESSION_S
        client.connect_async(
            settings.host,
            settings.port or (8883 if settings.tls else 1883),
            settings.keep_alive,
            properties=properties,
        )
        client.on_connect = self._on_connack
        client.on_disconnect = self._on_lost
        client.on_publish = self._on_settled
        client.on_socket_close = self._on_socket_close
        self._is_new = True
        return client

    async def _keep_connected(self) -> None:
        back_off_s = BACK_OFF_S[0]
        while True:
            failed = await self._connect()
            if not failed:
                back_off_s = BACK_OFF_S[0]
                self._is_new = False
                self._tell("")
                self._connected.set()
                self._publish_waiting()
                await self._until_lost()
                self._connected.clear()
                failed = "the connection was lost"
                self._hang_up()
                self._count_loss()
            else:
                self._hang_up()
                if self._is_new:
                    self._replace()  # only the first CONNECT of a client is a clean start
            self._tell(failed)
            await asyncio.sleep(back_off_s)
            back_off_s = min(back_off_s * 2, BACK_OFF_S[1])

    async def _connect(self) -> str:
        """Connect once; returns why it failed, "" if it did not."""
        self._lost.clear()
        self._answer = self._loop.create_future()
        self._connecting = True
        try:
            async with asyncio.timeout(self._settings.timeout):
                await self._knock()
            await self._reconnect()
        except OSError as error:
            return f"no connection ({error.strerror or type(error).__name__})"
        finally:
            self._connecting = False
        self._watch()
        if not self._watched:
            return "the connection was closed"
        try:
            async with asyncio.timeout(self._settings.timeout):
                return await self._answer
        except TimeoutError:
            return "no answer to CONNECT"

    async def _knock(self) -> None:
        """Look whether somebody listens, before paho dials: each attempt of paho (2.1, 2.2), also
        one that fails, resets what is under way, and the second one sends a PUBLISH again whose
        PUBREC had come, which MQTT forbids [MQTT-4.3.3-1]. Raises OSError."""
        if not self._flying:
            return
        port = self._settings.port or (8883 if self._settings.tls else 1883)
        _, writer = await asyncio.open_connection(self._settings.host, port)
        writer.transport.abort()

    async def _reconnect(self) -> None:
        """Paho connects, and shakes hands for TLS, while its caller waits: in a thread, which a
        stop does not wait for. Nothing else touches the client meanwhile."""
        client = self._client
        connected: asyncio.Future[None] = self._loop.create_future()

        def tell(error: Exception | None) -> None:
            if connected.done():  # we did not wait for it
                _close(client)
            elif error is not None:
                connected.set_exception(error)
            else:
                connected.set_result(None)

        def work() -> None:
            failed: Exception | None = None
            try:
                client.reconnect()
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                failed = error
            try:
                self._loop.call_soon_threadsafe(tell, failed)
            except RuntimeError:  # the loop is closed
                _close(client)

        threading.Thread(target=work, name=f"bridge-{self._settings.name}", daemon=True).start()
        await connected

    def _watch(self) -> None:
        """Have the loop say when the socket can be read, and written if there is something."""
        opened = self._client.socket()
        if opened is None:
            return
        self._watched = opened.fileno()
        self._loop.add_reader(self._watched, self._readable)
        self._look_at_writes()

    def _look_at_writes(self) -> None:
        if self._watched is None:
            return
        if self._client.want_write():
            self._loop.add_writer(self._watched, self._writable)
        else:
            self._loop.remove_writer(self._watched)

    def _readable(self) -> None:
        opened = self._client.socket()
        while opened is not None:
            self._client.loop_read()
            opened = self._client.socket()
            # of what TLS has decrypted already no selector tells
            if not (isinstance(opened, ssl.SSLSocket) and opened.pending()):
                break
        self._look_at_writes()

    def _writable(self) -> None:
        self._client.loop_write()
        self._look_at_writes()

    def _on_socket_close(self, *_: Any) -> None:
        watched, self._watched = self._watched, None
        if watched is not None:
            self._loop.remove_reader(watched)
            self._loop.remove_writer(watched)

    async def _until_lost(self) -> None:
        """Keep it alive until it is lost."""
        while not self._lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MISC_S):
                    await self._lost.wait()
            self._client.loop_misc()
            self._look_at_writes()

    def _hang_up(self) -> None:
        """Let go of a connection that is lost, or refused, or silent."""
        self._on_socket_close()
        _close(self._client)

    def _on_connack(
        self, _: mqtt.Client, __: Any, ___: Any, reason: ReasonCode, properties: Properties | None
    ) -> None:
        receive_max = int(getattr(properties, "ReceiveMaximum", 65_535))
        self.window = min(self._settings.inflight, receive_max)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(f"refused: {reason}" if reason.is_failure else "")

    def _on_lost(self, *_: Any) -> None:
        if self._connecting:
            return  # in the thread that connects; it tells by an error
        self._lost.set()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result("closed instead of an answer to CONNECT")

    def _count_loss(self) -> None:
        """Rule 4. paho cannot forget a message, so another client takes over the others."""
        if not self._flying:
            return
        self._losses += 1
        if self._losses < LOSSES_MAX:
            return
        self._losses = 0
        failed = next(iter(self._flying.values()))
        if not failed.settled.done():
            failed.settled.set_result(
                Sent(Failure.INDETERMINATE, f"{LOSSES_MAX} connections were lost over it")
            )
        self._replace()

    def _replace(self) -> None:
        """Go on with another client, which knows nothing yet."""
        self._waiting[:0] = self._flying.values()
        self._flying.clear()
        self._client = self._made()

    def _tell(self, failed: str) -> None:
        """Say it once when the connection is gone, and once when it is there."""
        if failed == self._told:
            return
        self._told = failed
        name, where = self._settings.name, self._settings.destination
        if failed:
            log.warning("sink %r: %s: %s; trying again", name, where, failed)
        else:
            log.info("sink %r: connected to %s", name, where)

    async def ready(self) -> None:
        await self._connected.wait()

    # ------------------------------------------------------------------------- a message

    async def send(self, out: Outgoing) -> Sent:
        flight = _Flight(out, self._loop.create_future())
        if self._connected.is_set():
            self._publish(flight)
        else:  # before CONNACK paho would send it ahead of what was under way
            self._waiting.append(flight)
        return await flight.settled

    def _publish_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for flight in waiting:
            if not flight.settled.done():
                self._publish(flight)

    def _publish(self, flight: _Flight) -> None:
        message = flight.out.message
        settings = self._settings
        expires_s = 0
        if message.expires_ms:
            expires_s = max((message.expires_ms - self._clock.now_ms()) // 1000, 1)
        try:
            info = self._client.publish(
                settings.topic_prefix + message.topic.decode(),
                message.payload,
                min(message.qos or 1, settings.qos),
                retain=settings.retain and bool(message.flags & RETAINED),
                properties=_forwarded(message, expires_s) if settings.version == 5 else None,
            )
        except ValueError:  # too long a topic with its prefix, too large a payload
            flight.settled.set_result(Sent(Failure.REJECTED, "it cannot be a PUBLISH"))
            return
        if info.rc == mqtt.MQTT_ERR_QUEUE_SIZE:  # its packet id is under way
            flight.settled.set_result(Sent(Failure.UNAVAILABLE, "no packet id is free"))
            return
        self._flying[info.mid] = flight
        self._look_at_writes()

    def _on_settled(
        self, _: mqtt.Client, __: Any, packet_id: int, reason: ReasonCode, ___: Any
    ) -> None:
        self._losses = 0
        flight = self._flying.pop(packet_id, None)
        if flight is None or flight.settled.done():
            return
        code = self._client.refused.pop(packet_id, int(reason.value))
        if code == _NOT_FOUND:
            code = 0  # of PUBCOMP: our PUBREL had arrived before the connection was lost
        failure = failure_of(code)
        flight.settled.set_result(Sent(failure, f"reason 0x{code:02X}") if failure else DONE)

    async def close(self) -> None:
        keeping, self._keeping = self._keeping, None
        if keeping is None:
            return
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        if self._watched is not None:
            self._client.disconnect()
        self._hang_up()


def _close(client: mqtt.Client) -> None:
    """Close what a client has open. paho does that itself when it is told to disconnect, unless
    there is something that it cannot write."""
    opened = client.socket()
    if opened is not None:
        opened.close()


def _forwarded(message: Entry, expires_s: int) -> Properties | None:
    """The MQTT 5 properties of a message as paho has them."""
    found = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    if expires_s:
        found.MessageExpiryInterval = expires_s
    try:
        read = read_forwarded(message.properties)
    except MalformedPacket:  # of another version of us; the message itself is sound
        read = None
    users: list[tuple[str, str]] = []
    for ident, value in read.pairs if read is not None else ():
        if ident == PAYLOAD_FORMAT:
            found.PayloadFormatIndicator = value
        elif ident == CORRELATION_DATA:
            found.CorrelationData = value
        elif ident == CONTENT_TYPE and isinstance(value, bytes):
            found.ContentType = value.decode()
        elif ident == RESPONSE_TOPIC and isinstance(value, bytes):
            found.ResponseTopic = value.decode()
        elif ident == USER_PROPERTY and isinstance(value, tuple):
            users.append((value[0].decode(), value[1].decode()))
    if users:
        found.UserProperty = users
    return None if found.isEmpty() else found  # type: ignore[no-untyped-call]

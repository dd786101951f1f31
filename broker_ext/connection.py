"""One network connection: bytes in, packets to the session; packets out, bytes to the socket.

Rule 1. Nothing is awaited per packet. Only what has to ask somebody (a SUBSCRIBE that is saved, a
        topic plugin) goes through the *lane*, a queue that one coroutine works off in order; while
        it is busy, later packets queue behind it, but for acknowledgements and PINGREQ.
Rule 2. Acknowledgements leave in the order of what they acknowledge [MQTT-4.6.0-2]; one that waits
        for a commit holds back those behind it.
Rule 3. A client that does not read is not written to; one that sends faster than the store commits
        is not read from (P12).
Rule 4. A malformed packet ends this connection and nothing else; what follows it is not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from broker_ext.authentication import Authentication, method_of
from broker_ext.lane import Lane
from broker_ext.reasons import NO_WORDS, Reason, Words, return_code
from broker_ext.session import DISCONNECTED, End
from broker_ext.subscribing import subscribe_now
from broker_ext.terms import ANY, keep_alive_s, valid_payload
from broker_ext.version5 import Version5, with_words
from broker_ext.wire import (
    PACKET_ID,
    PINGRESP,
    Auth,
    Connack,
    Connect,
    Decoder,
    Disconnect,
    MalformedPacket,
    Pingreq,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    UnsupportedVersion,
    connack,
    encode,
    publish_head,
    valid_reason,
)
from broker_ext.wire.kinds import CONNACK
from broker_ext.wire.properties import (
    MESSAGE_EXPIRY_S,
)

if TYPE_CHECKING:
    from broker_ext.guard import Guard, Transport
    from broker_ext.hub import Hub
    from broker_ext.session import Session
    from broker_ext.wire import Packet
    from storage.api import Entry

__all__ = ["Connection"]

log = logging.getLogger("amqtt_durable.connection")

WRITE_HIGH_BYTES: Final = 256 << 10
"""A socket with more than this unsent is congested: its session keeps what it has."""
LINGER_S: Final = 5.0
"""How long a closed connection may take to send what was written before it is cut."""
HEADS_MAX: Final = 4096

LOST = End("connection lost", blames=True)
SILENT = End("keep alive", reason=Reason.KEEP_ALIVE, blames=True)

WITH_WILL = End("disconnect with will")
COMPLAINED = End("disconnect with an error", blames=True)
"""The client gave a reason of 0x80 or above: what it was sent, it could not take."""
TOO_SMALL = End("maximum packet size", reason=Reason.PACKET_TOO_LARGE)
REFUSED = End("authentication refused", reason=Reason.NOT_AUTHORIZED)

_BYPASS: Final = frozenset({Puback, Pubrec, Pubrel, Pubcomp, Pingreq})
_heads: dict[tuple[int, bytes, int], bytes] = {}


class _Waiting:
    """Acknowledgements that wait for a batch."""

    __slots__ = ("batch", "data")

    def __init__(self, batch: object, data: bytearray) -> None:
        self.batch = batch
        self.data = data


class Connection(asyncio.Protocol):
    """A client's connection, from accept to close. Implements ``session.Peer``.

    five: what MQTT 5 adds, None before MQTT 5 (and before CONNECT).
    """

    # slots: there is a connection for each client, and what it does for each message is faster so
    __slots__ = (
        "__weakref__",
        "_authenticating",
        "_connecting",
        "_flush_scheduled",
        "_had_last_word",
        "_lane",
        "_loop",
        "_parts",
        "_parts_bytes",
        "_paused",
        "_said_why",
        "_stopped",
        "_waiting",
        "closed",
        "confirmed",
        "congested",
        "deadline_s",
        "decoder",
        "ended",
        "five",
        "guard",
        "heard",
        "hub",
        "keeps",
        "packet_bytes_max",
        "peername",
        "receive_maximum",
        "session",
        "silent_after_s",
        "transport",
        "version",
    )

    def __init__(self, hub: Hub, transport: Transport, guard: Guard, *, peername: str) -> None:
        self.hub = hub
        self.transport = transport
        self.guard = guard
        self.peername = peername
        self.decoder = Decoder(
            packet_bytes_max=hub.settings.max_packet_bytes,
            versions=hub.settings.versions,
            names=hub.names,
        )
        self.session: Session | None = None
        self.version = 4
        self.five: Version5 | None = None
        self.receive_maximum = ANY.receive_maximum
        self.packet_bytes_max = ANY.packet_bytes_max
        self.congested = False
        self.closed = False
        self.ended: End | None = None
        self.confirmed = False
        self.heard = True
        self.silent_after_s = 0.0
        self.deadline_s = hub.clock.monotonic() + hub.settings.connect_timeout_s
        self._connecting: asyncio.Task[None] | None = None
        self._authenticating: asyncio.Task[None] | None = None
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._flush_scheduled = False
        self._said_why = False
        self._had_last_word = False
        self._waiting: deque[_Waiting] = deque()
        self._lane = Lane()
        self._paused = False
        self._stopped = False
        self.keeps: object = None
        self._loop = asyncio.get_running_loop()
        hub.connections.add(self)
        hub.figures.connections += 1

    def __repr__(self) -> str:
        return f"<connection {self.peername}>"

    # ------------------------------------------------------------------------- reading

    def data_received(self, data: bytes) -> None:
        """Bytes arrived (asyncio calls this, or an adapter)."""
        self.heard = True
        if self.closed or self.ended is not None:
            return
        packets = self.decoder.feed(data)
        if not self.confirmed and self.session is not None:
            self._confirm(self.session, packets)
        if packets:
            self._handle(packets)
        if self.decoder.error is not None and self.ended is None:
            if self._connecting is not None or self._lane.is_busy:
                return  # told when what came before it is done
            self._malformed(self.decoder.error)

    def _confirm(self, session: Session, packets: list[Packet]) -> None:
        """Something was sent since the CONNECT was answered: also what is no packet, or not allowed
        there. Not a DISCONNECT: it may come from one who gave up waiting for the CONNACK."""
        if packets:
            self.confirmed = type(packets[0]) is not Disconnect
        else:
            self.confirmed = self.decoder.error is not None
        if self.confirmed:
            session.introduce()

    def _handle(self, packets: list[Packet]) -> None:
        session = self.session
        if session is None or self.guard.slow or self._lane.is_busy:
            self._queue(packets)
            return
        committer = self.hub.committer
        before = committer.waiting_bytes
        publish = self._publish if self.five is None else self._publish_5
        for i, packet in enumerate(packets):
            kind = type(packet)
            if kind is Publish:
                publish(session, packet)  # type: ignore[arg-type]
            elif kind is Puback:
                session.puback(packet[0])  # type: ignore[misc]
            elif kind in _BYPASS:
                self.answer(session, packet)
            elif kind is Subscribe and subscribe_now(self, session, packet):  # type: ignore[arg-type]
                pass
            else:
                self._queue(packets[i:])
                break
            if self.ended is not None:
                return
        session.turn_over()
        if committer.waiting_bytes > before and committer.pressure():
            self.pause_for_room()  # only who feeds it: others are heard while a disk hangs (P11)

    def _publish(self, session: Session, packet: Publish) -> None:
        flags, topic, packet_id, payload, _ = packet
        if topic[:1] == b"$":
            # not for applications [MQTT-4.7.2-1], but no error either: as what is not permitted
            self.acknowledge_refused(session, packet, Reason.TOPIC_INVALID)
            return
        self.hub.figures.published += 1
        session.receive(topic, payload, (flags >> 1) & 3, packet_id, retain=bool(flags & 1))

    def _publish_5(self, session: Session, packet: Publish) -> None:
        """The same for MQTT 5, from the packet as it came."""
        checked = self.checked(packet)
        if checked is not None:
            self._publish_checked(session, checked)

    def checked(self, packet: Publish) -> Publish | None:
        """With its topic and within the limits, or the connection has ended."""
        assert self.five is not None
        try:
            return self.five.received(packet)
        except MalformedPacket as error:
            self._malformed(error)
            return None

    def received(self, session: Session, packet: Publish) -> None:
        """A PUBLISH that was asked about, and checked."""
        if self.five is None:
            self._publish(session, packet)
        else:
            self._publish_checked(session, packet)

    def _publish_checked(self, session: Session, packet: Publish) -> None:
        flags, topic, packet_id, payload, properties = packet
        if properties is None or topic[:1] == b"$":
            self._publish(session, packet)
            return
        if not valid_payload(properties, payload):
            self.acknowledge_refused(session, packet, Reason.PAYLOAD_FORMAT)
            return
        self.hub.figures.published += 1
        interval_s: int | None = properties.get(MESSAGE_EXPIRY_S)
        session.receive(
            topic,
            payload,
            (flags >> 1) & 3,
            packet_id,
            retain=bool(flags & 1),
            expires_ms=0 if interval_s is None else self.hub.clock.now_ms() + interval_s * 1000,
            properties=properties.forwarded(),
        )

    def answer(self, session: Session, packet: Packet) -> None:
        """An acknowledgement of the client, PUBREL or PINGREQ."""
        match packet:
            case Puback():
                session.puback(packet.packet_id)
            case Pubrec():
                if packet.reason < Reason.UNSPECIFIED:
                    session.pubrec(packet.packet_id)
                else:
                    session.refused(packet.packet_id)
            case Pubrel():
                session.pubrel(packet.packet_id)
            case Pubcomp():
                session.pubcomp(packet.packet_id)
            case Pingreq():
                self.write(PINGRESP)
            case _:
                raise AssertionError(packet)

    # ------------------------------------------------------------------------ the lane

    def _queue(self, packets: list[Packet]) -> None:
        """Handle packets in order, behind what is being waited for."""
        session = self.session
        for packet in packets:
            if type(packet) is Connect:
                self._connecting = asyncio.ensure_future(self._connect(packet))
                continue
            if type(packet) is Auth:
                self._auth(packet)
                if self.ended is not None:
                    return
                continue
            if session is None and self._interrupts(packet):
                return
            if session is not None and type(packet) in _BYPASS:
                self.guard.packet_received(packet)
                self.answer(session, packet)
                continue
            self._lane.add(packet)
            if type(packet) is Publish and self.five is not None and not self._within_quota(packet):
                return
        if session is not None:
            session.turn_over()
            self._lane.start(self)
        if self._lane.is_full:
            self.pause()

    def _within_quota(self, packet: Publish) -> bool:
        """A message counts from when it came: what lets go of others (PUBREL) does not wait in the
        lane behind it. False: the connection has ended."""
        assert self.five is not None
        try:
            self.five.count(packet)
        except MalformedPacket as error:
            self._malformed(error)
        return self.ended is None

    async def _connect(self, packet: Connect) -> None:
        """The CONNECT, then what was sent right behind it."""
        self.version = packet.version
        if packet.version == 5:
            settings = self.hub.settings
            authentication = Authentication(
                self.guard.exchange, self.send, timeout_s=settings.connect_timeout_s
            )
            self.five = Version5(packet, settings, authentication)
            self.receive_maximum = self.five.terms.receive_maximum
            self.packet_bytes_max = self.five.terms.packet_bytes_max
        self.guard.packet_received(packet)
        try:
            await self.hub.registry.connect(self, packet)
        except Exception:
            # our own bug, in one client's CONNECT: the broker goes on; the client may try again
            log.exception("CONNECT of %r failed", packet.client_id)
            self.refuse(Reason.UNAVAILABLE)
        finally:
            self._connecting = None
        if self.session is None or self.closed:
            self._lane.clear()
            if not self.closed and self.ended is None:
                self._end(LOST)
            return
        self.silent_after_s = 0.0
        seconds = packet.keep_alive_s
        if self.five is not None:
            seconds = keep_alive_s(self.hub.settings, seconds)
        if seconds:
            delay = self.hub.settings.timeout_disconnect_delay_s
            self.silent_after_s = (seconds + delay) * 1.5  # [MQTT-3.1.2-24]
        self.heard = True
        if self._lane.is_busy:
            self._lane.start(self)
        elif self.decoder.error is not None:
            self._malformed(self.decoder.error)

    def caught_up(self) -> None:
        """The lane is empty: on with the rest."""
        if self.session is not None:
            self.session.turn_over()
        if self.decoder.error is not None:
            self._malformed(self.decoder.error)

    def disconnect(self, session: Session, packet: Disconnect) -> None:
        """DISCONNECT."""
        if self.five is not None:
            try:
                self.five.leave(packet)
            except MalformedPacket as error:
                self._malformed(error)
                return
            session.expiry_s = self.five.terms.granted_expiry_s(self.hub.settings)
        if packet.reason >= 0x80:
            self._end(COMPLAINED)
        else:
            self._end(WITH_WILL if packet.reason else DISCONNECTED)

    def acknowledge_refused(self, session: Session, packet: Publish, reason: Reason) -> None:
        """A message that is not taken is dropped, and its client told why; 3.1.1 cannot say no, so
        there it is acknowledged [MQTT-3.3.5-2]."""
        if packet.qos == 1:
            self.acknowledge(encode(Puback(packet.packet_id, reason), self.version), stored=False)
        elif packet.qos == 2:
            if self.five is None or packet.packet_id in session.inbound:
                session.inbound.add(packet.packet_id)
                reason = Reason.SUCCESS  # of MQTT 5: the message with this id was taken before
            self.acknowledge(encode(Pubrec(packet.packet_id, reason), self.version), stored=False)

    # ------------------------------------------------------------------ authentication

    async def authenticate(self, connect: Connect) -> bytes | Reason:
        """The user of a CONNECT (b"" = anonymous), or why it is refused."""
        five = self.five
        if five is not None and method_of(connect.properties) is not None:
            user = await five.authentication.begin(connect)
            return user if five.can_accept(connect) else Reason.PACKET_TOO_LARGE
        known = await self.guard.authenticate(connect)
        if known is None:
            named = connect.username is not None or connect.password is not None
            return Reason.BAD_CREDENTIALS if named else Reason.NOT_AUTHORIZED
        return known

    def _interrupts(self, packet: Packet) -> bool:
        """Whether a packet came in the middle of an authentication before CONNACK
        [MQTT5-3.1.2-30]."""
        if self.five is None or not self.five.authentication.under_way:
            return False
        if type(packet) is Disconnect:
            self._end(LOST)
        else:
            what = "a packet in the middle of an authentication"
            self._malformed(MalformedPacket(Reason.PROTOCOL_ERROR, "MQTT5-3.1.2-30", what))
        return True

    def _auth(self, packet: Auth) -> None:
        """An answer in an exchange that is under way, or the begin of a re-authentication."""
        assert self.five is not None
        authentication = self.five.authentication
        if authentication.answer(packet):
            return
        if self.session is not None and authentication.begins_again(packet):
            self._authenticating = asyncio.ensure_future(
                self._authenticate_again(self.session, packet)
            )
            return
        what = "an AUTH packet that nothing called for"
        self._malformed(MalformedPacket(Reason.PROTOCOL_ERROR, "MQTT5-4.12.0-6", what))

    async def _authenticate_again(self, session: Session, packet: Auth) -> None:
        """[MQTT5-4.12.1-1]: beside everything else."""
        assert self.five is not None
        told = await self.five.authentication.again(packet, session.client_id, session.user)
        if self.ended is not None:
            return
        if told is None:
            self._end(REFUSED)
        else:
            self.send(Auth(Reason.SUCCESS, told))

    # ------------------------------------------------------------------------- writing

    def send(self, packet: Packet) -> None:
        """Send any packet but PUBLISH, as its client may be sent it."""
        if self.five is None:
            self.write(encode(packet, self.version))
            return
        data = self.five.encode(packet)
        if data is not None:
            self.write(data)
        elif self.ended is None:
            self._end(TOO_SMALL)

    def write(self, data: bytes) -> None:
        """Send, together with what else this turn of the loop brings."""
        self._parts.append(data)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def publish(
        self,
        entry: Entry,
        qos: int,
        packet_id: int,
        *,
        dup: bool,
        retain: bool,
        identifiers: bytes = b"",
    ) -> None:
        """Send a PUBLISH."""
        topic = entry.topic
        payload = entry.payload
        if self.five is not None:
            now_ms = self.hub.clock.now_ms() if entry.expires_ms else 0
            topic, properties = self.five.head_and_properties(entry, identifiers, now_ms)
            payload = properties + payload
        first = 0x30 | (qos << 1) | (8 if dup else 0) | retain
        size = len(payload) + 2 if qos else len(payload)
        key = (first, topic, size)
        head = _heads.get(key)
        if head is None:
            if len(_heads) >= HEADS_MAX:
                _heads.clear()
            head = _heads[key] = publish_head(first, topic, size)
        parts = self._parts
        parts.append(head)
        if qos:
            parts.append(PACKET_ID[packet_id])
        parts.append(payload)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)
        self._parts_bytes += size
        if self._parts_bytes > WRITE_HIGH_BYTES:
            self.flush()  # so that the transport can say that it is full

    def acknowledge(self, data: bytes, *, stored: bool) -> None:
        """Send after everything acknowledged before; if ``stored``, after the open batch."""
        waiting = self._waiting
        if stored:
            batch = self.hub.committer.open_batch
            if waiting and waiting[-1].batch is batch:
                waiting[-1].data += data
            else:
                waiting.append(_Waiting(batch, bytearray(data)))
                self.hub.committer.after(self._committed)
        elif waiting:
            waiting[-1].data += data
        else:
            self.write(data)
            if self.five is not None:
                self.five.in_flight.written(data)

    @property
    def awaiting(self) -> bool:
        """An acknowledgement waits for a commit."""
        return bool(self._waiting)

    def _committed(self) -> None:
        data = bytes(self._waiting.popleft().data)
        if self.ended is None:
            self.write(data)
            if self.five is not None:
                self.five.in_flight.written(data)

    def flush(self) -> None:
        """Hand what was collected to the socket."""
        self._flush_scheduled = False
        parts = self._parts
        if not parts:
            return
        self._parts = []
        self._parts_bytes = 0
        if self.closed or self._had_last_word:
            return
        data = b"".join(parts) if len(parts) > 1 else parts[0]
        if self.guard.slow:
            self.guard.packet_sent(data)
        self.transport.write(data)

    def pause_writing(self) -> None:
        """The socket is full (asyncio calls this)."""
        self.congested = True

    def resume_writing(self) -> None:
        """There is room again (asyncio calls this)."""
        self.congested = False
        if self.session is not None and not self.session.sealed:
            self.session.turn_over()

    # ------------------------------------------------------------------- back pressure

    def stop_reading(self) -> None:
        """The broker stops: what arrives from now on stays unread."""
        self.pause()
        self._stopped = True

    def pause(self) -> None:
        """Do not read until ``resume``; a client that is not read is not silent."""
        if not self._paused and not self.closed:
            self._paused = True
            self.transport.pause_reading()

    def wait_for_turn(self) -> None:
        """The listener is full: do not read until ``serve`` (max_connections)."""
        self.pause()

    def serve(self) -> None:
        """The listener has a place: the time for CONNECT begins now."""
        self.deadline_s = self.hub.clock.monotonic() + self.hub.settings.connect_timeout_s
        self.resume()

    def pause_for_room(self) -> None:
        """Its client feeds the store faster than that commits: do not read until there is room."""
        self.pause()
        self.hub.committer.when_room(self.resume)

    def resume_when_room(self) -> None:
        """Read again, as soon as the store has room."""
        if self._paused and self.hub.committer.over:
            self.hub.committer.when_room(self.resume)
        else:
            self.resume()

    def resume(self) -> None:
        """Read again, if nothing else forbids it."""
        if self._paused and not (self.closed or self._stopped or self._lane.is_full):
            self._paused = False
            self.heard = True
            self.transport.resume_reading()

    def overdue(self, now_s: float) -> None:
        """Look whether the client was silent for too long (the hub's timer)."""
        if self.ended is not None:
            if now_s >= self.deadline_s:
                self.transport.abort()
            return
        if self._paused or self._connecting is not None:
            self.heard = True  # we do not listen, so it cannot be blamed
        elif self.session is None:
            if now_s >= self.deadline_s:  # bytes that never become a CONNECT do not help
                log.info("client %s sent no CONNECT in time; closing", self.peername)
                self._end(LOST)
        elif self.silent_after_s and self.heard:
            self.heard = False
            self.deadline_s = now_s + self.silent_after_s
        elif self.silent_after_s and now_s >= self.deadline_s:
            log.info("client %s is silent for too long; closing", self.peername)
            self._end(SILENT)

    # ------------------------------------------------------------------------- the end

    def accept(self, connect: Connect, *, session_present: bool, words: Words = NO_WORDS) -> None:
        """Answer a CONNECT. words: why a session is not present, for MQTT 5."""
        if self.five is None:
            self.write(connack(session_present=session_present))
        else:
            self.send(self.five.connack(connect, session_present, words))

    def refuse(self, reason: Reason, text: bytes = b"") -> None:
        """Answer a CONNECT with a reason why not, and close [MQTT-3.2.2-5]."""
        if not self.closed and self.ended is None:
            self.hub.figures.connects_refused += 1
            self._refuse(reason, text)
            self._end(LOST)

    def _refuse(self, reason: int, text: bytes = b"") -> None:
        self._said_why = True
        if self.version < 5:
            self.write(connack(session_present=False, reason=return_code(reason)))
        elif self.five is None:  # nothing is known of what it takes
            self.write(connack(session_present=False, reason=reason, version=5))
        else:
            data = self.five.encode(Connack(False, reason, with_words(Words(text))))
            if data is not None:
                self.write(data)

    def finish(self, end: End) -> None:
        """Close the connection; its session ends with this reason."""
        self._end(end)

    def _malformed(self, error: MalformedPacket) -> None:
        self.hub.figures.malformed += 1
        log.warning("client %s: %s; closing the connection", self.peername, error)
        words = Words(f"{error.what} [{error.clause}]".encode())
        if self.session is None and self.ended is None:
            # a CONNECT is answered in the form that its client understands; nothing else is
            if self.decoder.level == 5:
                self.version = 5
                if valid_reason(CONNACK, error.reason_code):
                    self._refuse(error.reason_code, words.text)
            elif isinstance(error, UnsupportedVersion):
                self._refuse(error.reason_code)
        self._end(End("malformed packet", reason=error.reason_code, words=words, blames=True))

    def _end(self, end: End) -> None:
        """End the session, send what was written, close the socket."""
        if self.ended is not None:
            return
        self.ended = end
        self._lane.clear()
        session = self.session
        if session is not None:
            self.hub.registry.leave(session, end)
            self.guard.disconnected(session, end)
            if self.five is not None and end.reason:
                told = self.five.encode(Disconnect(end.reason, with_words(end.words)))
                if told is not None:
                    self._said_why = True
                    self.write(told)
        if self.five is not None:
            self.five.authentication.stop()
        self.flush()
        if self.closed:
            return
        self.heard = False
        self.deadline_s = self.hub.clock.monotonic() + LINGER_S
        if self.congested or (end is SILENT and self.five is None):
            self.transport.abort()
        elif self._said_why and not self._stopped and self.transport.can_write_eof():
            # what a client sends to a closed socket makes TCP reset the connection, and it may
            # never read why (RFC 1122, 4.2.2.13): it is read and dropped, until it has closed, too
            self._had_last_word = True
            try:
                self.transport.write_eof()
            except OSError:  # its client has reset it, and we have not heard of it yet
                self.transport.abort()
                return
            if self._paused:
                self.transport.resume_reading()
        else:
            self.transport.close()

    def eof_received(self) -> bool:
        """The client closed its side: nothing can be delivered any more."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone (asyncio calls this)."""
        del exc
        self.closed = True
        if self.ended is None:
            self._end(LOST)
        self.hub.connections.discard(self)
        self._parts.clear()
        self.guard.closed()
        self.session = self.five = None  # no ring: what is not needed any more is freed at once

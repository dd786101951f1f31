"""Clients that are cheaper than the brokers they measure: blocking sockets, whole chunks."""

from __future__ import annotations

import select
import socket
import time
from dataclasses import dataclass, field
from typing import Final

from broker_ext.wire import (
    DISCONNECT,
    PACKET_ID,
    PUBACK_HEAD,
    PUBCOMP_HEAD,
    PUBREC_HEAD,
    PUBREL_HEAD,
    Connect,
    Decoder,
    Publish,
    Pubrel,
    Subscribe,
    SubscribeFilter,
    encode,
)
from interop.bench.packets import PACKET_IDS, BadStream, Got, Shape, acks_of

__all__ = [
    "HOST",
    "Link",
    "Lost",
    "Published",
    "Received",
    "connect_packet",
    "make_sessions",
    "publish",
    "receive",
    "subscribe_packet",
]

HOST: Final = "127.0.0.1"
USER: Final = b"bench"
RECV_BYTES: Final = 1 << 18
ANSWER_S: Final = 30.0
"""How long a broker may take for a CONNACK or a SUBACK."""
ENCODED_MAX: Final = 200_000
AT_ONCE: Final = 16
"""Connections that are open at the same time while sessions are made."""


class Lost(Exception):
    """The broker closed the connection, refused it, or did not answer in time."""


def connect_packet(client_id: str, *, clean: bool) -> bytes:
    return encode(Connect(4, client_id.encode(), clean, 60, username=USER, password=USER))


def subscribe_packet(topic_filter: str, qos: int) -> bytes:
    return encode(Subscribe(1, (SubscribeFilter(topic_filter.encode(), qos),)))


class Link:
    """A connection that is established. session_present: from the CONNACK.

    began: monotonic time just before the CONNECT was sent. rest: read and not looked at yet.
    """

    def __init__(
        self, port: int, client_id: str, *, clean: bool = False, timeout_s: float = ANSWER_S
    ) -> None:
        try:
            self.sock = socket.create_connection((HOST, port), timeout=timeout_s)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.began = time.monotonic()
            self.sock.sendall(connect_packet(client_id, clean=clean))
            self.rest = b""
            answer = self.take(4)
        except OSError as error:
            raise Lost(str(error)) from error
        if answer[0] != 0x20 or answer[3]:
            raise Lost(f"CONNACK {answer.hex()}")
        self.session_present = bool(answer[2])

    def take(self, count: int) -> bytes:
        """Wait for so many bytes."""
        while len(self.rest) < count:
            self.rest += self.recv()
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken

    def recv(self) -> bytes:
        """Wait for data, as long as the socket's timeout. Raises Lost."""
        try:
            data = self.sock.recv(RECV_BYTES)
        except OSError as error:
            raise Lost(str(error) or "no answer in time") from error
        if not data:
            raise Lost("closed by the broker")
        return data

    def has_data(self, timeout_s: float) -> bool:
        """Wait until there is something to read."""
        return bool(select.select([self.sock], [], [], max(0.0, timeout_s))[0])

    def send(self, data: bytes) -> None:
        """Raises Lost."""
        try:
            self.sock.sendall(data)
        except OSError as error:
            raise Lost(str(error)) from error

    def subscribe(self, topic_filter: str, qos: int) -> None:
        """Subscribe a session that has nothing to receive yet."""
        self.send(subscribe_packet(topic_filter, qos))
        answer = self.take(5)
        if answer[0] != 0x90 or answer[4] != qos:
            raise Lost(f"SUBACK {answer.hex()}")

    def leave(self) -> None:
        """DISCONNECT, and wait until the broker has closed."""
        try:
            self.sock.sendall(DISCONNECT)
            self.sock.settimeout(3)
            while self.sock.recv(RECV_BYTES):
                pass
        except OSError:
            pass  # it is gone, which is what was wanted
        self.sock.close()


def make_sessions(port: int, names: list[tuple[str, str]], qos: int = 1) -> None:
    """Make persistent sessions, which then sleep. names: (client id, filter). Raises Lost."""
    for start in range(0, len(names), AT_ONCE):
        links = [Link(port, client_id) for client_id, _ in names[start : start + AT_ONCE]]
        for link, (_, topic_filter) in zip(links, names[start:], strict=False):
            link.send(subscribe_packet(topic_filter, qos))
        for link in links:
            if link.take(5)[4] != qos:
                raise Lost("SUBSCRIBE was refused")
            link.send(DISCONNECT)
        for link in links:
            link.leave()


# ------------------------------------------------------------------------------- publishing


@dataclass(slots=True)
class Published:
    """What a publisher saw. began, ended: monotonic time of the first send, the last ack.

    latencies_s: publish to PUBACK or PUBCOMP, sorted.
    """

    sent: int
    acked: int
    began: float
    ended: float
    latencies_s: list[float] = field(default_factory=list)

    @property
    def per_s(self) -> float:
        return self.acked / max(self.ended - self.began, 1e-9)


def publish(
    link: Link,
    shapes: list[Shape],
    *,
    count: int,
    window: int,
    seconds: float,
    finish_s: float,
    rate: float | None = None,
) -> Published:
    """Publish ``count`` messages, round robin over the shapes, ``window`` of them under way.

    Nothing new after ``seconds``; then what is under way has ``finish_s`` to be acknowledged.
    rate: messages a second, stamped with the time; None = as fast as the window allows.
    Few messages are encoded before the first is sent, many on the way.
    """
    done = 0x40 if shapes[0].qos == 1 else 0x70
    is_ready = rate is None and count <= ENCODED_MAX
    ready = [shapes[i % len(shapes)].packet(i) for i in range(count)] if is_ready else []
    sent_at = [0.0] * (PACKET_IDS + 2)
    latencies: list[float] = []
    sent = 0
    rest = b""
    began = ended = time.monotonic()
    while True:
        now = time.monotonic()
        if now - began >= seconds:
            count = sent
        if len(latencies) >= count or now - began >= seconds + finish_s:
            break
        room = min(window - (sent - len(latencies)), count - sent)
        pause_s = began + seconds + (finish_s if sent >= count else 0.0) - now
        if rate is not None and sent < count:
            room = min(room, int((now - began) * rate) + 1 - sent)
            pause_s = min(pause_s, began + (sent + max(room, 0)) / rate - now)
        if room > 0:
            upto = sent + room
            if is_ready:
                chunk = ready[sent:upto]
            else:
                us = int(now * 1e6) if rate is not None else 0
                chunk = [shapes[i % len(shapes)].packet(i, us) for i in range(sent, upto)]
            for i in range(sent, upto):
                sent_at[i % PACKET_IDS + 1] = now
            sent = upto
            link.send(b"".join(chunk))
        if not link.has_data(pause_s):
            continue
        acks, rest = acks_of(rest + link.recv())
        ended = time.monotonic()
        latencies += [ended - sent_at[i] for first, _, i in acks if first == done]
        if done == 0x70:
            link.send(b"".join(PUBREL_HEAD + PACKET_ID[i] for first, _, i in acks if first == 0x50))
    return Published(sent, len(latencies), began, ended, sorted(latencies))


# -------------------------------------------------------------------------------- receiving


@dataclass(slots=True)
class Received:
    """What a subscriber got. first, last: monotonic time of the first and last new message.

    again: messages that came more than once. latencies_s: publisher's stamp to arrival, sorted.
    """

    sequences: set[int] = field(default_factory=set)
    again: int = 0
    disorder: int = 0
    first: float = 0.0
    last: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    _highest: int = -1

    def take(self, got: list[Got], now: float) -> None:
        """Count messages."""
        seen = self.sequences
        before = len(seen)
        numbers = [g.sequence for g in got]
        if numbers and (numbers[0] <= self._highest or numbers != sorted(numbers)):
            for number in numbers:
                self.disorder += number < self._highest and number not in seen
                self._highest = max(self._highest, number)
        seen.update(numbers)
        if len(seen) > before:
            self.last = now
            self.first = self.first or now
            self._highest = max(self._highest, numbers[-1])
        self.again += len(numbers) - (len(seen) - before)
        self.latencies_s += [now - g.stamp_us / 1e6 for g in got if g.stamp_us]

    def done(self) -> Received:
        """Nothing more is taken."""
        self.latencies_s.sort()
        return self


def receive(
    link: Link,
    shape: Shape,
    *,
    expect: int | None,
    seconds: float,
    quiet_s: float,
    linger_s: float = 0.0,
) -> Received:
    """Receive and acknowledge until ``expect`` messages came, or nothing for ``quiet_s``.

    The silence counts from the first message on. linger_s: what comes after the last one that
    was expected is waited for this long, since it would be a duplicate.
    """
    received = Received()
    read = _Qos1(shape) if shape.qos == 1 else _Qos2()
    end = time.monotonic() + seconds
    lingers = False
    data, link.rest = link.rest, b""
    while True:
        now = time.monotonic()
        if data:
            got, answer = read.feed(data)
            received.take(got, now)
            if answer:
                link.send(answer)
        if not lingers and expect is not None and len(received.sequences) >= expect:
            if read.settled:
                lingers = True
                end = min(end, now + linger_s)
        elif not lingers and received.last and now - received.last >= quiet_s:
            break
        if now >= end:
            break
        wait_s = end - now
        if received.last and not lingers:
            wait_s = min(wait_s, max(received.last + quiet_s - now, 0.001))
        data = link.recv() if link.has_data(wait_s) else b""
    return received.done()


class _Qos1:
    """PUBLISH packets of one shape, and nothing else."""

    settled = True

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._rest = b""

    def feed(self, data: bytes) -> tuple[list[Got], bytes]:
        got, self._rest = self._shape.read(self._rest + data)
        return got, b"".join([PUBACK_HEAD + PACKET_ID[g.packet_id] for g in got])


class _Qos2:
    """PUBLISH and PUBREL, mixed."""

    def __init__(self) -> None:
        self._decoder = Decoder(server=False, version=4)
        self._under_way: set[int] = set()

    @property
    def settled(self) -> bool:
        """Every handshake is over."""
        return not self._under_way

    def feed(self, data: bytes) -> tuple[list[Got], bytes]:
        got: list[Got] = []
        answer: list[bytes] = []
        for packet in self._decoder.feed(data):
            if isinstance(packet, Publish):
                answer.append(PUBREC_HEAD + PACKET_ID[packet.packet_id])
                if packet.packet_id in self._under_way:
                    continue  # sent again within its handshake: no second delivery
                self._under_way.add(packet.packet_id)
                sequence = int.from_bytes(packet.payload[:8], "big")
                stamp_us = int.from_bytes(packet.payload[8:16], "big")
                got.append(Got(0x30 | packet.flags, packet.packet_id, sequence, stamp_us))
            elif isinstance(packet, Pubrel):
                self._under_way.discard(packet.packet_id)
                answer.append(PUBCOMP_HEAD + PACKET_ID[packet.packet_id])
            else:
                raise BadStream(type(packet).__name__)
        if self._decoder.error is not None:
            raise BadStream(str(self._decoder.error))
        return got, b"".join(answer)

"""Clients that speak MQTT to a real ``Connection`` over a socket of ours.

An ``Identity`` is what a client remembers from one connection to the next; a ``Link`` is one
connection, and works off a script of ``Step``s. Acknowledgements are answered as MQTT wants it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from broker_ext.connection import Connection
from broker_ext.durable import DurableSession
from broker_ext.terms import FOR_EVER
from broker_ext.wire import (
    DISCONNECT,
    Connack,
    Connect,
    ConnectWill,
    Decoder,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    SubscribeFilter,
    Unsuback,
    Unsubscribe,
    encode,
)
from broker_ext.wire.properties import MESSAGE_EXPIRY_S, SESSION_EXPIRY_S
from tests.exploration.choices import Option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from broker_ext.session import End, Session
    from broker_ext.wire import Packet
    from storage.api import Entry
    from tests.exploration.world import World

__all__ = [
    "Identity",
    "Link",
    "Step",
    "disconnect",
    "drop",
    "publish",
    "settled",
    "subscribe",
    "unsubscribe",
    "until",
]


class Outgoing(NamedTuple):
    """A message that its publisher has not seen acknowledged to the end. expires_s: 0 = never."""

    topic: bytes
    payload: bytes
    qos: int
    expires_s: int = 0
    released: bool = False

    def packet(self, packet_id: int, *, retain: bool = False, dup: bool = False) -> Publish:
        pairs = ((MESSAGE_EXPIRY_S, self.expires_s),) if self.expires_s else ()
        flags = dup << 3 | self.qos << 1 | retain
        return Publish(
            flags, self.topic, packet_id, self.payload, Properties(pairs) if pairs else None
        )


class Identity:
    """A client id, and what its owner keeps across connections.

    outgoing: packet id -> message. incoming: QoS 2 packet ids received and not released.
    """

    def __init__(self, client_id: bytes) -> None:
        self.client_id = client_id
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: dict[int, bytes] = {}
        self._next_id = 0
        self._published = 0

    def packet_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def payload(self) -> bytes:
        self._published += 1
        return b"%s-%d" % (self.client_id, self._published)


class Step(NamedTuple):
    """A line of a script. ready: whether it may be done. do: do it. leaves: it ends the
    connection, which is a choice of its own."""

    name: str
    ready: Callable[[Link], bool]
    do: Callable[[Link], None]
    leaves: bool = False


def _accepted(link: Link) -> bool:
    return link.accepted or link.pipelines


def subscribe(*filters: tuple[bytes, int]) -> Step:
    def do(link: Link) -> None:
        packet = Subscribe(
            link.identity.packet_id(), tuple(SubscribeFilter(f, qos) for f, qos in filters)
        )
        link.asks(packet)

    return Step(f"SUBSCRIBE {filters}", _accepted, do)


def unsubscribe(*filters: bytes) -> Step:
    def do(link: Link) -> None:
        link.asks(Unsubscribe(link.identity.packet_id(), filters))

    return Step(f"UNSUBSCRIBE {filters}", _accepted, do)


def publish(topic: bytes, qos: int = 1, *, retain: bool = False, expires_s: int = 0) -> Step:
    """expires_s: Message Expiry Interval (the link speaks MQTT 5)."""

    def do(link: Link) -> None:
        identity = link.identity
        message = Outgoing(topic, identity.payload(), qos, expires_s)
        packet_id = identity.packet_id() if qos else 0
        if qos:
            identity.outgoing[packet_id] = message
        link.world.ledger.sent(link, message, retain=retain)
        link.send(message.packet(packet_id, retain=retain))

    return Step(f"PUBLISH {topic.decode()} QoS {qos}", _accepted, do)


def settled() -> Step:
    """Wait until everything that was asked and published is answered."""
    return Step(
        "settled",
        lambda link: link.accepted and not link.asked and not link.identity.outgoing,
        _nothing,
    )


def until(name: str, condition: Callable[[World], bool]) -> Step:
    """Wait for something in the world. As the first step, it holds back the dialling."""
    return Step(name, lambda link: condition(link.world), _nothing)


def disconnect() -> Step:
    return Step("DISCONNECT", _accepted, lambda link: link.out.append(DISCONNECT))


def drop() -> Step:
    """The socket breaks."""
    return Step("is lost", lambda link: not link.out, Link.lose, leaves=True)


def _nothing(link: Link) -> None:
    del link


class FakeGuard:
    """amqtt's plugins (guard.Guard): each answer may be held back by the world."""

    def __init__(self, world: World, link: Link) -> None:
        self.world = world
        self.link = link
        self.slow = world.guarded

    async def authenticate(self, connect: Connect) -> bytes | None:
        del connect
        await self.world.ask("authenticate", self.link)
        self.link.arrived = self.world.ledger.arrival()
        return self.link.user

    def exchange(self, method: bytes, client_id: bytes) -> None:
        del method, client_id

    async def may_publish(self, topic: bytes) -> bool:
        return await self._may("may_publish", topic)

    async def may_subscribe(self, topic_filter: bytes) -> bool:
        return await self._may("may_subscribe", topic_filter)

    async def may_receive(self, topic: bytes) -> bool:
        return await self._may("may_receive", topic)

    async def _may(self, question: str, name: bytes) -> bool:
        await self.world.ask(question, self.link)
        return name not in self.world.forbidden

    def packet_received(self, packet: Packet) -> None: ...

    def packet_sent(self, data: bytes) -> None: ...

    def message_received(self, packet: Publish, *, permitted: bool | None) -> None: ...

    def subscribed(self, topic_filter: bytes, qos: int) -> None: ...

    def unsubscribed(self, topic_filter: bytes) -> None: ...

    def connected(self, session: Session) -> None:
        self.link.session = session
        if self.link.claims_max and isinstance(session, DurableSession):
            session.out.limit = self.link.claims_max

    def disconnected(self, session: Session, end: End) -> None: ...

    def closed(self) -> None: ...


class _Watched(Connection):
    """The broker's side of a link."""

    __slots__ = ()

    def publish(self, entry: Entry, qos: int, packet_id: int, **how: Any) -> None:
        assert isinstance(self.transport, Link)
        self.transport.world.ledger.begins(self.transport, entry.payload)
        super().publish(entry, qos, packet_id, **how)


class Link:
    """One connection of a client; it is the transport of its ``Connection``.

    answers: SUBACKs and UNSUBACKs that came.
    arrived: number of its CONNECT among those that were authenticated, 0 = not yet.
    pipelines: it sends its script right behind the CONNECT. droppable: it may be lost at any time.
    claims_max: deliveries that may be claimed for it, 0 = as many as usual.
    version: 4, or 5. will_delay_s: of its will (MQTT 5). ended_ms: when the broker saw it end.
    """

    def __init__(
        self,
        world: World,
        name: str,
        identity: Identity,
        steps: tuple[Step, ...],
        *,
        clean: bool = False,
        will: ConnectWill | None = None,
        user: bytes = b"",
        pipelines: bool = False,
        droppable: bool = False,
        claims_max: int = 0,
        version: int = 4,
        will_delay_s: int = 0,
    ) -> None:
        self.world = world
        self.name = name
        self.identity = identity
        self.steps = deque(steps)
        self.clean = clean
        self.will = will
        self.user = user
        self.pipelines = pipelines
        self.droppable = droppable
        self.claims_max = claims_max
        self.version = version
        self.will_delay_s = will_delay_s
        self.ended_ms = 0
        self.connection: Connection | None = None
        self.session: Session | None = None
        self.decoder = Decoder(server=False, version=version)
        self.out: deque[bytes] = deque()
        self.asked: deque[Subscribe | Unsubscribe] = deque()
        self.received: list[Publish] = []
        self.answers = 0
        self.arrived = 0
        self.accepted = False
        self.refused: int | None = None
        self.present: bool | None = None
        self.closing = False
        self.gone = False
        self.reading = True

    def __repr__(self) -> str:
        return self.name

    @property
    def up(self) -> bool:
        """Whether the socket stands, as both sides see it."""
        return self.connection is not None and not (self.closing or self.gone)

    # ----------------------------------------------------------------- what may happen

    def options(self) -> Iterator[Option]:
        if self.gone:
            return
        if self.connection is None:
            if self._may_dial():
                yield Option(self.name, f"{self} dials", self.dial)
            return
        if self.closing:
            yield Option(self.name, f"{self}: the socket is closed", self.lose)
            return
        if self.out and self.reading:
            yield Option(self.name, f"{self}: {len(self.out)} packets arrive", self._deliver_all)
            if len(self.out) > 1:
                yield Option(self.name, f"{self}: one packet arrives", self._deliver_one, 1)
            if len(self.out[0]) > 3:
                yield Option(self.name, f"{self}: half a packet arrives", self._deliver_half, 1)
        if self.steps and self.steps[0].leaves and self.steps[0].ready(self):
            yield Option(self.name, f"{self} {self.steps[0].name}", self._do_step)
        elif self.droppable:
            yield Option(self.name, f"{self} is lost", self.lose, 1)

    def _may_dial(self) -> bool:
        while self.steps and self.steps[0].do is _nothing and self.steps[0].ready(self):
            self.steps.popleft()
        return not (self.steps and self.steps[0].do is _nothing)

    def follow(self) -> None:
        """Do what the script has next, as far as it only puts bytes into the socket."""
        while self.up and self.steps and not self.steps[0].leaves and self.steps[0].ready(self):
            self._do_step()

    def _do_step(self) -> None:
        self.steps.popleft().do(self)

    def _deliver_all(self) -> None:
        data = b"".join(self.out)
        self.out.clear()
        self._deliver(data)

    def _deliver_one(self) -> None:
        self._deliver(self.out.popleft())

    def _deliver_half(self) -> None:
        first = self.out.popleft()
        self.out.appendleft(first[len(first) // 2 :])
        self._deliver(first[: len(first) // 2])

    def _deliver(self, data: bytes) -> None:
        assert self.connection is not None
        self.connection.data_received(data)

    def dial(self) -> None:
        self.connection = _Watched(
            self.world.hub, self, FakeGuard(self.world, self), peername=self.name
        )
        properties = None
        if self.version == 5 and not self.clean:
            properties = Properties(((SESSION_EXPIRY_S, FOR_EVER),))
        connect = Connect(
            self.version,
            self.identity.client_id,
            clean_start=self.clean,
            will=self.will,
            properties=properties,
        )
        self.world.ledger.dialled(self)
        self.send(connect)

    def lose(self) -> None:
        """The socket is gone, and the broker is told."""
        assert self.connection is not None
        self.gone = True
        self.out.clear()
        self.steps.clear()
        self.connection.connection_lost(None)

    # ---------------------------------------------------------------------- the transport

    def write(self, data: bytes) -> None:
        for packet in self.decoder.feed(data):
            self.world.ledger.written(self, packet)
            if self.up:
                self._receive(packet)

    def can_write_eof(self) -> bool:
        return False

    def write_eof(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    # ------------------------------------------------------------------------- the client

    def send(self, packet: Packet) -> None:
        self.out.append(encode(packet, self.version))

    def asks(self, packet: Subscribe | Unsubscribe) -> None:
        self.asked.append(packet)
        self.world.ledger.asked(self, packet)
        self.send(packet)

    def _receive(self, packet: Packet) -> None:
        identity = self.identity
        match packet:
            case Connack():
                self._answered(packet)
            case Suback() | Unsuback():
                self.asked.popleft()
                self.answers += 1
            case Publish():
                self._receive_publish(packet)
            case Pubrel(packet_id):
                identity.incoming.pop(packet_id, None)
                self.send(Pubcomp(packet_id))
            case Puback(packet_id) | Pubcomp(packet_id):
                identity.outgoing.pop(packet_id, None)
            case Pubrec(packet_id):
                message = identity.outgoing.get(packet_id)
                if message is not None:
                    identity.outgoing[packet_id] = message._replace(released=True)
                self.send(Pubrel(packet_id))

    def _answered(self, packet: Connack) -> None:
        if packet.reason:
            self.refused = packet.reason
            return
        self.accepted = True
        self.present = packet.session_present
        identity = self.identity
        if not packet.session_present:
            identity.outgoing.clear()
            identity.incoming.clear()
        for packet_id, message in identity.outgoing.items():
            if message.released:
                self.send(Pubrel(packet_id))
            else:
                self.send(message.packet(packet_id, dup=True))

    def _receive_publish(self, packet: Publish) -> None:
        self.received.append(packet)
        if packet.qos == 1:
            self.send(Puback(packet.packet_id))
        elif packet.qos == 2:
            self.identity.incoming[packet.packet_id] = packet.payload
            self.send(Pubrec(packet.packet_id))

"""Raw clients of MQTT 3.1.1 and 5 that behave badly within the rules, and note what they see.

Most of them speak one version on one connection and the other on the next.

Each client decides with a random generator of its own, so that one client's decisions do not
depend on how the others' packets happened to arrive.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from broker_ext.wire import (
    PINGREQ,
    Connack,
    Connect,
    ConnectWill,
    Decoder,
    Disconnect,
    Pingresp,
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
from broker_ext.wire.properties import (
    MESSAGE_EXPIRY_S,
    RECEIVE_MAX,
    SESSION_EXPIRY_S,
    TOPIC_ALIAS,
    TOPIC_ALIAS_MAX,
    USER_PROPERTY,
)
from tests.crash import facts
from tests.crash.broker import HOST
from tests.crash.facts import Message

if TYPE_CHECKING:
    from broker_ext.wire import Packet, PropertyValue
    from tests.crash.facts import Fact

__all__ = [
    "ANSWER_S",
    "END",
    "SHARED",
    "VERSED",
    "Client",
    "Member",
    "Publisher",
    "Subscriber",
    "World",
]

ANSWER_S: Final = 20.0
"""How long an answer may take on a busy machine before it counts as missing."""
END: Final = "end"
"""Topic of the marker that is published when everything else is accepted."""
WINDOW: Final = 40
"""Messages a publisher has under way."""
PACKET_IDS: Final = 60
"""Packet ids a publisher has: it uses them again soon."""
FOR_EVER: Final = 0xFFFF_FFFF
TAKEN_OVER: Final = 0x8E
SHUTTING_DOWN: Final = 0x8B
UNAVAILABLE: Final = (3, 0x88)
"""CONNACK: before MQTT 5, and in it."""
REFUSED: Final = 0x80
QUOTA_EXCEEDED: Final = 0x97
TICK_MS: Final = 10
QUIET_S: Final = 1.5
"""When nothing came for so long, nothing more comes."""
SHARED: Final = "$share/crew/t/#"
"""What the members of the group share."""
VERSED: Final = "versed"
"""The publisher whose messages have properties."""
ALIASES: Final = 3
"""Topics that have an alias on a connection."""


class World:
    """What the clients share.

    is_wild: they misbehave; at the end they do not. is_stopping: the broker was told to stop, and
    may refuse a CONNECT. may_refuse: its disk is full now and then, and it may refuse what it
    cannot store.
    """

    def __init__(self, seed: int, port: int, *, may_refuse: bool = False) -> None:
        self.may_refuse = may_refuse
        self.seed = seed
        self.port = port
        self.history: list[Fact] = []
        self.is_wild = True
        self.is_stopping = False
        self._ticked_ms = 0
        self._links = itertools.count(1)
        self._tickets = itertools.count(1)

    def note(self, fact: Fact) -> int:
        """Add a fact; give its index."""
        now_ms = time.time_ns() // 1_000_000
        if now_ms >= self._ticked_ms + TICK_MS:
            self._ticked_ms = now_ms
            self.history.append(facts.Ticked(now_ms))
        self.history.append(fact)
        return len(self.history)

    def next_link(self) -> int:
        """Give the number of a new connection."""
        return next(self._links)

    def next_ticket(self) -> int:
        """Give the number of a request."""
        return next(self._tickets)


class Link:
    """One connection of a client. number: its own in the history.

    answered: the CONNACK, or None when the connection ended without one. expiry_s: how long the
    session is kept after it, None = for ever. window: deliveries that may be under way, 0 = any.
    told: the reason of the broker's DISCONNECT, -1 = none came.
    """

    def __init__(
        self, client: Client, *, clean: bool, version: int, expiry_s: int | None, window: int = 0
    ) -> None:
        self.client = client
        self.clean = clean
        self.version = version
        self.expiry_s = expiry_s
        self.window = window
        self.told = -1
        self.under_way: set[int] = set()
        self.aliases_max = 0
        self.aliases: dict[bytes, int] = {}
        self.number = client.world.next_link()
        self.decoder = Decoder(server=False, version=version)
        self._topics: dict[int, bytes] = {}
        self._is_over = False
        self.answered: asyncio.Future[Connack | None]
        self.answered = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.pings: list[int] = []
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self) -> bool:
        """Connect the socket. False: nobody listens."""
        try:
            reader, self._writer = await asyncio.open_connection(HOST, self.client.world.port)
        except OSError:
            return False
        self._reading = asyncio.ensure_future(self._read(reader))
        return True

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while data := await reader.read(65_536):
                for packet in self.decoder.feed(data):
                    self._arrived(packet)
                if self.decoder.error is not None:
                    text = f"{self.client.name}: {self.decoder.error}"
                    self.client.world.note(facts.Failed("down", text))
                    return
                await self.may_read.wait()
        except OSError:
            pass  # cut, by us or with the broker
        finally:
            self.over()
            self.gone.set()
            if not self.answered.done():
                self.answered.set_result(None)
            if self._writer is not None:
                self._writer.close()

    def _arrived(self, packet: Packet) -> None:
        if isinstance(packet, Connack):
            if not self.answered.done():
                self.answered.set_result(packet)
            if packet.properties is not None:
                self.aliases_max = min(packet.properties.get(TOPIC_ALIAS_MAX, 0), ALIASES)
        elif isinstance(packet, Disconnect):
            self.told = packet.reason
        elif isinstance(packet, Publish) and packet.properties is not None:
            alias = packet.properties.get(TOPIC_ALIAS, 0)
            if packet.topic and alias:
                self._topics[alias] = packet.topic
            elif alias:
                packet = packet._replace(topic=self._topics[alias])
        self.client.handle(self, packet)

    def send(self, packet: Packet) -> None:
        """Write a packet; what a dead connection is given is lost."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(packet, self.version))

    def disconnect(self, expiry_s: int | None = None) -> None:
        """DISCONNECT, perhaps with another session expiry, and close."""
        self.over(expiry_s)
        said = None if expiry_s is None else Properties(((SESSION_EXPIRY_S, expiry_s),))
        self.send(Disconnect(0, said))
        self.close(politely=True)

    def over(self, expiry_s: int | None = None) -> None:
        """Note, once, that this connection ends."""
        if not self._is_over:
            self._is_over = True
            self.client.world.note(facts.Left(self.client.name, self.number, expiry_s))

    def ping(self) -> None:
        """Send PINGREQ."""
        self.pings.append(self.client.world.note(facts.Pinging(self.client.name, self.number)))
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(PINGREQ)

    def close(self, *, politely: bool) -> None:
        """Close: what is written still goes out, or it is cut."""
        self.over()
        if self._writer is not None:
            if politely:
                self._writer.close()
            else:
                self._writer.transport.abort()
        self.gone.set()

    async def end(self) -> None:
        """Cut, and wait for the reader."""
        self.close(politely=False)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)


class Client:
    """A client id, through as many connections as it takes."""

    clean = False

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.rng = random.Random(f"{world.seed}/{name}")  # noqa: S311 - no secret
        self.link: Link | None = None
        self.back_at = 0.0
        self._links: list[Link] = []

    # ----------------------------------------------------------------------- connecting

    def version(self) -> int:
        """Choose the version of the next connection."""
        return self.rng.choice((4, 5))

    def new_link(self, *, clean: bool) -> Link:
        """Choose what the next connection is like."""
        return Link(
            self,
            clean=clean,
            version=self.version(),
            expiry_s=0 if clean else None,
            window=self.rng.choice((0, 5, 30)),
        )

    def _connect_packet(self, link: Link) -> Connect:
        properties = None
        if link.version == 5:
            pairs: list[tuple[int, PropertyValue]] = []
            if link.expiry_s != 0:
                pairs.append((SESSION_EXPIRY_S, link.expiry_s or FOR_EVER))
            if link.window:
                pairs.append((RECEIVE_MAX, link.window))
            pairs.append((TOPIC_ALIAS_MAX, self.rng.choice((0, ALIASES))))
            properties = Properties(tuple(pairs))
        name = self.name.encode()
        return Connect(
            link.version, name, link.clean, 0, will=self.will(link), properties=properties
        )

    async def connect(self, *, clean: bool | None = None) -> bool:
        """Open a connection and wait for CONNACK; an open one is taken over from."""
        link = self.new_link(clean=self.clean if clean is None else clean)
        if not await link.open():
            await asyncio.sleep(0.01)
            return False
        self._links.append(link)
        self.world.note(facts.Connecting(self.name, link.number, link.clean, link.expiry_s))
        link.send(self._connect_packet(link))
        answered, _ = await asyncio.wait([link.answered], timeout=ANSWER_S)
        answer = link.answered.result() if answered else None
        is_refused = answer is not None and answer.reason in UNAVAILABLE
        if is_refused and (self.world.is_stopping or self.world.may_refuse):
            link.close(politely=False)
        elif not answered or (answer is not None and answer.reason):
            self.world.note(facts.Failed("down", f"{self.name}: CONNACK {answer}"))
            link.close(politely=False)
        return self.link is link and not link.gone.is_set()

    def will(self, link: Link) -> ConnectWill | None:
        """Give the will of a connection."""
        del link
        return None

    def handle(self, link: Link, packet: Packet) -> None:
        """A packet arrived."""
        if isinstance(packet, Connack):
            if packet.reason:
                return
            older, self.link = self.link, link
            clean, present = link.clean, packet.session_present
            self.world.note(facts.Connected(self.name, link.number, clean, present, link.expiry_s))
            if older is not None and older is not link and not older.gone.is_set():
                older.may_read.set()
            self.connected(link, present=present, clean=clean)
        elif link is not self.link:
            return  # this connection was taken over from: the client no longer listens to it
        elif isinstance(packet, Pingresp):
            if link.pings:
                self.world.note(facts.Ponged(self.name, link.number, link.pings.pop(0)))
        else:
            self.arrived(link, packet)

    def connected(self, link: Link, *, present: bool, clean: bool) -> None:
        """Go on where the last connection ended."""
        raise NotImplementedError

    def arrived(self, link: Link, packet: Packet) -> None:
        """Handle a packet of the current connection."""
        raise NotImplementedError

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection that was accepted."""
        return self.link is not None and not self.link.gone.is_set()

    async def leave(self) -> None:
        """End every connection, as the end of the broker does."""
        links, self._links = self._links, []
        for link in links:
            await link.end()
        self.link = None

    async def must_be_taken_over(self, older: Link) -> None:
        """The broker has to close the older connection (P7)."""
        older.may_read.set()
        try:
            # not wait_for: in Python 3.11 it drops a cancellation that comes with the result
            async with asyncio.timeout(ANSWER_S):
                await older.gone.wait()
        except TimeoutError:
            self.world.note(facts.Failed("owner", f"{self.name}: link {older.number} lives on"))
        may_be_told = [-1, TAKEN_OVER, SHUTTING_DOWN]  # -1: 3.1.1, or the broker died
        if older.told not in may_be_told + [REFUSED] * self.world.may_refuse:
            text = f"{self.name}: link {older.number} was told {older.told:#x}"
            self.world.note(facts.Failed("owner", text))

    # ---------------------------------------------------------------------------- living

    async def live(self) -> None:
        """Misbehave until cancelled."""
        while True:
            away_s = self.back_at - asyncio.get_running_loop().time()
            if away_s > 0:
                await asyncio.sleep(away_s)
            if not self.is_connected and not await self.connect():
                continue
            await self.act()

    async def act(self) -> None:
        """Do one thing."""
        raise NotImplementedError

    async def change_connection(self) -> None:
        """Disconnect, be cut, or take over from oneself; then perhaps stay away."""
        link = self.link
        if link is None:
            return
        how = self.rng.random()
        if how < 0.35:
            link.disconnect()
        elif how < 0.7:
            link.close(politely=self.rng.random() < 0.5)
        else:
            if await self.connect():
                await self.must_be_taken_over(link)
            return
        self.stay_away()

    def stay_away(self) -> None:
        """Come back later."""
        self.back_at = asyncio.get_running_loop().time() + self.rng.choice((0.0, 0.0, 0.02, 0.2))


@dataclass(slots=True)
class _Pending:
    message: Message
    payload: bytes
    step: str = "sent"


class Publisher(Client):
    """Publishes at QoS 1 and 2, and finishes its handshakes late, or after a reconnect.

    clean: it forgets what was under way when its connection ends. versed: it speaks MQTT 5 only,
    and uses it: some of its messages expire, and all have their id in a User Property.
    """

    def __init__(
        self, world: World, name: str, *, clean: bool = False, versed: bool = False
    ) -> None:
        super().__init__(world, name)
        self.clean = clean
        self.versed = versed
        self.pending: dict[int, _Pending] = {}
        self._numbers = itertools.count(1)
        self._next_id = 1
        self._late: list[int] = []

    def version(self) -> int:
        return 5 if self.versed else super().version()

    def will(self, link: Link) -> ConnectWill | None:
        message = Message(f"will-{self.name}", link.number, f"t/will/{self.name}", 1)
        self.world.note(facts.Publishing(self.name, link.number, message, 0))
        return ConnectWill(message.topic.encode(), message.id.encode() + b"\n", 1, retain=False)

    def connected(self, link: Link, *, present: bool, clean: bool) -> None:
        self._late.clear()
        if clean or not present:
            self.pending.clear()
        for packet_id, pending in list(self.pending.items()):
            if pending.step == "sent":
                self._send(link, packet_id, pending, dup=True)
            else:
                self._release(link, packet_id, pending)

    def arrived(self, link: Link, packet: Packet) -> None:
        if not isinstance(packet, (Puback, Pubrec, Pubcomp)):
            return
        packet_id = packet.packet_id
        pending = self.pending.get(packet_id)
        if pending is None:
            self._unexpected(packet)
        elif packet.reason == QUOTA_EXCEEDED and self.world.may_refuse:
            del self.pending[packet_id]  # it is refused, and nobody has it
        elif packet.reason >= 0x80:
            text = f"{self.name}: {type(packet).__name__} {packet.reason:#x}"
            self.world.note(facts.Failed("down", text))
        elif isinstance(packet, Pubrec):
            self._received(link, packet_id, pending)
        elif isinstance(packet, Puback):
            del self.pending[packet_id]
            self.world.note(facts.Accepted(self.name, link.number, pending.message, packet_id))
        else:
            del self.pending[packet_id]
            self.world.note(facts.Completed(self.name, link.number, pending.message, packet_id))
        if self.world.is_wild and self.rng.random() < 0.002:
            link.close(politely=False)

    def _unexpected(self, packet: Puback | Pubrec | Pubcomp) -> None:
        text = f"{self.name}: {type(packet).__name__} {packet.packet_id} of nothing"
        self.world.note(facts.Failed("twice", text))

    def _received(self, link: Link, packet_id: int, pending: _Pending) -> None:
        if pending.step == "sent":
            pending.step = "accepted"
            self.world.note(facts.Accepted(self.name, link.number, pending.message, packet_id))
        if self.world.is_wild and self.rng.random() < 0.3:
            self._late.append(packet_id)
        else:
            self._release(link, packet_id, pending)

    def _release(self, link: Link, packet_id: int, pending: _Pending) -> None:
        pending.step = "released"
        self.world.note(facts.Released(self.name, pending.message, packet_id))
        link.send(Pubrel(packet_id))

    def _send(self, link: Link, packet_id: int, pending: _Pending, *, dup: bool) -> None:
        message = pending.message
        flags = message.qos << 1 | message.retain | dup << 3
        self.world.note(facts.Publishing(self.name, link.number, message, packet_id))
        topic, properties = self._with_properties(link, message)
        link.send(Publish(flags, topic, packet_id, pending.payload, properties))

    def _with_properties(self, link: Link, message: Message) -> tuple[bytes, Properties | None]:
        topic = message.topic.encode()
        pairs: list[tuple[int, PropertyValue]] = []
        if self.versed:
            pairs.append((USER_PROPERTY, (b"id", message.id.encode())))
        if message.expiry_s:
            pairs.append((MESSAGE_EXPIRY_S, message.expiry_s))
        if topic in link.aliases:
            pairs.append((TOPIC_ALIAS, link.aliases[topic]))
            topic = b""
        elif len(link.aliases) < link.aliases_max:
            alias = link.aliases[topic] = len(link.aliases) + 1
            pairs.append((TOPIC_ALIAS, alias))
        return topic, Properties(tuple(pairs)) if pairs else None

    def publish(self, message: Message, payload: bytes) -> None:
        """Send a message for the first time."""
        assert self.link is not None
        while self._next_id in self.pending:
            self._next_id = self._next_id % PACKET_IDS + 1
        packet_id, self._next_id = self._next_id, self._next_id % PACKET_IDS + 1
        pending = self.pending[packet_id] = _Pending(message, payload)
        self._send(self.link, packet_id, pending, dup=False)

    def publish_some(self) -> None:
        """Send one message, of a random kind."""
        rng = self.rng
        number = next(self._numbers)
        qos = rng.choice((1, 1, 2))
        topic, retain, empty = f"{rng.choice('tttu')}/{rng.randrange(4)}", False, False
        kind = rng.random()
        if kind < 0.1:
            # a topic that nobody else retains on: so the order of what is retained is known
            topic, retain = f"{rng.choice('tu')}/kept/{self.name}/{rng.randrange(3)}", True
            empty = rng.random() < 0.2
        elif kind < 0.15:
            topic, empty = f"t/empty/{self.name}-{number}", True
        expiry_s = rng.choice((1, 2)) if self.versed and rng.random() < 0.3 else 0
        if rng.random() < 0.15 and not (retain or empty):
            qos = 0
        message = Message(self.name, number, topic, qos, retain, empty, expiry_s)
        size = rng.choice((0, 0, 20, 100, 500, 2000, 65_536 if rng.random() < 0.2 else 100))
        payload = b"" if empty else message.id.encode() + b"\n" + b"\xff\x00" * (size // 2)
        if qos:
            self.publish(message, payload[:65_536])
        elif self.link is not None:
            self._send(self.link, 0, _Pending(message, payload[:65_536]), dup=False)

    def publish_end(self) -> None:
        """Send the marker."""
        message = Message(self.name, next(self._numbers), END, 1)
        self.publish(message, message.id.encode() + b"\n")

    async def act(self) -> None:
        rng = self.rng
        for _ in range(rng.randrange(1, 12)):
            if len(self.pending) < WINDOW:
                self.publish_some()
        await asyncio.sleep(rng.choice((0.0, 0.005, 0.01, 0.03)))
        link = self.link
        if link is None or link.gone.is_set():
            return
        if self._late and rng.random() < 0.5:
            late, self._late = self._late, []
            for packet_id in late:
                if packet_id in self.pending:
                    self._release(link, packet_id, self.pending[packet_id])
        if rng.random() < 0.03:
            await self.change_connection()

    async def finish(self) -> bool:
        """Have everything accepted that is under way. False: it is not, in time."""
        end = asyncio.get_running_loop().time() + 3 * ANSWER_S
        while asyncio.get_running_loop().time() < end:
            if self.is_connected or await self.connect():
                if not self.pending:
                    return True
                await asyncio.sleep(0.01)
        return False


class Subscriber(Client):
    """A durable session that acknowledges late, out of order, or not before the next connection.

    stable: filters it never gives up. churn: filters it takes and leaves. away: likes to be
    disconnected. forgetful: sometimes throws its session away. expiry_s: its session expires, and
    it stays away for about as long; it speaks MQTT 5 only.
    """

    def __init__(
        self,
        world: World,
        name: str,
        stable: dict[str, int],
        churn: tuple[str, ...] = (),
        *,
        away: float = 0.01,
        forgetful: bool = False,
        expiry_s: int | None = None,
    ) -> None:
        super().__init__(world, name)
        self.expiry_s = expiry_s
        self.stable = stable
        self.churn = churn
        self.away = away
        self.forgetful = forgetful
        self.saw_end = asyncio.Event()
        self._granted: set[str] = set()
        self._late: list[Puback | Pubrec | Pubcomp] = []
        self._requests: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._next_id = 1
        self._handshakes: set[int] = set()

    def new_link(self, *, clean: bool) -> Link:
        link = super().new_link(clean=clean)
        if self.expiry_s is None:
            return link
        return Link(self, clean=clean, version=5, expiry_s=self.expiry_s, window=link.window)

    def stay_away(self) -> None:
        super().stay_away()
        if self.expiry_s is not None and self.world.is_wild:
            self.back_at += self.rng.choice((0, 0, 0.2, 0.5, self.expiry_s + 1.2))

    # ------------------------------------------------------------------------- packets

    def connected(self, link: Link, *, present: bool, clean: bool) -> None:
        self._late.clear()
        self._requests.clear()
        if not present:
            self._granted.clear()
            self._handshakes.clear()
        missing = {f: q for f, q in self.stable.items() if f not in self._granted}
        if missing and not clean:
            self._subscribe(link, missing)

    def arrived(self, link: Link, packet: Packet) -> None:
        if isinstance(packet, Publish):
            self._delivered(link, packet)
        elif isinstance(packet, Pubrel):
            self._handshakes.discard(packet.packet_id)
            self.world.note(facts.Releasing(self.name, link.number, packet.packet_id))
            self._answer(link, Pubcomp(packet.packet_id))
        elif isinstance(packet, Suback):
            ticket, names = self._requests.pop(packet.packet_id)
            self.world.note(facts.Subscribed(self.name, ticket, tuple(packet.reasons)))
            if REFUSED in packet.reasons and self.world.may_refuse:
                link.close(politely=False)  # and asks again when it is back
            else:
                self._granted.update(names)
        elif isinstance(packet, Unsuback):
            ticket, _ = self._requests.pop(packet.packet_id)
            codes = tuple(packet.reasons or ())
            self.world.note(facts.Unsubscribed(self.name, ticket, codes))

    def _delivered(self, link: Link, packet: Publish) -> None:
        topic = packet.topic.decode()
        message_id = packet.payload.partition(b"\n")[0].decode()
        if not message_id and topic.startswith("t/empty/"):
            message_id = topic.rpartition("/")[2]
        if link.version == 5:
            self._check_properties(link, packet, message_id)
        self.world.note(
            facts.Delivered(
                self.name,
                link.number,
                message_id,
                packet.packet_id,
                packet.qos,
                packet.dup,
                packet.retain,
            )
        )
        if topic == END:
            self.saw_end.set()
        if packet.qos == 1:
            self._answer(link, Puback(packet.packet_id))
        elif packet.qos == 2:
            self._handshakes.add(packet.packet_id)
            self._answer(link, Pubrec(packet.packet_id))

    def _check_properties(self, link: Link, packet: Publish, message_id: str) -> None:
        """Look at what 3.1.1 does not know: properties of the message, and the window."""
        named = packet.properties.get(USER_PROPERTY) if packet.properties else None
        wanted = None
        if message_id.startswith(VERSED):
            wanted = (b"id", message_id.encode())
        if message_id and named != wanted:
            text = f"{self.name}: {message_id} came as {named}"
            self.world.note(facts.Failed("properties", text))
        if packet.qos:
            link.under_way.add(packet.packet_id)
            if link.window and len(link.under_way) > link.window:
                text = f"{self.name}: {len(link.under_way)} under way of {link.window}"
                self.world.note(facts.Failed("window", text))

    def _answer(self, link: Link, packet: Puback | Pubrec | Pubcomp) -> None:
        if self.world.is_wild:
            chance = self.rng.random()
            if chance < 0.3:
                self._late.append(packet)
                return
            if chance < 0.303:
                link.close(politely=False)
                return
        self._acknowledge(link, packet)

    def _acknowledge(self, link: Link, packet: Puback | Pubrec | Pubcomp) -> None:
        kind = type(packet).__name__.lower()
        self.world.note(facts.Acknowledged(self.name, link.number, packet.packet_id, kind))
        if not isinstance(packet, Pubrec):
            link.under_way.discard(packet.packet_id)
        link.send(packet)

    def _subscribe(self, link: Link, filters: dict[str, int]) -> None:
        packet_id = self._request(link, tuple(filters))
        ticket = self._requests[packet_id][0]
        self.world.note(facts.Subscribing(self.name, link.number, ticket, tuple(filters.items())))
        wanted = tuple(SubscribeFilter(f.encode(), q) for f, q in filters.items())
        link.send(Subscribe(packet_id, wanted))

    def _unsubscribe(self, link: Link, filters: tuple[str, ...]) -> None:
        packet_id = self._request(link, filters)
        ticket = self._requests[packet_id][0]
        self.world.note(facts.Unsubscribing(self.name, link.number, ticket, filters))
        link.send(Unsubscribe(packet_id, tuple(f.encode() for f in filters)))

    def _request(self, link: Link, filters: tuple[str, ...]) -> int:
        del link
        packet_id, self._next_id = self._next_id, self._next_id % 65_535 + 1
        self._requests[packet_id] = (self.world.next_ticket(), filters)
        return packet_id

    # -------------------------------------------------------------------------- living

    async def act(self) -> None:
        rng = self.rng
        await asyncio.sleep(rng.choice((0.002, 0.01, 0.03)))
        link = self.link
        if link is None or link.gone.is_set():
            return
        chance = rng.random()
        if chance < 0.5:
            self._catch_up(link)
        elif chance < 0.65:
            link.ping()
        elif chance < 0.72 and self.churn:
            self._change_subscriptions(link)
        elif chance < 0.75:
            await self._stall(link)
        if rng.random() < self.away:
            await self.change_connection()
        elif self.forgetful and rng.random() < 0.01:
            await self._forget()

    def _catch_up(self, link: Link) -> None:
        """Send acknowledgements that are late, some of them, in any order: not what
        [MQTT-4.6.0-2] wants of a client, but what clients with worker threads do."""
        late, self._late = self._late, []
        if self.rng.random() < 0.5:
            self.rng.shuffle(late)
        keep = self.rng.randrange(len(late) + 1) if self.rng.random() < 0.3 else 0
        for packet in late[keep:]:
            self._acknowledge(link, packet)
        self._late = late[:keep] + self._late

    def _change_subscriptions(self, link: Link) -> None:
        names = tuple(self.rng.sample(self.churn, self.rng.randrange(1, len(self.churn) + 1)))
        chance = self.rng.random()
        if chance < 0.4:
            self._unsubscribe(link, names)
        elif chance < 0.5:
            self._subscribe(link, dict(self.stable))  # again: nothing lost, nothing replayed
        else:
            self._subscribe(link, {name: self.rng.randrange(3) for name in names})

    async def _stall(self, link: Link) -> None:
        link.may_read.clear()
        try:
            await asyncio.sleep(self.rng.choice((0.05, 0.2)))
        finally:
            link.may_read.set()

    async def _forget(self) -> None:
        """Throw the session away, and begin a fresh one."""
        if self.link is not None:
            self.link.close(politely=True)
        if await self.connect(clean=True) and self.link is not None:
            self.link.disconnect()

    @property
    def is_ready(self) -> bool:
        """Whether it is connected and has the subscriptions that it never gives up."""
        return self.is_connected and self.stable.keys() <= self._granted

    async def drain(self) -> bool:
        """Receive and acknowledge everything up to the marker. False: it did not come in time."""
        end = asyncio.get_running_loop().time() + 6 * ANSWER_S
        while asyncio.get_running_loop().time() < end:
            if not (self.is_connected or await self.connect()):
                continue
            link = self.link
            assert link is not None
            self._catch_up(link)
            if self.saw_end.is_set() and not self._handshakes:
                # whoever takes over gets nothing of it again, and the connection is closed
                link.ping()
                await asyncio.sleep(0.1)
                if await self.connect():
                    await self.must_be_taken_over(link)
                    await asyncio.sleep(0.3)
                    return True
            await asyncio.sleep(0.02)
        return False


class Member(Subscriber):
    """A durable session that shares a subscription with others, and has the marker of its own."""

    def __init__(self, world: World, name: str, *, away: float) -> None:
        super().__init__(world, name, {SHARED: 2, END: 1}, away=away)
        self._heard_at = 0.0

    def arrived(self, link: Link, packet: Packet) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        super().arrived(link, packet)

    async def drain(self) -> bool:
        """Receive and acknowledge what the group has for it, until nothing more comes."""
        loop = asyncio.get_running_loop()
        end = loop.time() + 6 * ANSWER_S
        while loop.time() < end:
            if not (self.is_connected or await self.connect()):
                continue
            assert self.link is not None
            self._catch_up(self.link)
            is_quiet = loop.time() > self._heard_at + QUIET_S
            if self.saw_end.is_set() and is_quiet and not self._handshakes:
                return True
            await asyncio.sleep(0.02)
        return False

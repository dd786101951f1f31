"""Whatever an MQTT 5 client says: what the broker answers is MQTT 5 within the client's terms, and
nobody else notices. Hypothesis drives the whole connection: registry, session, router, store."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from broker_ext.authentication import Accepted, Challenge, method_of
from broker_ext.connection import Connection
from broker_ext.hub import Hub
from broker_ext.settings import Settings
from broker_ext.terms import Terms
from broker_ext.wire import (
    Auth,
    Connack,
    Connect,
    Decoder,
    Disconnect,
    Packet,
    Pingreq,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    SubscribeFilter,
    encode,
)
from broker_ext.wire.properties import (
    ASSIGNED_CLIENT_ID,
    AUTHENTICATION_DATA,
    AUTHENTICATION_METHOD,
    MESSAGE_EXPIRY_S,
    PACKET_BYTES_MAX,
    REASON_STRING,
    RECEIVE_MAX,
    REQUEST_PROBLEM_INFORMATION,
    SESSION_EXPIRY_S,
    TOPIC_ALIAS,
    TOPIC_ALIAS_MAX,
    USER_PROPERTY,
)
from storage.clock import ManualClock
from tests.storage.harness import Memory
from tests.wire import strategies

if TYPE_CHECKING:
    from broker_ext.authentication import Exchange
    from broker_ext.session import End, Session

TURNS = 12
"""Turns of the loop after which whatever was sent is answered."""


class Echo:
    """Asks once, and believes whoever answers."""

    asked = False

    async def proceed(self, data: bytes | None) -> Challenge | Accepted | None:
        if data == b"foe":
            return None
        if self.asked:
            return Accepted(b"", data)
        self.asked = True
        return Challenge(data)


class Guard:
    """Plugins that permit almost everything."""

    def __init__(self, *, slow: bool) -> None:
        self.slow = slow

    async def authenticate(self, connect: Connect) -> bytes | None:
        return None if connect.username == b"nobody" else b""

    def exchange(self, method: bytes, client_id: bytes) -> Exchange | None:
        del client_id
        return None if method == b"unknown" else Echo()

    async def may_publish(self, topic: bytes) -> bool:
        return topic != b"no"

    async def may_subscribe(self, topic_filter: bytes) -> bool:
        return topic_filter != b"no"

    async def may_receive(self, topic: bytes) -> bool:
        del topic
        return True

    def packet_received(self, packet: Packet) -> None: ...
    def packet_sent(self, data: bytes) -> None: ...
    def message_received(self, packet: Publish, *, permitted: bool | None) -> None: ...
    def subscribed(self, topic_filter: bytes, qos: int) -> None: ...
    def unsubscribed(self, topic_filter: bytes) -> None: ...
    def connected(self, session: Session) -> None: ...
    def disconnected(self, session: Session, end: End) -> None: ...
    def closed(self) -> None: ...


@dataclass
class Client:
    """A transport, and the judge of what is written to it."""

    connect: Connect
    closed: bool = False
    leaves: bool = False
    answered: bool = False
    packets: list[Packet] = field(default_factory=list)
    under_way: dict[int, int] = field(default_factory=dict)
    """Packet id -> QoS; 3 = QoS 2, received."""
    aliases: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.terms = Terms.of(self.connect)
        self.decoder = Decoder(server=False, version=5)

    # what an asyncio transport does
    def write(self, data: bytes) -> None:
        for raw in split(data):
            if self.terms.packet_bytes_max:
                assert len(raw) <= self.terms.packet_bytes_max
        new = self.decoder.feed(data)
        assert self.decoder.error is None
        assert not self.decoder.pending_bytes
        for packet in new:
            self.judge(packet)

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True

    abort = write_eof = close

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def judge(self, packet: Packet) -> None:
        if type(packet) is Auth:
            assert method_of(packet.properties) == method_of(self.connect.properties)
        elif not self.answered:
            assert type(packet) is Connack
            self.answered = True
            assigned = packet.properties is not None and packet.properties.get(ASSIGNED_CLIENT_ID)
            assert bool(assigned) == (not packet.reason and not self.connect.client_id)
        else:
            assert type(packet) is not Connack
            assert type(self.packets[-1]) is not Disconnect
        if type(packet) is Disconnect:
            assert packet.reason >= 0x80
        if type(packet) is Publish:
            self.delivered(packet)
        elif not self.terms.problems:
            properties: Properties | None = getattr(packet, "properties", None)
            said = {ident for ident, _ in properties.pairs} if properties is not None else set()
            assert not said & {REASON_STRING, USER_PROPERTY}
        self.packets.append(packet)

    def delivered(self, packet: Publish) -> None:
        alias = packet.properties.get(TOPIC_ALIAS) if packet.properties is not None else None
        if alias is not None:
            assert 0 < alias <= self.terms.aliases_max
            if packet.topic:
                self.aliases[alias] = packet.topic
            assert self.aliases[alias]
        else:
            assert packet.topic
        if packet.qos:
            assert packet.packet_id not in self.under_way
            self.under_way[packet.packet_id] = packet.qos
            assert len(self.under_way) <= self.terms.receive_maximum

    def says(self, packet: Packet) -> None:
        """What the client sends may settle what is under way."""
        match packet:
            case Puback() if self.under_way.get(packet.packet_id) == 1:
                del self.under_way[packet.packet_id]
            case Pubrec() if self.under_way.get(packet.packet_id) == 2:
                self.under_way[packet.packet_id] = 3
                if packet.reason >= 0x80:
                    del self.under_way[packet.packet_id]
            case Pubcomp() if self.under_way.get(packet.packet_id) == 3:
                del self.under_way[packet.packet_id]
            case Disconnect():
                self.leaves = True
            case _:
                pass


def split(data: bytes) -> list[bytes]:
    """Whole packets, by their fixed headers."""
    out: list[bytes] = []
    at = 0
    while at < len(data):
        length, shift, end = 0, 0, at + 1
        while True:
            length |= (data[end] & 127) << shift
            end += 1
            if data[end - 1] < 128:
                break
            shift += 7
        out.append(data[at : end + length])
        at = end + length
    return out


# ------------------------------------------------------------------------- what is drawn

topics = st.sampled_from((b"a", b"topic/1", b"topic/2", b"no", b"$SYS/x"))


@st.composite
def connects(draw: st.DrawFn) -> Connect:
    pairs: list[tuple[int, Any]] = []
    for ident, values in (
        (SESSION_EXPIRY_S, st.sampled_from((1, 100, 0xFFFF_FFFF))),
        (RECEIVE_MAX, st.integers(1, 4)),
        (PACKET_BYTES_MAX, st.sampled_from((20, 30, 60, 1000))),
        (TOPIC_ALIAS_MAX, st.integers(0, 3)),
        (REQUEST_PROBLEM_INFORMATION, st.integers(0, 1)),
        (USER_PROPERTY, st.just((b"k", b"v"))),
        (AUTHENTICATION_METHOD, st.sampled_from((b"m", b"m", b"unknown"))),
    ):
        if draw(st.booleans()):
            pairs.append((ident, draw(values)))
    drawn = draw(strategies.connects().filter(lambda c: c.version == 5))
    if draw(st.integers(0, 3)):
        drawn = drawn._replace(properties=Properties(tuple(pairs)) if pairs else None)
    return drawn._replace(client_id=draw(st.sampled_from((b"dev", b"dev", b""))))


@st.composite
def publishes(draw: st.DrawFn) -> Publish:
    qos = draw(st.integers(0, 2))
    pairs: list[tuple[int, Any]] = []
    if draw(st.booleans()):
        pairs.append((TOPIC_ALIAS, draw(st.integers(1, 5))))
    if draw(st.booleans()):
        pairs.append((MESSAGE_EXPIRY_S, draw(st.integers(0, 3))))
    if draw(st.booleans()):
        pairs.append((USER_PROPERTY, (b"key", b"value")))
    topic = draw(st.sampled_from((b"", b"a", b"topic/1"))) if pairs else draw(topics)
    flags = qos << 1 | draw(st.booleans())
    packet_id = draw(st.integers(1, 5)) if qos else 0
    payload = draw(st.sampled_from((b"", b"x", b"x" * 50)))
    return Publish(flags, topic, packet_id, payload, Properties(tuple(pairs)) if pairs else None)


subscribes = st.builds(
    lambda name, options, ident: Subscribe(
        9, (SubscribeFilter(name, options),), Properties(((11, ident),)) if ident else None
    ),
    st.sampled_from((b"#", b"topic/+", b"a", b"no")),
    st.sampled_from((0, 1, 2, 0x0D, 0x16, 0x2A)),
    st.integers(0, 2),
)
ACKNOWLEDGE = "acknowledge"
HEAR = "hear"
"""Somebody else publishes."""
LATER = "later"
auths = st.tuples(st.sampled_from((0x18, 0x18, 0x19)), st.sampled_from((b"m", b"n"))).flatmap(
    lambda drawn: st.sampled_from((None, b"", b"friend", b"foe")).map(
        lambda data: Auth(
            drawn[0],
            Properties(
                (
                    (AUTHENTICATION_METHOD, drawn[1]),
                    *(() if data is None else ((AUTHENTICATION_DATA, data),)),
                )
            ),
        )
    )
)
spoken = st.one_of(
    auths,
    publishes(),
    publishes(),
    subscribes,
    st.sampled_from((ACKNOWLEDGE, ACKNOWLEDGE, HEAR, HEAR, LATER)),
    st.integers(1, 5).map(Pubrel),
    strategies.from_clients(5),
)
noise = st.one_of(
    st.binary(min_size=1, max_size=12),
    st.tuples(strategies.from_clients(5), st.integers(0, 10**6), st.integers(0, 255)).map(
        lambda drawn: flipped(encode(drawn[0], 5), drawn[1], drawn[2])
    ),
)
listens = Subscribe(1, (SubscribeFilter(b"#", 2),))
steps = st.lists(spoken, max_size=12)
stories = st.lists(
    st.tuples(connects(), steps | steps.map(lambda more: [listens, *more]), st.none() | noise),
    min_size=1,
    max_size=3,
)


def flipped(data: bytes, at: int, value: int) -> bytes:
    at %= len(data)
    return data[:at] + bytes((value,)) + data[at + 1 :]


# ------------------------------------------------------------------------------- the test


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def act(clock: ManualClock, client: Client, connection: Connection, step: Any) -> None:
    if step == LATER:
        clock.advance(ms=1_000)
        return
    if step == HEAR:
        for i in range(6):
            connection.hub.router.publish(b"topic/%d" % (i % 4), b"x" * i, i % 3, origin=b"other")
        await turns()
        return
    if step == ACKNOWLEDGE:
        for packet_id, qos in list(client.under_way.items()):
            await say(client, connection, {1: Puback, 2: Pubrec, 3: Pubcomp}[qos](packet_id))
        return
    await say(client, connection, step)


async def say(client: Client, connection: Connection, packet: Packet) -> None:
    client.says(packet)
    data = encode(packet, 5)
    connection.data_received(data[: len(data) // 2])
    connection.data_received(data[len(data) // 2 :])
    await turns()


async def tell(
    drawn: list[tuple[Connect, list[Any], bytes | None]], bugs: Bugs, *, slow: bool
) -> None:
    asyncio.get_running_loop().set_exception_handler(bugs.in_callback)
    clock = ManualClock()
    settings = Settings(receive_maximum=3, topic_alias_maximum=4, max_queued_messages=5)
    hub = Hub(Memory(None).start(), settings, clock)
    await hub.start()
    await hub.load()
    for connect, steps, end in drawn:
        client = Client(connect)
        connection = Connection(hub, client, Guard(slow=slow), peername="fuzz")
        await say(client, connection, connect)
        for step in steps:
            if client.closed:
                break
            await act(clock, client, connection, step)
        if end is not None and not client.closed:
            connection.data_received(end)
            await turns()
            client.leaves |= b"\xe0" in end
        accepted = any(type(p) is Connack and not p.reason for p in client.packets)
        if client.closed and accepted and not client.leaves:
            assert type(client.packets[-1]) is Disconnect, client.packets
        connection.connection_lost(None)
        await turns()
    await bystanders_notice_nothing(hub)
    await hub.committer.drain()
    assert await hub.store.check() == []
    await hub.stop()


async def bystanders_notice_nothing(hub: Hub) -> None:
    connect = Connect(5, b"bystander", clean_start=True)
    client = Client(connect)
    connection = Connection(hub, client, Guard(slow=False), peername="bystander")
    subscribe = Subscribe(1, (SubscribeFilter(b"quiet", 1),))
    for packet in (connect, subscribe, Publish(2, b"quiet", 1, b"x"), Pingreq()):
        await say(client, connection, packet)
    assert [type(p).__name__ for p in client.packets][:2] == ["Connack", "Suback"]
    assert sorted(type(p).__name__ for p in client.packets[2:]) == ["Pingresp", "Puback", "Publish"]


class Bugs(logging.Handler):
    """Exceptions that were caught and logged: each is a bug."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def in_callback(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        del loop
        self.found.append(f"{context['message']}: {context.get('exception')!r}")

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(self.format(record))


@given(stories, st.booleans())
def test_whatever_a_client_says_it_is_answered_within_its_terms(
    drawn: list[tuple[Connect, list[Any], bytes | None]], slow: bool
) -> None:
    bugs = Bugs()
    log = logging.getLogger("amqtt_durable")
    log.addHandler(bugs)
    try:
        asyncio.run(tell(drawn, bugs, slow=slow))
    finally:
        log.removeHandler(bugs)
    assert not bugs.found, bugs.found[0]

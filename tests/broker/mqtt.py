"""A broker behind real sockets, and a raw client: what the tests of sessions use.

The broker is the real ``Hub`` with the real ``Connection``; only amqtt is not there: a ``Guard``
that permits everything, unless it is told otherwise, stands in its place. Time stands still
unless a test moves it, and what the hub does by the clock is done when a test calls for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

from broker_ext.connection import WRITE_HIGH_BYTES, Connection
from broker_ext.hub import Hub
from broker_ext.settings import Settings
from broker_ext.terms import FOR_EVER
from broker_ext.wire import (
    Connack,
    Connect,
    ConnectWill,
    Decoder,
    Disconnect,
    Pingreq,
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
from broker_ext.wire.properties import SESSION_EXPIRY_S
from storage.clock import ManualClock
from storage.memory import MemoryStore
from tests.storage import faults
from tests.storage.faults import FaultyStore
from tests.storage.harness import Memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from broker_ext.authentication import Exchange
    from broker_ext.durable import DurableSession
    from broker_ext.session import End, Session
    from broker_ext.wire import Packet
    from storage.api import Snapshot
    from tests.storage.harness import Backend

__all__ = ["Broker", "Client", "running", "will"]

P = TypeVar("P")

PATIENCE_S: Final = 20.0
"""A packet that has not come by then will not come."""


def will(topic: bytes, payload: bytes = b"gone", qos: int = 1, *, retain: bool = False) -> Any:
    """A will for ``Client.connect``."""
    return ConnectWill(topic, payload, qos, retain)


@dataclass(eq=False)
class Guard:
    """amqtt's plugins, as a test wants them. Refusals and gates are looked up in the broker."""

    broker: Broker
    slow: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def authenticate(self, connect: Connect) -> bytes | None:
        if self.broker.authenticating is not None:
            await self.broker.authenticating.wait()
        user = connect.username or b""
        refused = user == b"nobody" or not (user or self.broker.anonymous)
        return None if refused else user

    def exchange(self, method: bytes, client_id: bytes) -> Exchange | None:
        make = self.broker.methods.get(method)
        return make(client_id) if make is not None else None

    async def may_publish(self, topic: bytes) -> bool:
        return not topic.startswith(b"forbidden")

    async def may_subscribe(self, topic_filter: bytes) -> bool:
        gate = self.broker.slow_filters.get(topic_filter)
        if gate is not None:
            await gate.wait()
        return not topic_filter.startswith(b"forbidden")

    async def may_receive(self, topic: bytes) -> bool:
        return not topic.startswith(b"secret")

    def packet_received(self, packet: Packet) -> None:
        pass

    def packet_sent(self, data: bytes) -> None:
        pass

    def message_received(self, packet: Publish, *, permitted: bool | None) -> None:
        pass

    def subscribed(self, topic_filter: bytes, qos: int) -> None:
        pass

    def unsubscribed(self, topic_filter: bytes) -> None:
        pass

    def connected(self, session: Session) -> None:
        pass

    def disconnected(self, session: Session, end: End) -> None:
        self.broker.ends.append((session.client_id, end.name))

    def closed(self) -> None:
        self.gone.set()


class Broker:
    """A hub over a store that fails when it is told to, behind a socket."""

    def __init__(self, backend: Backend | None = None, **settings: Any) -> None:
        self.backend = backend or Memory(None)  # type: ignore[arg-type]
        self.settings = Settings(**settings)
        self.clock = ManualClock()
        self.slow = False
        self.anonymous = True
        self.timers = False
        self.authenticating: asyncio.Event | None = None
        self.slow_filters: dict[bytes, asyncio.Event] = {}
        self.methods: dict[bytes, Callable[[bytes], Exchange]] = {}
        self.ends: list[tuple[bytes, str]] = []
        self.clients: list[Client] = []
        self.guards: dict[str, Guard] = {}
        self.store: FaultyStore
        self.hub: Hub
        self._server: asyncio.Server
        self._names = count(1)

    async def start(self, **settings: Any) -> None:
        if settings:
            self.settings = Settings(**settings)
        self.store = FaultyStore(self.backend.start())
        self.hub = Hub(self.store, self.settings, self.clock)
        await self.hub.start()
        await self.hub.load()
        if not self.timers:
            await self._stop_timers()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Accepted(self), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop_timers(self) -> None:
        for task in self.hub._timers:
            task.cancel()
        await asyncio.gather(*self.hub._timers, return_exceptions=True)
        self.hub._timers.clear()

    async def stop(self) -> None:
        """In good order."""
        self._server.close()
        await self.hub.stop()
        await self._all_gone()

    async def crash(self) -> None:
        """As SIGKILL: what is not committed is lost, and nothing is written any more."""
        await self._stop_timers()
        self._server.close()
        for sink in self.hub.sinks.sinks:
            await sink.abandon()
        self.hub.committer.close()
        self.hub.handles.close()
        if self.store._pump is not None:
            self.store._pump.cancel()
        if isinstance(self.store.inner, MemoryStore):
            faults.crash(self.store.inner)
        else:
            await self.store.inner.close()
        for gate in self.store._read_gates.values():
            gate.release()
        for connection in list(self.hub.connections):
            connection.transport.abort()
        await self._all_gone()

    async def _all_gone(self) -> None:
        for connection in list(self.hub.connections):
            connection.transport.abort()
        for guard in list(self.guards.values()):
            await asyncio.wait_for(guard.gone.wait(), PATIENCE_S)
        self.guards.clear()

    async def restart(self, **settings: Any) -> None:
        await self.stop()
        await self.start(**settings)

    async def crash_and_restart(self, **settings: Any) -> None:
        await self.crash()
        await self.start(**settings)

    # ------------------------------------------------------------------------------ clients

    async def dial(self) -> Client:
        """A socket, nothing sent yet."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        client = Client(self, reader, writer)
        self.clients.append(client)
        return client

    async def connect(self, client_id: bytes | None = None, **options: Any) -> Client:
        """A client that is connected; durable unless ``clean``."""
        if client_id is None:
            client_id = b"client-%d" % next(self._names)
        client = await self.dial()
        client.connack = await client.connect(client_id, **options)
        assert client.connack.reason == 0, client.connack
        return client

    async def subscriber(
        self, client_id: bytes, *filters: bytes | tuple[bytes, int], **options: Any
    ) -> Client:
        """A durable client, connected and subscribed (QoS 1 where nothing is said)."""
        client = await self.connect(client_id, **options)
        await client.subscribe(*filters)
        return client

    async def sleeper(self, client_id: bytes, *filters: bytes | tuple[bytes, int]) -> None:
        """A durable session at rest."""
        client = await self.subscriber(client_id, *filters)
        await client.disconnect()

    # ------------------------------------------------------------------------------ looking

    async def turns(self, until: Callable[[], object]) -> None:
        """Let the loop turn until something is so that nobody signals."""
        async with asyncio.timeout(PATIENCE_S):
            while not until():  # noqa: ASYNC110 - a turn, not a time
                await asyncio.sleep(0)

    def session(self, client_id: bytes) -> DurableSession:
        return self.hub.registry.owners[client_id]  # type: ignore[return-value]

    async def snapshot(self, client_id: bytes) -> Snapshot | None:
        await self.hub.committer.drain()
        return await self.store.inner.snapshot(client_id)

    def is_idle(self, client_id: bytes) -> bool:
        """Whether a connected durable session has settled everything there is for it."""
        session = self.session(client_id)
        return (
            session.backlog.live
            and not session.out.flights
            and session.backlog.reading is None
            and session._fetching is None
        )

    async def unsettled(self, client_id: bytes) -> list[int]:
        """Packet ids of the stored deliveries."""
        snapshot = await self.snapshot(client_id)
        assert snapshot is not None
        return [d.packet_id for claim in snapshot.claims for d in claim.deliveries]

    async def history(self) -> list[bytes]:
        """Payloads of what is stored, in order."""
        await self.hub.committer.drain()
        chunk = await self.store.inner.read(
            0, lambda _: 2, entries_max=1_000_000, bytes_max=1 << 30
        )
        return [entry.payload for entry, _ in chunk.entries]


class _Accepted(asyncio.Protocol):
    """Becomes a ``Connection`` once its transport is known."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        host, port = transport.get_extra_info("peername")[:2]
        guard = Guard(self._broker, self._broker.slow)
        name = f"{host}:{port}"
        self._broker.guards[name] = guard
        transport.set_protocol(Connection(self._broker.hub, transport, guard, peername=name))


class Client:
    """A raw MQTT client, 3.1.1 unless it connects with ``version=5``: it sends what it is told to,
    and acknowledges only then."""

    def __init__(
        self, broker: Broker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.broker = broker
        self.connack: Connack
        self.client_id = b""
        self.version = 4
        self._reader = reader
        self._writer = writer
        self._decoder = Decoder(server=False)
        self._packets: deque[Packet] = deque()
        self._ids = count(1)
        host, port = writer.get_extra_info("sockname")[:2]
        self._name = f"{host}:{port}"

    # ------------------------------------------------------------------------------ sending

    def send(self, *packets: Packet) -> None:
        self._writer.write(b"".join(encode(packet, self.version) for packet in packets))

    def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    def publish(
        self,
        topic: bytes,
        payload: bytes = b"",
        qos: int = 1,
        *,
        packet_id: int | None = None,
        retain: bool = False,
        dup: bool = False,
        properties: Properties | None = None,
    ) -> int:
        """Send a PUBLISH; returns its packet id."""
        number = (packet_id or next(self._ids)) if qos else 0
        self.send(Publish(8 * dup | qos << 1 | retain, topic, number, payload, properties))
        return number

    def reads(self, version: int) -> None:
        """From now on it speaks this version."""
        self.version = version
        self._decoder = Decoder(server=False, version=version)

    async def flushed(self) -> None:
        await self._writer.drain()

    # ---------------------------------------------------------------------------- receiving

    async def any(self) -> Any:
        """The next packet."""
        while not self._packets:
            async with asyncio.timeout(PATIENCE_S):  # wait_for may swallow a cancellation
                data = await self._reader.read(65_536)
            assert data, "the broker closed the connection"
            self._packets.extend(self._decoder.feed(data))
            assert self._decoder.error is None
        return self._packets.popleft()

    async def next(self, kind: type[P]) -> P:
        """The next packet, which has to be of ``kind``."""
        packet = await self.any()
        assert type(packet) is kind, packet
        return packet

    async def quiet(self) -> None:
        """Nothing has been sent to us: the answer to a PINGREQ is what comes next."""
        self.send(Pingreq())
        await self.next(Pingresp)

    async def until_ping(self) -> list[Any]:
        """Everything that comes before the answer to a PINGREQ."""
        self.send(Pingreq())
        got: list[Any] = []
        while type(packet := await self.any()) is not Pingresp:
            got.append(packet)
        return got

    async def publishes(self, number: int, *, ack: bool = True) -> list[Publish]:
        """The next ``number`` messages, acknowledged through PUBCOMP if ``ack``."""
        got: list[Publish] = []
        due = 0  # PUBRELs that a PUBREC of ours will bring
        while len(got) < number or due:
            packet = await self.any()
            if type(packet) is Publish:
                got.append(packet)
                if ack and packet.qos == 1:
                    self.send(Puback(packet.packet_id))
                elif ack and packet.qos == 2:
                    due += 1
                    self.send(Pubrec(packet.packet_id))
            else:
                assert type(packet) is Pubrel, packet
                due -= 1
                self.send(Pubcomp(packet.packet_id))
        return got

    async def payloads(self, number: int) -> list[bytes]:
        return [packet.payload for packet in await self.publishes(number)]

    async def closed(self) -> None:
        """Wait until the broker has closed the connection."""
        while True:
            try:
                data = await asyncio.wait_for(self._reader.read(65_536), PATIENCE_S)
            except ConnectionError:
                return
            if not data:
                return
            self._packets.extend(self._decoder.feed(data))

    async def gone(self) -> None:
        """Wait until the broker has noticed that we are gone."""
        guard = self.broker.guards.get(self._name)
        if guard is not None:
            await asyncio.wait_for(guard.gone.wait(), PATIENCE_S)

    # ---------------------------------------------------------------------------- exchanges

    def connect_packet(
        self,
        client_id: bytes,
        *,
        clean: bool = False,
        user: bytes | None = None,
        password: bytes | None = None,
        keep_alive: int = 0,
        will: ConnectWill | None = None,
        version: int = 4,
        expiry: int | None = None,
        properties: Properties | None = None,
    ) -> Connect:
        """Version 5: ``expiry`` is the Session Expiry Interval: for ever unless ``clean``."""
        if version == 5:
            if expiry is None:
                expiry = 0 if clean else FOR_EVER
            pairs = properties.pairs if properties is not None else ()
            properties = Properties(((SESSION_EXPIRY_S, expiry), *pairs))
        return Connect(version, client_id, clean, keep_alive, user, password, will, properties)

    async def connect(self, client_id: bytes, **options: Any) -> Connack:
        self.client_id = client_id
        packet = self.connect_packet(client_id, **options)
        self.reads(packet.version)
        self.send(packet)
        return await self.next(Connack)

    async def subscribe(
        self, *filters: bytes | tuple[bytes, int], properties: Properties | None = None
    ) -> bytes:
        """Returns the return codes. With a filter: its QoS, or the whole options byte of MQTT 5."""
        number = self.send_subscribe(*filters, properties=properties)
        suback = await self.next(Suback)
        assert suback.packet_id == number
        return suback.reasons

    def send_subscribe(
        self, *filters: bytes | tuple[bytes, int], properties: Properties | None = None
    ) -> int:
        """As ``subscribe``, but the answer is not waited for. Returns the packet id."""
        wanted = [f if isinstance(f, tuple) else (f, 1) for f in filters]
        number = next(self._ids)
        options = tuple(SubscribeFilter(f, byte) for f, byte in wanted)
        self.send(Subscribe(number, options, properties))
        return number

    async def unsubscribe(self, *filters: bytes) -> bytes:
        """Returns the reason codes (none before MQTT 5)."""
        number = next(self._ids)
        self.send(Unsubscribe(number, filters))
        unsuback = await self.next(Unsuback)
        assert unsuback.packet_id == number
        return unsuback.reasons

    async def deliver(self, topic: bytes, *payloads: bytes, qos: int = 1) -> None:
        """Publish, and finish each exchange."""
        for payload in payloads:
            self.publish(topic, payload, qos)
        for _ in payloads if qos else ():
            if qos == 1:
                await self.next(Puback)
            else:
                self.send(Pubrel((await self.next(Pubrec)).packet_id))
        for _ in payloads if qos == 2 else ():
            await self.next(Pubcomp)

    async def disconnect(self, reason: int = 0, properties: Properties | None = None) -> None:
        self.send(Disconnect(reason, properties))
        await self.closed()
        await self.close()
        await self.gone()

    async def cut(self) -> None:
        """The network is gone, and the broker has noticed."""
        self._writer.transport.abort()
        await self.gone()

    async def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def running(
    backend: Backend | None = None,
    *,
    prepare: Callable[[Broker], None] | None = None,
    **settings: Any,
) -> AsyncIterator[Broker]:
    """A broker that runs; at the end its store is sound and no connection is left."""
    broker = Broker(backend, **settings)
    if prepare is not None:
        prepare(broker)
    await broker.start()
    try:
        yield broker
        broker.store.heal()
        await asyncio.wait_for(broker.hub.committer.drain(), PATIENCE_S)
        await asyncio.wait_for(broker.hub.handles.drain(), PATIENCE_S)
        assert await broker.store.check() == []
    finally:
        broker.store.heal()
        for client in broker.clients:
            client._writer.transport.abort()
        await broker.stop()
        assert not broker.hub.connections

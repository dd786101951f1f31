"""Another MQTT broker as a test wants it: a scripted one, on a real socket."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

from broker_ext.wire import (
    VERSIONS_ALL,
    Connack,
    Connect,
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
    encode,
)
from broker_ext.wire.properties import RECEIVE_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["Remote", "scripted"]

PATIENCE_S = 20.0


class Remote:
    """Takes CONNECT and PUBLISH.

    seen: every PUBLISH, repetitions included. taken: those that it took, as a broker does: a QoS 2
    packet id that it has already is not taken again, as long as the session lives.
    decide: PUBLISH -> reason code, "drop" (close the connection), or "keep" (no answer for now).
    """

    def __init__(self, *, receive_max: int = 0, refuse: int = 0) -> None:
        self.port = 0
        self.receive_max = receive_max
        self.refuse = refuse
        self.connects: list[Connect] = []
        self.seen: list[Publish] = []
        self.taken: list[Publish] = []
        self.most_under_way = 0
        self.decide: Callable[[Publish], int | str] = lambda _: 0
        self.ids: set[int] = set()
        self.kept: list[tuple[_Peer, Publish]] = []
        self.peers: set[_Peer] = set()
        self.mute = False
        self.completes = True
        self.uncompleted = 0
        self._server: asyncio.Server | None = None
        self._changed = asyncio.Event()

    async def start(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Peer(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    def cut(self) -> None:
        """Every connection is lost, and what was kept on it."""
        for peer in list(self.peers):
            peer.transport.abort()
        self.kept.clear()

    def answer_kept(self) -> None:
        kept, self.kept = self.kept, []
        for peer, packet in kept:
            peer.take(packet, 0)

    def changed(self) -> None:
        self.most_under_way = max(self.most_under_way, len(self.kept))
        self._changed.set()

    async def until(self, condition: Callable[[Self], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    def payloads(self) -> list[bytes]:
        return [packet.payload for packet in self.taken]


class _Peer(asyncio.Protocol):
    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.decoder = Decoder(versions=VERSIONS_ALL)
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.remote.peers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.remote.peers.discard(self)

    def send(self, packet: Any) -> None:
        self.transport.write(encode(packet, self.decoder.version))

    def data_received(self, data: bytes) -> None:
        for packet in self.decoder.feed(data):
            if self.transport.is_closing() or self.remote.mute:
                return
            self._handle(packet)
            self.remote.changed()

    def _handle(self, packet: Any) -> None:
        remote = self.remote
        match packet:
            case Connect():
                remote.connects.append(packet)
                if packet.clean_start:
                    remote.ids.clear()
                properties = None
                if packet.version == 5 and remote.receive_max:
                    properties = Properties(((RECEIVE_MAX, remote.receive_max),))
                self.send(Connack(bool(remote.ids), remote.refuse, properties))
                if remote.refuse:
                    self.transport.close()
            case Publish():
                remote.seen.append(packet)
                verdict = remote.decide(packet)
                if verdict == "drop":
                    self.transport.abort()
                elif verdict == "keep":
                    remote.kept.append((self, packet))
                elif isinstance(verdict, int):
                    self.take(packet, verdict)
            case Pubrel():
                self._complete(packet.packet_id)
            case Pingreq():
                self.send(Pingresp())
            case Disconnect():
                self.transport.close()

    def _complete(self, packet_id: int) -> None:
        remote = self.remote
        known = packet_id in remote.ids
        remote.ids.discard(packet_id)
        if remote.completes:
            self.send(Pubcomp(packet_id, 0 if known or self.decoder.version < 5 else 0x92))
        else:
            remote.uncompleted += 1

    def take(self, packet: Publish, reason: int) -> None:
        remote = self.remote
        is_again = packet.qos == 2 and packet.packet_id in remote.ids
        if reason < 0x80 and not is_again:
            remote.taken.append(packet)
        if packet.qos == 1:
            self.send(Puback(packet.packet_id, reason))
        elif packet.qos == 2:
            if reason < 0x80:
                remote.ids.add(packet.packet_id)
            self.send(Pubrec(packet.packet_id, reason))


@asynccontextmanager
async def scripted(**options: Any) -> AsyncIterator[Remote]:
    remote = Remote(**options)
    await remote.start()
    try:
        yield remote
    finally:
        await remote.stop()
